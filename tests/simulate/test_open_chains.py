"""Random chains of open sizes: one kernel for several sizes, right; on the simulator also in bounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import drawn_chains
import numpy as np
import pytest
import torch
from drawn_chains import BOUNDS, DTYPES

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.ir.build import bind
from ladder.ir.starts import with_open_starts
from ladder.lower.chain import emit_chain
from ladder.lower.chain.scatter import size_names
from ladder.movement.choose import ranked
from ladder.partition.rows import row_axes
from ladder.runtime.build import find_or_build, load_entry
from ladder.runtime.model.chains import chain_job
from ladder.simulate import simulate_launch
from targets import get_device, host_cpu
from tile_types.errors import ScheduleError

SHAPES = (("a", "b", 8), ("a", 24), ("a", 4, "b", 16), ("a", "b", 7), (2, "a", "a"), ("a", "b"))
SIZES = ({"a": 1, "b": 1}, {"a": 3, "b": 5}, {"a": 8, "b": 2}, {"a": 17, "b": 33})
UNARY = ("neg", "silu", "relu", "square", "sigmoid", "tanh")

SEEDS = range(12)
"""Hundreds of others have been tried."""


class Drawn(drawn_chains.Drawn):
    """A chain of open sizes."""

    shapes, unary = SHAPES, UNARY

    def chain(self) -> Graph:
        """Return a chain of a few steps, with one or two results."""
        for _ in range(self.random.randint(1, 5)):
            step = STEPS[self.random.choice(list(STEPS))]
            self.values.append(step(self, *self.random.choices(self.values, k=2)))
        outputs = dict.fromkeys([self.values[-1], self.random.choice(self.values[2:])])
        return self.graph.finish(*outputs)


def _joined(d: Drawn, a: str, b: str) -> str:
    """Join along any axis and take the middle: where the two meet lies at an open place."""
    axis = d.random.randrange(len(d.shape))
    begin = tuple(1 if at == axis else 0 for at in range(len(d.shape)))
    return d.graph.add("slice", d.graph.add("concat", a, b, axis=axis), begin=begin, shape=d.shape)


def _counted(d: Drawn, a: str, b: str) -> str:
    axis = d.random.randrange(len(d.shape))
    numbers = d.graph.add("iota", extent=d.shape[axis], begin="a", axis=axis, rank=len(d.shape), type="int64")
    share = d.graph.add("size", extent="a", type=d.ttype)
    return d.graph.add("add", a, d.graph.add("div", d.graph.add("convert", numbers, type=d.ttype), share))


STEPS: Mapping[str, Callable[[Drawn, str, str], str]] = {
    "unary": drawn_chains.unary,
    "binary": drawn_chains.binary,
    "row": drawn_chains.times_row,
    "softmax": drawn_chains.softmax,
    "turned": drawn_chains.turned,
    "joined": _joined,
    "counted": _counted,
}


@pytest.mark.parametrize("seed", SEEDS)
def test_open_chain(seed: int) -> None:
    drawn = Drawn(seed)
    graph = drawn.chain()
    if row_axes(graph, graph.outputs) is None:
        return  # the partition cuts it
    for moves in drawn.random.sample(ranked(graph), min(2, len(ranked(graph)))):
        try:
            function = emit_chain(graph, get_device("cuda/sm_90a"), "chain", moves.mapping)
        except ScheduleError:  # tiles need alignments that the emitter looks for
            assert moves.mapping.tile[0] or moves.mapping.spread > 1
            continue
        for sizes in SIZES:
            check(graph, function, sizes, drawn.ttype, seed)


AMD = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201")
COUNTED = (4, 5, 6)
"""Seeds of chains whose elements depend on their number and a size, which kernels make floats of."""


@pytest.mark.costly
@pytest.mark.parametrize("seed", COUNTED)
@pytest.mark.parametrize("arch", AMD)
def test_open_chain_as_machine_code(arch: str, seed: int) -> None:
    drawn, device = Drawn(931000 + seed), get_device(f"rocm/{arch}")
    graph = drawn.chain()
    assert row_axes(graph, graph.outputs) is not None
    for sizes in SIZES[::3]:
        function = emit_chain(graph, device, "chain")
        check(graph, function, sizes, drawn.ttype, seed, target=device, stage="code")


def check(
    graph: Graph, function: object, sizes: Mapping[str, int], ttype: str, seed: int, **options: Any
) -> None:
    """Simulate a kernel for sizes and compare with the reference."""
    rng, fixed, dtype = np.random.default_rng(seed), bind(graph, sizes), DTYPES[ttype]
    inputs = [rng.uniform(-1, 1, node.tile.known_shape).astype(dtype) for node in fixed.inputs]
    exact = evaluate(fixed, inputs)
    outputs = [np.full(fixed.tile(value).known_shape, np.nan, dtype) for value in fixed.outputs]
    numbers = [sizes[name] for name in size_names(graph)]
    first = len(numbers) + len(inputs)
    places = tuple(range(first, first + len(outputs)))
    result = simulate_launch(function, [*numbers, *inputs, *outputs], outputs=places, **options)
    assert not result.findings, result.report()
    for got, want in zip(outputs, exact if isinstance(exact, tuple) else (exact,), strict=True):
        bound = BOUNDS[ttype] * max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got.astype(np.float64), want, atol=bound)


CPU_SEEDS = (3, 7, 20, 31)
"""A hundred others have been tried."""


def test_open_chains_on_cpus() -> None:
    """One kernel of this machine for several sizes, none and many elements among them."""
    found = {seed: Drawn(seed, ("float32",)).chain() for seed in CPU_SEEDS}
    found = {seed: graph for seed, graph in found.items() if row_axes(graph, graph.outputs) is not None}
    kernels = find_or_build([chain_job(graph, host_cpu()) for graph in found.values()])
    for (seed, graph), kernel in zip(found.items(), kernels, strict=True):
        entry = load_entry(kernel, "cpu")
        for sizes in (*SIZES, {"a": 70, "b": 90}):
            fixed, rng = bind(graph, sizes), np.random.default_rng(seed)
            shapes = [node.tile.known_shape for node in fixed.inputs]
            arrays = [rng.uniform(-1, 1, shape).astype(np.float32) for shape in shapes]
            exact = evaluate(fixed, arrays)
            outputs = [torch.full(fixed.tile(value).known_shape, torch.nan) for value in fixed.outputs]
            numbers = (sizes[name] for name in size_names(graph))
            entry(*numbers, *map(torch.from_numpy, arrays), *outputs)
            for got, want in zip(outputs, exact if isinstance(exact, tuple) else (exact,), strict=True):
                bound = BOUNDS["float32"] * max(1.0, float(np.abs(want).max()))
                np.testing.assert_allclose(got.double().numpy(), want, atol=bound)


STARTS = ((1, (0, 1, 5, 7)), (2, (0, 4, 8, 32)), (2, (0, 1, 31, 32)))
"""An axis along which steps read, and where: in multiples of a vector or not, the last place included."""


@pytest.mark.parametrize("ttype", ["float16", "float32"])
@pytest.mark.parametrize(("axis", "starts"), STARTS)
def test_steps_share_a_kernel(axis: int, starts: tuple[int, ...], ttype: str) -> None:
    """Chains that differ in where a slice begins become one, which takes the place as a number."""
    steps = [_step(axis, start, ttype) for start in starts]
    opened = with_open_starts(steps, [0] * len(steps))
    (shared,) = {graph for graph, _ in opened}
    function = emit_chain(shared, get_device("cuda/sm_90a"), "chain")
    rng, dtype = np.random.default_rng(0), DTYPES[ttype]
    for graph, (_, numbers) in zip(steps, opened, strict=True):
        assert bind(shared, dict(zip(size_names(shared), numbers, strict=True))) == graph
        inputs = [rng.uniform(-1, 1, node.tile.known_shape).astype(dtype) for node in graph.inputs]
        output = np.full(graph.tile(graph.outputs[0]).known_shape, np.nan, dtype)
        at = len(numbers) + len(inputs)
        result = simulate_launch(function, [*numbers, *inputs, output], outputs=(at,))
        assert not result.findings, result.report()
        np.testing.assert_allclose(output.astype(np.float64), evaluate(graph, inputs), atol=BOUNDS[ttype])


def _step(axis: int, start: int, ttype: str) -> Graph:
    """Return a step of a loop: what it reads of all steps, beside what the last one left."""
    g = GraphBuilder("chain")
    begin, shape = ((0, start, 0), (3, 1, 64)) if axis == 1 else ((0, 0, start), (3, 1, 32))
    part = g.add("slice", g.input("x", ttype, (3, 8, 64)), begin=begin, shape=shape)
    rows = g.add("reshape", part, shape=(3, shape[2]))
    return g.finish(g.add("tanh", g.add("concat", rows, g.input("h", ttype, (3, 64)), axis=1)))


def test_few_steps_keep_their_numbers() -> None:
    """Below `SHARING` distinct chains nothing is opened."""
    two = [_step(1, 0, "float32"), _step(1, 7, "float32"), _step(1, 7, "float32")]
    assert with_open_starts(two, [0] * 3) == [(graph, ()) for graph in two]
