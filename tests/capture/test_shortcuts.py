"""Shortcuts of recording note what the long ways note, and what they cost does not grow with the program."""

from __future__ import annotations

import sys
import types
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ladder.capture import Captured, capture
from ladder.capture.captured import run_as_is
from ladder.capture.heap.nodes import Node
from ladder.capture.heap.tensor_nodes import TensorNodes
from ladder.capture.interpreter import evaluate
from ladder.capture.operations import module_items
from ladder.capture.values.aliasing import aliasing_of, storage_of
from ladder.capture.values.fakes import fake_in, quick_fake
from ladder.capture.values.monitor import Monitor
from ladder.capture.values.shapes import Shapes


# tensors from outside in written memory -----------------------------------------------------------
def met(tensors: list[Tensor]) -> TensorNodes:
    found = TensorNodes()
    found.extend(Node(tensor, f"v{at}", external=True) for at, tensor in enumerate(tensors))
    return found


def looked_through(nodes: TensorNodes, storages: set[int]) -> list[Node]:
    strided = [node for node in nodes if node.obj.layout is torch.strided]
    return [node for node in strided if storage_of(node.obj) in storages]


def test_tensors_in_memory_are_those_that_lie_there_now() -> None:
    base = torch.zeros(6)
    tensors = [
        torch.zeros(2),
        base,
        torch.eye(3).to_sparse(),
        base[2:],
        base.data,
        nn.Parameter(torch.ones(2)),
    ]
    nodes = met(tensors)
    for tensor in (tensors[0], base, tensors[5], torch.zeros(2)):
        assert nodes.in_memory({storage_of(tensor)}) == looked_through(nodes, {storage_of(tensor)})
    assert [node.obj is base for node in nodes.in_memory({storage_of(base)})] == [True, False, False]
    tensors[5].data = base[:2]  # given other memory after it was met
    tensors[0].set_(torch.ones(2))
    assert len(nodes.in_memory({storage_of(base)})) == 4
    assert nodes.in_memory({storage_of(tensors[0])}) == [nodes[0]]
    later = torch.zeros(1)
    nodes.append(Node(later, "v9", external=True))
    assert nodes.in_memory({storage_of(later), storage_of(tensors[0])}) == [nodes[0], nodes[-1]]
    assert nodes.in_memory(set()) == []


def test_tensors_that_vmap_holds_lie_in_the_memory_of_what_they_hold() -> None:
    whole, found = torch.zeros(3, 2), []

    def row(x: Tensor) -> Tensor:
        nodes = met([torch.zeros(2), x])
        found.append(nodes.in_memory({storage_of(whole)}) == [nodes[1]])
        return x

    torch.vmap(row)(whole)
    assert found == [True]


class Chain(nn.Module):
    """Layers of which each changes in place what it has computed."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def calls_of_recording(count: int) -> Counter[str]:
    """Return how often each function of capture is called while a chain is recorded."""
    fast = capture(Chain(count), backend=lambda module, examples: module.forward)
    calls = Counter[str]()

    def note(frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call" and "ladder" in frame.f_code.co_filename:
            calls[frame.f_code.co_qualname] += 1

    with torch.no_grad():
        sys.setprofile(note)
        try:
            fast(torch.ones(1, 2))
        finally:
            sys.setprofile(None)
    assert fast.outcome == "whole"
    return calls


def test_what_recording_calls_grows_with_the_program_and_not_with_its_square() -> None:
    few, many = calls_of_recording(20), calls_of_recording(80)
    grown = {name: count / few[name] for name, count in many.items() if few[name] >= 20}
    assert grown
    assert max(grown.values()) <= 5, max(grown.items(), key=lambda item: item[1])


# batch norms ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("training", [False, True])
def test_statistics_are_written_where_a_batch_norm_trains(training: bool) -> None:
    norm = nn.BatchNorm2d(3).train(training)
    monitor, before = Monitor(), norm.running_mean.clone()
    with torch.no_grad(), monitor:
        norm(torch.randn(4, 3, 2, 2))
    statistics = {storage_of(norm.running_mean), storage_of(norm.running_var)}
    assert (statistics <= monitor.mutated) is training
    assert (norm.running_mean != before).any().item() is training


class Sides(nn.Module):
    """Normalizes in one of two ways, which a value of the tensor decides."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) if x.sum() > 0 else self.other(-x)


def test_a_batch_norm_that_does_not_train_may_be_on_a_side_of_a_branch() -> None:
    model = Sides().eval()
    fast = capture(model, backend=run_as_is)
    with torch.no_grad():
        for sign in (1, -1, 1, -1, 1):
            x = sign * torch.ones(2, 3)
            assert torch.equal(fast(x), model(x))
    assert any(record.graph is not None and "choose" in str(record.graph.graph) for record in fast.records)
    assert not any(record.split for record in fast.records if record in fast.entries[1].records)


# fakes ---------------------------------------------------------------------------------------------
def shown(fake: Tensor) -> tuple[Any, ...]:
    lies = fake.shape, fake.stride(), fake.storage_offset(), fake.untyped_storage().nbytes()
    kind = type(fake), isinstance(fake, nn.Parameter), fake.dtype, fake.device
    return *lies, *kind, fake.requires_grad, fake.is_leaf, fake.grad_fn is None, fake.is_conj()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(3, 4),
        torch.randn(3, 4).t().contiguous().t().clone(),
        nn.Parameter(torch.randn(2, 3, 4, 4)),
        nn.Parameter(torch.randn(2), requires_grad=False),
        torch.arange(4),
        torch.randn(2, 3, 4, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last),
        torch.zeros(0, 3),
    ],
)
def test_a_quick_fake_is_one_as_torch_makes_it(tensor: Tensor) -> None:
    shapes = Shapes()
    mode = shapes.fakes_mode()
    fake = quick_fake(mode, tensor)
    assert fake is not None
    assert shown(fake) == shown(fake_in(mode, tensor, static_shapes=True))
    assert fake.fake_mode is mode


def with_gradient() -> Tensor:
    found = nn.Parameter(torch.randn(2))
    found.sum().backward()
    return found


def negated() -> Tensor:
    return torch.randn(2, dtype=torch.complex64).conj().imag


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(4, 4)[1:],
        lambda: torch.tensor(3),
        lambda: torch.empty(0).set_(torch.zeros(8).untyped_storage(), 0, (2, 2), (2, 1)),
        lambda: nn.Parameter(torch.randn(2)) * 2,
        lambda: torch.randn(2, dtype=torch.complex64),
        lambda: torch.eye(2).to_sparse(),
        lambda: nn.Buffer(torch.ones(2)),
        with_gradient,
        negated,
    ],
)
def test_tensors_of_which_more_counts_have_no_quick_fake(make: Callable[[], Tensor]) -> None:
    assert quick_fake(Shapes().fakes_mode(), make()) is None


def test_arguments_that_share_memory_have_fakes_that_do() -> None:
    seen: list[list[Any]] = []

    def backend(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
        seen.append(module.meta.get("open", []))
        return run_as_is(module, examples)

    backend.dynamic_shapes = True  # type: ignore[attr-defined]
    weight = torch.randn(4, 4)
    shared, alone = weight.data, torch.randn(4)

    def program(x: Tensor) -> Tensor:
        return x @ weight + (x @ shared) * alone

    fast = capture(program, backend=backend)
    for rows in (2, 3, 5):
        x = torch.randn(rows, 4)
        assert torch.equal(fast(x), program(x))
    fakes = [fake for fake in seen[-1] if isinstance(fake, Tensor) and fake.shape == (4, 4)]
    assert len(seen) == 2
    assert len(fakes) == 2
    assert storage_of(fakes[0]) == storage_of(fakes[1])


# parts of modules ----------------------------------------------------------------------------------
class Computed(nn.Module):
    """A module whose property asks for what is not there, so that `__getattr__` is asked after it."""

    @property
    def scale(self) -> Tensor:
        return self.absent

    def forward(self, x: Tensor) -> Tensor:
        return x * getattr(self, "scale", 2.0)


class Asked(nn.Module):
    """Asks for parameters, buffers, parts, None among them, and for what is not there."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.part = nn.Parameter(torch.ones(3)), nn.Linear(3, 3)
        self.register_buffer("shift", torch.zeros(3))
        self.register_buffer("gone", None)
        self.register_parameter("bias", None)
        self.inner = Computed()

    def forward(self, x: Tensor) -> Tensor:
        x = self.part(x * self.weight + self.shift)
        if self.bias is not None or self.gone is not None or hasattr(self, "nowhere"):
            x = x + 1
        return self.inner(x)


class Ordered(Asked):
    """Holds its parts in dictionaries of another type."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_buffers"] = OrderedDict(self._buffers)


class Overridden(Asked):
    """Has a method of its own for what is not there."""

    def __getattr__(self, name: str) -> Any:
        return 3 if name == "nowhere" else super().__getattr__(name)


class Bare(Asked):
    """Lacks one of the dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        held = self.__dict__.pop("_buffers")
        self.__dict__.update(shift=held["shift"], gone=None)


MODULES = (Asked, Ordered, Overridden, Bare)


def recorded(kind: type[nn.Module]) -> tuple[nn.Module, Captured]:
    torch.manual_seed(0)
    model = kind().eval()
    fast = capture(model, backend=run_as_is)
    with torch.no_grad():
        for rows in (2, 2, 3, 4):
            x = torch.randn(rows, 3)
            assert torch.equal(fast(x), model(x))
    assert fast.outcome == "whole"
    return model, fast


def noted(fast: Captured) -> list[set[tuple[str, str]]]:
    """Return what the guard of each record asks, in words of the program."""
    found = []
    for record in fast.records:
        facts = record.run.__globals__.values()
        tables = [each.__self__ for each in facts if getattr(each, "__name__", "") == "unchanged"]
        asked = {(entry.path, repr(entry.key)) for table in tables for entry in table.facts}
        found.append(asked | {("", check.why) for check in record.checks if not check.why.startswith("v")})
    return found


@pytest.mark.parametrize("kind", MODULES)
def test_parts_are_noted_as_by_the_method_that_finds_them(
    kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, fast = recorded(kind)
    monkeypatch.setattr(module_items, "_CODE", None)
    _, slow = recorded(kind)
    assert noted(fast) == noted(slow)


@pytest.mark.parametrize("name", ["weight", "shift", "bias", "gone", "part", "nowhere"])
def test_parts_that_are_replaced_are_seen(name: str) -> None:
    model, fast = recorded(Asked)
    with torch.no_grad():
        setattr(model, name, nn.Linear(3, 3) if name == "part" else nn.Parameter(torch.full((3,), 5.0)))
        x = torch.randn(2, 3)
        assert torch.equal(fast(x), model(x))


def test_no_instruction_of_the_method_is_interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[types.CodeType] = []
    run = evaluate.run
    for module in [each for name, each in sys.modules.items() if name.startswith("ladder.capture.")]:
        if getattr(module, "run", None) is run:
            monkeypatch.setattr(
                module, "run", lambda vm, frame, *rest: (codes.append(frame.code), run(vm, frame, *rest))[1]
            )
    model = nn.Sequential(nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2), nn.ReLU()).eval()
    fast = capture(model, backend=run_as_is)
    with torch.no_grad():
        fast(torch.ones(1, 2, 4, 4))
    assert nn.Module._call_impl.__code__ in codes
    assert nn.Module.__getattr__.__code__ not in codes


def test_another_method_is_told_from_that_of_modules() -> None:
    def last(self: Any, name: str) -> Any:
        for home in ("_parameters", "_buffers", "_modules"):
            if home in self.__dict__ and name in self.__dict__[home]:
                found = self.__dict__[home][name]
        return found

    def counting(self: Any, name: str) -> Any:
        for home in ("_parameters", "_buffers", "_modules"):
            if home in self.__dict__ and name in self.__dict__[home]:
                self.asked = name
                return self.__dict__[home][name]
        raise AttributeError(name)

    assert module_items.looks_up(nn.Module.__getattr__)
    assert not module_items.looks_up(last)
    assert not module_items.looks_up(counting)


def test_what_shares_memory_is_found_in_one_pass() -> None:
    base, other = torch.zeros(4), torch.zeros(4)
    found = aliasing_of([base, 3, other, base[1:], 3], [other, (base.view(2, 2), other[:2]), None])
    assert found.memory == (0, 1, 2, 0, 4, 2, 0, 2, 8)
    assert found.objects == (0, 1, 2, 3, 4, 2, 6, 7, 8)


def looking_on(reads: list[str]) -> nn.Module:
    """Return a module whose class notes what is read of it, its dictionary included."""

    class Noting(nn.Linear):
        def __getattribute__(self, name: str) -> Any:
            reads.append(name)
            return super().__getattribute__(name)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.weight

    return Noting(2, 2)


def test_classes_that_look_on_see_every_read() -> None:
    expected, found = list[str](), list[str]()
    plain, fast = looking_on(expected), capture(looking_on(found), backend=run_as_is)
    expected.clear(), found.clear()
    with torch.no_grad():
        plain(torch.ones(2)), fast(torch.ones(2))
    assert found.count("__dict__") == expected.count("__dict__") > 0
