"""Random chains for GPUs on the simulator, in some of their mappings: right and in bounds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import drawn_chains
import numpy as np
import pytest
from drawn_chains import BOUNDS, DTYPES

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.movement.mapping import Mapping
from ladder.partition.rows import row_axes
from ladder.simulate import simulate_launch
from targets import get_device
from tile_types.errors import ScheduleError

SHAPES = (
    *((2, 4, 6, 8), (3, 2, 7, 7), (2, 8, 4, 16), (4, 16, 5), (2, 24, 40), (1, 3, 5, 2, 6)),
    *((1, 3, 128), (1, 96), (3, 1, 8), (1, 1, 33)),
)
UNARY = ("neg", "exp", "silu", "relu", "square", "sigmoid", "gelu", "tanh")

SEEDS = range(10)
"""A thousand others have been tried on NVIDIA GPUs, and 360 on AMD GPUs."""

AMD = ("rocm/gfx90a", "rocm/gfx942", "rocm/gfx1100")


class Drawn(drawn_chains.Drawn):
    """A chain of known sizes.

    result: The type of the last value.
    """

    shapes, unary = SHAPES, UNARY

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.result = self.ttype

    def chain(self) -> Graph:
        """Return a chain of a few steps, with one or two results."""
        for _ in range(self.random.randint(1, 6)):
            step = STEPS[self.random.choice(list(STEPS))]
            self.values.append(step(self, *self.random.choices(self.values, k=2)))
        last = self.ending(self.values[-1])
        outputs = [last] if last != self.values[-1] else [last, self.random.choice(self.values[2:])]
        return self.graph.finish(*dict.fromkeys(outputs))

    def ending(self, value: str) -> str:
        """Return a value, its sums along an axis that may go, or either in another type."""
        if self.random.random() < 0.4:
            axis, keep = self.random.randrange(len(self.shape)), self.random.random() < 0.5
            value = self.graph.add("reduce_sum", value, axis=axis, keep=keep)
        if self.random.random() < 0.4:
            self.result = self.random.choice([name for name in DTYPES if name != self.ttype])
            value = self.graph.add("convert", value, type=self.result)
        return value

    def cut(self, value: str, axis: int, begin: int, end: int) -> str:
        """Return a part of a value along an axis."""
        start = tuple(begin if at == axis else 0 for at in range(len(self.shape)))
        shape = tuple(end - begin if at == axis else e for at, e in enumerate(self.shape))
        return self.graph.add("slice", value, begin=start, shape=shape)

    def long_axis(self) -> int:
        """Return an axis that can be cut."""
        return self.random.choice([axis for axis, extent in enumerate(self.shape) if extent > 1])


def _joined(d: Drawn, a: str, b: str) -> str:
    axis = d.long_axis()
    half = d.shape[axis] // 2
    parts = d.cut(a, axis, 0, half), d.cut(b, axis, 0, d.shape[axis] - half)
    return d.graph.add("concat", *parts, axis=axis)


def _shifted(d: Drawn, a: str, b: str) -> str:
    low = tuple(d.random.randint(0, 1) for _ in d.shape)
    padded = d.graph.add("pad", a, low=low, high=tuple(1 - border for border in low), value=0.5)
    return d.graph.add("slice", padded, begin=(0,) * len(low), shape=d.shape)


STEPS: dict[str, Callable[[Drawn, str, str], str]] = {
    "unary": drawn_chains.unary,
    "binary": drawn_chains.binary,
    "row": drawn_chains.times_row,
    "normal": lambda d, a, b: d.graph.add("sub", a, d.graph.add("reduce_max", a, axis=len(d.shape) - 1)),
    "softmax": drawn_chains.softmax,
    "turned": drawn_chains.turned,
    "joined": _joined,
    "shifted": _shifted,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_random_chain(seed: int) -> None:
    check(seed, "cuda/sm_90a")


@pytest.mark.parametrize("number", range(6))
def test_random_chain_on_amd(number: int) -> None:
    """Others every day."""
    day = int(os.environ["LADDER_TEST_DAY"])
    check(100 + (6 * day + number) % 300, AMD[number % 3])


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("shape", [(1, 3, 128), (1, 1, 8), (2, 3, 1)])
def test_sums_of_few_rows_in_another_type(shape: tuple[int, ...], target: str) -> None:
    """The sum and the conversion of it mean one element, whichever index an axis of one has."""
    build = GraphBuilder("chain")
    total = build.add("reduce_sum", build.input("x", "float32", shape), axis=1, keep=False)
    graph = build.finish(build.add("convert", total, type="float16"))
    inputs = [np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)]
    require_right_when_simulated(graph, target, None, inputs, 3e-3)


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("between", [((2, 300, 64),), ((2, 20, 15, 64), (2, 15, 1, 64))])
def test_sums_over_images(between: Sequence[tuple[int, ...]], scaled: bool, target: str) -> None:
    """Sums over positions before the channels: their axes are not the result's, and means are of means."""
    build, shape = GraphBuilder("chain"), (2, 20, 15, 64)
    value = build.input("x", "float32", shape)
    for merged in between:
        value = build.add("reduce_sum", build.add("reshape", value, shape=merged), axis=1)
        if scaled:
            value = build.add("mul", value, build.add("constant", value=0.125, type="float32"))
    graph = build.finish(build.add("reshape", value, shape=(2, 1, 1, 64)))
    inputs = [np.random.default_rng(1).uniform(-1, 1, shape).astype(np.float32)]
    require_right_when_simulated(graph, target, None, inputs, 3e-5)


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_rows_that_are_padded_turned_and_joined(target: str) -> None:
    """As attention in chunks has them: of some places that are told apart, no operand can have any."""
    build = GraphBuilder("chain")
    x, y = build.input("x", "float32", (4, 21)), build.input("y", "float32", (4, 4, 3, 8, 16))
    padding = build.add("broadcast", build.add("constant", value=0.0, type="float32"), shape=(4, 3))
    rows = build.add("reshape", build.add("concat", x, padding, axis=1), shape=(4, 1, 3, 8))
    last = build.add("slice", rows, begin=(0, 0, 2, 0), shape=(4, 1, 1, 8))
    first = build.add("slice", rows, begin=(0, 0, 0, 0), shape=(4, 1, 2, 8))
    both = build.add("concat", build.add("concat", last, first, axis=2), rows, axis=3)
    graph = build.finish(build.add("add", y, build.add("reshape", both, shape=(4, 1, 3, 1, 16))))
    inputs = [np.random.default_rng(1).uniform(-1, 1, node.tile.known_shape) for node in graph.inputs]
    require_right_when_simulated(graph, target, None, [each.astype(np.float32) for each in inputs], 3e-5)


def number_of_rows(target: str) -> None:
    """Simulate, in each mapping, a chain that gives a number of each row and multiplies the row by it."""
    build, device = GraphBuilder("chain"), get_device(target)
    x, y = build.input("x", "float32", (4, 6, 64)), build.input("y", "float32", (4, 6))
    number = build.add("exp", y)
    factor = build.add("reshape", number, shape=(4, 6, 1))
    rows = build.add("mul", build.add("sub", x, build.add("reduce_sum", x, axis=2)), factor)
    graph = build.finish(number, build.add("add", rows, factor), build.add("neg", number))
    rng = np.random.default_rng(1)
    inputs = [rng.uniform(-1, 1, node.tile.known_shape).astype(np.float32) for node in graph.inputs]
    for moves in ranked(graph, machine_of(device)):
        require_right_when_simulated(graph, target, moves.mapping, inputs, 3e-5)


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_numbers_of_rows_that_rows_are_multiplied_by(target: str) -> None:
    """One lane stores what all lanes read, as of a mask that is a result too."""
    number_of_rows(target)


def check(seed: int, target: str) -> None:
    """Simulate a chain in two of its mappings, and compare."""
    drawn, device = Drawn(seed), get_device(target)
    graph, dtype = drawn.chain(), DTYPES[drawn.ttype]
    if row_axes(graph, graph.outputs) is None:
        return  # the partition cuts it
    rng = np.random.default_rng(seed)
    inputs = [rng.uniform(-1, 1, node.tile.known_shape).astype(dtype) for node in graph.inputs]
    best = ranked(graph, machine_of(device))
    bound = max(BOUNDS[drawn.ttype], BOUNDS[drawn.result])
    for moves in drawn.random.sample(best, min(2, len(best))):
        try:
            require_right_when_simulated(graph, target, moves.mapping, inputs, bound)
        except ScheduleError:  # tiles need alignments that the emitter looks for
            assert moves.mapping.tile[0] or moves.mapping.spread > 1


def require_right_when_simulated(
    graph: Graph, target: str, mapping: Mapping | None, inputs: Sequence[np.ndarray], bound: float
) -> None:
    """Compare with the interpreter what a chain's kernel writes."""
    device, exact = get_device(target), evaluate(graph, list(inputs))
    exact = exact if isinstance(exact, tuple) else (exact,)
    tiles = [graph.tile(value) for value in graph.outputs]
    outputs = [np.full(tile.known_shape or 1, np.nan, DTYPES[tile.ttype.name]) for tile in tiles]
    function = emit_chain(graph, device, "chain", mapping)
    places = tuple(range(len(inputs), len(inputs) + len(outputs)))
    result = simulate_launch(function, [*inputs, *outputs], target=device, outputs=places)
    assert not result.findings, result.report()
    for got, want in zip(outputs, exact, strict=True):
        most = bound * max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got.astype(np.float64).reshape(np.shape(want)), want, atol=most)


def number_of(shape: tuple[int, ...], *permutation: int) -> Graph:
    """Return the sum of a tensor, axis by axis; with a permutation of its product with another, turned."""
    g = GraphBuilder("chain")
    value = g.input("x", "float32", shape)
    if permutation:
        turned = g.add("transpose", g.input("y", "float32", shape), permutation=permutation)
        value = g.add("mul", value, turned)
    for axis in reversed(range(len(shape))):
        value = g.add("reduce_sum", value, axis=axis, keep=False)
    return g.finish(value)


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("graph", [number_of((5, 5, 5)), number_of((3, 3), 1, 0)])
def test_results_without_axes(graph: Graph, target: str) -> None:
    shape, rng = graph.inputs[0].tile.known_shape, np.random.default_rng(0)
    inputs = [rng.uniform(-1, 1, shape).astype(np.float32) for _ in graph.inputs]
    require_right_when_simulated(graph, target, None, inputs, 1e-5)


def test_sums_of_nothing_are_refused_on_gpus() -> None:
    graph = number_of((0,))
    with pytest.raises(ScheduleError, match="reduce at least one element, x has none"):
        emit_chain(graph, get_device("cuda/sm_90a"), "chain")
