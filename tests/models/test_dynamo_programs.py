"""Programs that torch.compile captures for our backend: what a graph holds and sets stays right."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from ladder.api.compiler import Compiler
from ladder.faults import LadderWarning
from ladder.integrations import dynamo
from ladder.integrations.dynamo import backend


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_grad_enabled(True)


def trained(compiling: Any) -> list[Tensor]:
    """Return parameters and losses after steps whose momentum the optimizer's graph holds and changes.

    All numbers are exact in float32.
    """
    model = nn.Linear(2, 1)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    optimizer = torch.optim.SGD(model.parameters(), 0.125, momentum=0.5)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    run = torch.compile(step, backend=compiling)
    losses = [run(torch.ones(3, 2)) for _ in range(4)]
    return [*model.parameters(), *losses]


@pytest.mark.filterwarnings("ignore:a graph runs")
def test_tracing_changes_nothing_that_a_program_holds() -> None:
    for found, expected in zip(trained(backend), trained("eager"), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def _autocast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return x @ x.t()


def _recording(x: Tensor) -> Tensor:
    with torch.enable_grad():
        return x * 2


def _left(x: Tensor) -> Tensor:
    torch.set_grad_enabled(not torch.is_grad_enabled())
    return x * 2


@pytest.mark.filterwarnings("ignore:a graph runs")
@pytest.mark.parametrize("function", [_autocast, _recording, _left])
@pytest.mark.parametrize("before", [True, False])
def test_modes_within_graphs(function: Callable[[Tensor], Tensor], before: bool) -> None:
    def outcome(run: Callable[[Tensor], Tensor]) -> tuple[Any, ...]:
        torch.set_grad_enabled(before)
        found = [run(torch.ones(3, 3, requires_grad=True)) for _ in range(2)]
        return [(y.dtype, y.requires_grad) for y in found], torch.is_grad_enabled()

    assert outcome(torch.compile(function, backend=backend)) == outcome(function)


OPEN_NUMBERS: dict[str, Callable[[Tensor, int], Any]] = {
    "power": lambda x, n: x.int() ** n,
    "power of reals": lambda x, n: x.float() ** n,
    "clamp": lambda x, n: x.clamp(-n, n),
    "maximum": lambda x, n: torch.maximum(x, torch.full_like(x, 3)).clamp(max=n),
    "results": lambda x, n: (x + n, n, n + 1, n),
}


@pytest.mark.filterwarnings("ignore:a graph runs")
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
@pytest.mark.parametrize("name", OPEN_NUMBERS)
def test_numbers_that_are_open(name: str, dtype: torch.dtype) -> None:
    """They are converted as constants are; of integers negative powers are refused."""
    function, x = OPEN_NUMBERS[name], torch.tensor([0, 1, 3, 100, 127], dtype=dtype)
    run = torch.compile(function, backend=backend)
    for n in (2, 3, 5, 70, -1, -2):
        try:
            expected = function(x, n)
        except RuntimeError as error:
            with pytest.raises(RuntimeError, match=str(error)[:30]):
                run(x, n)
            continue
        torch.testing.assert_close(run(x, n), expected, rtol=1e-6, atol=0)


def test_mapped_functions_before_a_write() -> None:
    """torch.compile's graph names levels of vmap; making writes functional must not count one more."""

    def program(x: Tensor, state: Tensor) -> Tensor:
        y: Tensor = torch.vmap(lambda a, b: a * b + a.sum())(x, x + 1)
        state.copy_(y[:1])
        return y * 2

    compiler = Compiler()
    fast = torch.compile(program, backend=compiler)
    with torch.no_grad():
        for rows in (3, 3, 5):
            x, state, expected = torch.randn(rows, 4), torch.zeros(1, 4), torch.zeros(1, 4)
            torch.testing.assert_close(fast(x, state), program(x, expected))
            torch.testing.assert_close(state, expected)
    assert compiler.refused == []


@pytest.mark.parametrize("dynamic", [False, True])
def test_weights_that_torch_leaves_in_the_graph(dynamic: bool) -> None:
    """With ``freezing`` of torch's own compiler they are no arguments; what changes is read anew."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    expected, built, refused = copy.deepcopy(model), len(dynamo.compiler.built), len(dynamo.compiler.refused)
    fast = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.no_grad(), torch._dynamo.config.patch(prepare_freezing=True):
        for rows in (2, 2, 5, 6):
            x = torch.randn(rows, 4)
            torch.testing.assert_close(fast(x), expected(x))
            for each in (model, expected):
                each[0].weight.mul_(2)
    for found, wanted in zip(model.buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(found, wanted)
    assert len(dynamo.compiler.built) > built
    assert len(dynamo.compiler.refused) == refused


@pytest.mark.parametrize("wanted", [(True, False, False), (False, True, True)])
def test_operators_that_give_none_among_results(wanted: tuple[bool, ...]) -> None:
    def program(gradient: Tensor, x: Tensor, weight: Tensor) -> Any:
        backward = torch.ops.aten.convolution_backward.default
        given = backward(gradient, x, weight, [3], [1], [0], [1], False, [0], 1, wanted)
        return [None if value is None else value * 2 for value in given]

    compiler = Compiler()
    arguments = torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.randn(3, 5, 3)
    found = torch.compile(program, backend=compiler)(*arguments)
    for value, expected in zip(found, program(*arguments), strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            torch.testing.assert_close(value, expected)
    assert compiler.refused == []


@pytest.mark.filterwarnings("ignore:a graph runs")
def test_powers_of_negative_numbers() -> None:
    def signs(x: Tensor) -> Tensor:
        return (-1) ** x * x

    def chosen(x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, signs, lambda x: (-2.0) ** x, (x,))

    for x in (torch.arange(4.0), -torch.arange(4.0)):
        torch.testing.assert_close(torch.compile(signs, backend=backend)(x), signs(x))
        # torch's own `cond` writes its sides out too, and wrong, where nothing is compiled.
        side = signs(x) if x.sum() > 0 else (-2.0) ** x
        torch.testing.assert_close(torch.compile(chosen, backend=backend)(x), side)


def test_random_numbers_of_python_arrive_as_torch_hands_them_over() -> None:
    def drawn(x: Tensor) -> Any:
        y = x + random.uniform(10, 20)
        return y * random.randint(2, 18), y + random.random(), random.random()

    fast = torch.compile(drawn, backend="ladder")
    with torch.no_grad():
        for seed, rows in enumerate((3, 3, 4, 5)):
            for x in (torch.randn(rows, 4), torch.randn(rows, 4, dtype=torch.float64)):
                random.seed(seed)
                expected = drawn(x)
                random.seed(seed)
                torch.testing.assert_close(fast(x), expected)


def test_fake_tensors_are_given_to_torch() -> None:
    def written(x: Tensor) -> Tensor:
        x.add_(1)
        return x.softmax(-1) @ torch.ones(4, 3)

    fast, x = torch.compile(written, backend="ladder"), torch.randn(5, 4)
    open_sizes = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    with torch.no_grad():
        with FakeTensorMode() as mode:
            assert fast(mode.from_tensor(x)).shape == (5, 3)
        with FakeTensorMode(shape_env=ShapeEnv()) as mode:
            found = fast(mode.from_tensor(x, symbolic_context=open_sizes))
            assert isinstance(found, FakeTensor)
        torch.testing.assert_close(fast(x.clone()), written(x.clone()))


def test_plans_go_with_what_torch_compiled() -> None:
    """The backend's record of plans keeps no model alive."""
    weights = []
    for rows in (3, 4):
        model = nn.Sequential(nn.Linear(8, 16), nn.SiLU())
        weights.append(weakref.ref(model[0].weight))
        fast = torch.compile(model, backend=dynamo.backend)
        with torch.no_grad():
            for _ in range(3):
                fast(torch.randn(rows, 8))
        assert dynamo.compiler.built
        del model, fast
    torch._dynamo.reset()
    gc.collect()
    assert [weight() for weight in weights] == [None, None]


def _padded(x: Tensor, more: Any) -> tuple[Tensor, int, Tensor]:
    whole = torch.cat([x, torch.full((x.shape[0], more), 0.5)], dim=-1)
    return whole * 2, whole.shape[1], torch.ones(more).sum() * x + more


SIZED = ((4, 3), (4, 5), (6, 2), (7, 3), (7, 9), (7, 3), (8, 2), (8, 7), (8, 1), (8, 0))
"""Columns of an argument, and what it is padded by."""


def test_sizes_that_only_elements_of_arguments_show_are_read_in_each_call() -> None:
    """numpy's integers arrive as tensors: torch knows their elements as symbols, and no shape shows these."""
    compiler, refused = dynamo.compiler, len(dynamo.compiler.refused)
    before = len(compiler.built)
    fast = torch.compile(_padded, backend=backend)
    with torch.no_grad():
        for columns, more in SIZED:
            x = torch.randn(3, columns)
            torch.testing.assert_close(fast(x, np.int64(more)), _padded(x, np.int64(more)))
    assert len(compiler.refused) == refused
    assert 0 < len(compiler.built) - before <= 5  # the first sizes alone, open ones, extents of 1 and 0


ARRAYS = np.ones(4, np.float32), np.float32(2.5), np.ones(4, np.float16), np.ones(4), 2.5


@pytest.mark.parametrize("value", ARRAYS)
def test_arrays_of_numpy_keep_their_type(value: Any) -> None:
    """torch hands arrays and Python's floats over as tensors alike; float64 is the floats' type alone."""

    def scaled(x: Tensor, by: Any) -> tuple[Tensor, Tensor]:
        return x * torch.as_tensor(by) + 1, torch.as_tensor(by) * 2

    fast, x = torch.compile(scaled, backend="ladder"), torch.randn(4)
    with torch.no_grad():
        for times in (1, 3):
            torch.testing.assert_close(fast(x, value * times), scaled(x, value * times))


def test_options_of_other_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ladder.faults._warned", set())
    x = torch.randn(3, 8)
    with pytest.raises(Exception, match="the backend 'ladder' takes no options, got max_autotune"):
        torch.compile(torch.nn.Linear(8, 8), backend="ladder", options={"max_autotune": True})(x)
    layer = torch.nn.Linear(8, 8)
    with pytest.warns(LadderWarning, match="mode='reduce-overhead' changes nothing"):
        y = torch.compile(layer, backend="ladder", mode="reduce-overhead")(x)
    torch.testing.assert_close(y, layer(x))
