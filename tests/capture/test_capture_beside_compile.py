"""Capture where torch.compile has run: it notes of every module when it was made, by its address."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from ladder.capture import capture


class Stack(nn.Module):
    """Layers of which a slice, which is a new module, is run; its state is set, and looked up by address."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.known = {id(self.layers): 2.0}
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor, nn.Module]:
        self.calls += 1
        part = self.layers[:2]
        for layer in self.layers[1:]:
            x = layer(x)
        return x * self.known[id(self.layers)], part


@pytest.fixture
def compiling() -> Iterator[Any]:
    """The module of torch.compile that patches modules, which undoes it in the end."""
    from torch._dynamo import mutation_guard

    made, state = nn.Module.__init__, nn.Module.__setstate__
    torch.compile(nn.Linear(2, 2), backend="eager")(torch.ones(2, 2))
    mutation_guard.install_generation_tagging_init()
    yield mutation_guard
    torch._dynamo.reset()
    nn.Module.__init__, nn.Module.__setstate__ = made, state  # type: ignore[method-assign]
    nn.Module.___needs_generation_tag_patch = True  # type: ignore[attr-defined]


def test_modules_made_while_it_runs(compiling: Any) -> None:
    model = Stack()
    compiling.ensure_patched(Stack)
    fast = capture(model)
    with torch.no_grad():
        for number in range(6):
            x = torch.full((2, 4), float(number))
            (found, part), (expected, _) = fast(x), model(x)
            assert compiling.GenerationTracker.check(part)
            assert (torch.equal(found, expected), model.calls) == (True, 2 * number + 2)
    assert (fast.outcome, fast.calls["eager"]) == ("whole", 0), fast.explain()
    assert len(fast.records) <= 3


def test_the_address_of_what_comes_and_goes() -> None:
    def same(x: Tensor, y: Tensor) -> tuple[bool, Tensor]:
        return id(x) == id(y), x + y

    fast = capture(same)
    for number in range(3):
        x, y = torch.full((2,), float(number)), torch.ones(2)
        assert fast(x, y)[0] is False
        assert fast(x, x)[0] is True


def test_functions_that_torch_compiles(compiling: Any) -> None:
    """A call of one is a part of the graph, as it is under torch.compile."""
    inner = torch.compile(lambda x, n: torch.relu(x) * n, backend="eager")

    def program(x: Tensor) -> Tensor:
        return inner(x, 3) + inner(x, n=2)

    fast = capture(program)
    for number in range(3):
        x = torch.full((2,), float(number) - 1)
        assert torch.equal(fast(x), program(x))
    assert (fast.outcome, len(fast.records)) == ("whole", 1), fast.explain()


def test_torch_compile_around_a_captured_function() -> None:
    """As transformers' ``generate`` over a static cache on a GPU: it leaves what is captured as it is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model.forward = fast = capture(model.forward)  # type: ignore[method-assign]
    around = torch.compile(model, backend="eager")
    with torch.no_grad():
        for number in range(3):
            x = torch.full((2, 4), float(number))
            assert torch.equal(around(x), model[1](model[0](x)))
    torch._dynamo.reset()
    assert (fast.outcome, len(fast.records)) == ("whole", 1)


def test_captured_calls_before_torch_compile_is_imported() -> None:
    """A kept plan is found and runs without it, which takes 3 s to import; it leaves such calls all the same.

    `make_fx` of torch 2.13 imports it, so that a plan which is made does too: here in a process before.
    """
    first = """
import torch, ladder
from torch import nn

fast = ladder.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
with torch.no_grad():
    fast(torch.ones(2, 4))
"""
    code = """
import sys, torch, ladder
from torch import nn

fast, x = ladder.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU())), torch.ones(2, 4)
with torch.no_grad():
    fast(x), fast(x)
    expected = fast(x)
    assert "torch._dynamo" not in sys.modules
    graphs = []
    keep = lambda graph, _: graphs.append(graph) or graph.forward
    around = torch.compile(lambda x: fast(x) + 1, backend=keep)
    for _ in range(2):
        assert torch.equal(around(x), expected + 1)
(graph,) = graphs
assert not list(graph.named_modules())[1:], graph
assert fast.outcome == "whole", fast.explain()
"""
    for program in (first, code):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_a_checkpoint_of_torch_around_a_captured_function() -> None:
    """Torch ends the second forward pass by an exception once it has what it needs."""
    captured = capture(_scores)
    for x in torch.randn(3, 2, 4):
        slopes = []
        for function in (_scores, captured):
            given = x.clone().requires_grad_()
            torch.utils.checkpoint.checkpoint(function, given, use_reentrant=False).square().sum().backward()
            slopes.append(given.grad)
        assert torch.equal(*slopes)


def _scores(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x * 2 + 1, -1)


def test_what_is_raised_only_beneath_a_compiler_is_not_raised() -> None:
    """A program that leaves something out where a compiler traces it is run as it is where that fails."""

    def scaled(x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        if not torch.compiler.is_compiling() and mask is None:
            mask = torch.ones(x.shape[0])
        return x * mask.shape[0]

    fast = capture(scaled)
    for size in (3, 3, 4, 5):
        assert torch.equal(fast(torch.ones(size)), torch.full((size,), float(size)))
    assert (fast.outcome, fast.calls["eager"]) == ("whole", 0)


@pytest.mark.parametrize("left", [True, False])
def test_a_state_that_is_left_again_is_no_change(left: bool) -> None:
    """As transformers' collector of outputs, which is entered before a model and left when it raises."""
    state = SimpleNamespace(active=False, entered=0)

    def scaled(x: torch.Tensor, mask: Any = None) -> torch.Tensor:
        state.active = True
        state.entered += not left
        try:
            if not torch.compiler.is_compiling() and mask is None:
                mask = torch.ones(x.shape[0])
            return x * mask.shape[0]
        finally:
            state.active = False

    fast = capture(scaled)
    if left:
        for size in (3, 3, 4, 5):
            assert torch.equal(fast(torch.ones(size)), torch.full((size,), float(size)))
        assert (fast.outcome, state.active) == ("whole", False)
    else:  # it would be done twice
        with pytest.raises(AttributeError, match="shape"):
            fast(torch.ones(3))
        assert state.entered == 1


def test_what_is_raised_anyway_is_raised_once() -> None:
    def refused(x: torch.Tensor, log: list[bool]) -> None:
        log.append(torch.compiler.is_compiling())
        raise ValueError("in any case")

    def checked(x: torch.Tensor, log: list[bool]) -> None:
        if torch.compiler.is_compiling():
            raise ValueError("in any case")
        raise ValueError("in any case")

    for function, told in ((refused, [True]), (checked, [])):
        fast = capture(function)
        for _ in range(3):
            log: list[bool] = []
            with pytest.raises(ValueError, match="in any case"):
                fast(torch.ones(2), log)
            assert log == told


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padded_rows_of_torchs_encoder_are_eagers() -> None:
    """Without a compiler its fast path gives zeros in padded rows, if all padding is at the end."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1, norm=nn.LayerNorm(8)).eval()
    fast = capture(model)
    with torch.no_grad():
        for rows, at_end in ((2, True), (2, True), (3, True), (2, False), (2, True)):
            x = torch.randn(rows, 4, 8)
            padded = torch.arange(4)[None] >= torch.arange(1, rows + 1)[:, None]
            padded = padded if at_end else padded.flip(1)
            wanted = model(x, src_key_padding_mask=padded)
            torch.testing.assert_close(fast(x, src_key_padding_mask=padded), wanted)
            bias = model.norm.bias.expand_as(wanted)
            assert torch.equal(wanted[padded], bias[padded]) == at_end


@pytest.fixture
def opaque() -> Iterator[Any]:
    """A function that no interpreter follows, of which torch.compile was told to make one node."""

    def folded(x: Tensor, other: Tensor, *, times: int) -> Tensor:
        rows = [int(extent) for extent in x.shape]
        return (x * times).reshape(-1, rows[-1]) + eval("other", {"other": other})

    yield torch.compiler.allow_in_graph(folded)
    torch._dynamo.reset()


def test_what_is_allowed_in_graphs_is_one_operator_of_these_extents(opaque: Any) -> None:
    def program(x: Tensor, other: Tensor) -> Tensor:
        return opaque(x.sin(), other, times=3).cos()  # type: ignore[no-any-return]

    fast = capture(program)
    for number in (2, 2, 3, 4, 2, 5):
        x, other = torch.randn(number, 3, 4), torch.randn(4)
        assert torch.equal(fast(x, other), program(x, other))
    assert (fast.outcome, fast.calls["eager"]) == ("whole", 0), fast.explain()
    assert {node.target for graph in fast.graphs for node in graph.graph.nodes} >= {opaque}


def test_what_torch_allows_of_einops_is_followed() -> None:
    """Some releases of torch allow it in graphs as one operator, but ``pack`` gives shapes, too."""

    def pack(tensors: list[Tensor]) -> tuple[Tensor, list[torch.Size]]:
        return torch.cat([x.flatten() for x in tensors]), [x.shape for x in tensors]

    torch.compiler.allow_in_graph(pack)
    pack.__module__ = "einops.packing"
    try:

        def program(x: Tensor) -> Tensor:
            packed, shapes = pack([x.sin(), x.cos()])
            return packed[: shapes[0].numel()].reshape(shapes[1])

        fast = capture(program)
        for number in (2, 3, 2):
            x = torch.randn(number, 3)
            assert torch.equal(fast(x), program(x))
        assert (fast.outcome, fast.calls["eager"]) == ("whole", 0), fast.explain()
        assert pack not in {node.target for graph in fast.graphs for node in graph.graph.nodes}
    finally:
        torch._dynamo.reset()


def test_modules_of_torch_that_a_program_loads_break_no_graph() -> None:
    code = """
import importlib, sys, torch
from ladder.capture import capture

def fn(x):
    from torch.utils import show_pickle
    module = importlib.import_module(".bundled_inputs", package="torch.utils")
    return x + len(show_pickle.__name__) + len(module.__name__)

captured = capture(fn)
assert not {"torch.utils.show_pickle", "torch.utils.bundled_inputs"} & sys.modules.keys()
for _ in range(3):
    assert captured(torch.ones(2)).tolist() == [50.0, 50.0]
assert (captured.outcome, captured.calls["recorded"]) == ("whole", 1), captured.explain()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_imports_of_modules_that_are_not_loaded_and_of_what_is_not_there() -> None:
    code = """
import torch
from ladder.capture import capture

def loads(x):
    from wsgiref import headers
    return x + len(headers.__name__)

def lacks(x):
    try:
        from wsgiref import nothing
    except ImportError as error:
        return x, str(error), error.name, error.path

captured = capture(loads)
for _ in range(3):
    assert captured(torch.ones(2)).tolist() == [16.0, 16.0]
captured = capture(lacks)
for _ in range(3):
    assert str(captured(torch.ones(2))) == str(lacks(torch.ones(2)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _packed(positions: torch.Tensor) -> torch.Tensor | None:
    steps = torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1)
    found = (steps != 1).cumsum(-1)
    if not torch.compiler.is_compiling() and (found[:, -1] == 0).all():
        return None
    return found


_packed.__module__, _packed.__qualname__ = "transformers.masking_utils", "find_packed_sequence_indices"
POSITIONS: dict[str, Callable[[int], torch.Tensor]] = {
    "counting": lambda length: (torch.arange(length) + 1).unsqueeze(0),
    "repeated": lambda length: (torch.arange(length) + 1).unsqueeze(0).expand(2, -1),
    "apart": lambda length: torch.arange(0, 2 * length, 2).unsqueeze(0),
    "cycling": lambda length: (torch.arange(length) % 4).unsqueeze(0),
    "alike": lambda length: torch.arange(1).unsqueeze(0).expand(2, length),
}


@pytest.mark.parametrize("kind", POSITIONS)
def test_packed_sequences_of_transformers_are_found_where_positions_do_not_count_up(kind: str) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, bool]:
        found = _packed(POSITIONS[kind](x.shape[1]))
        return (x, True) if found is None else (x + found, False)

    captured = capture(fn)
    for length in (6, 6, 7, 9):
        x = torch.randn(2, length)
        assert torch.equal(captured(x)[0], fn(x)[0])
        assert captured(x)[1] == fn(x)[1] == (kind in ("counting", "repeated"))
    assert captured.outcome == "whole"
