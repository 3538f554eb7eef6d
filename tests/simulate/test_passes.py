"""What TVM's passes make of kernels: TIR before and after them, executed on the same data."""

from __future__ import annotations

import random

import block_graphs
import numpy as np
import pytest
from drawn import draw
from loops import translate
from problems import require_right
from test_random_chains import BOUNDS, DTYPES, Drawn

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.kernel import emit
from ladder.lower.chain import emit_chain
from ladder.lower.passes import as_it_runs
from ladder.movement.choose import machine_of, ranked
from ladder.partition.rows import row_axes
from ladder.simulate import simulate_launch
from targets import TileDevice, get_device
from tile_types.errors import ScheduleError

CPU = get_device("cpu/avx512_vnni")


def repeated_after_a_row() -> Graph:
    """Return rows that are repeated after one that is joined before them."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (2, 5, 16))
    first = g.add("slice", x, begin=(0, 0, 0), shape=(2, 1, 16))
    rest = g.add("slice", g.add("repeat", x, axis=1, times=2), begin=(0, 0, 0), shape=(2, 9, 16))
    return g.finish(g.add("concat", first, rest, axis=1))


def exponentials_after_a_row() -> Graph:
    """Return a join under which a function needs registers, so that what it reads is read before the join."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (2, 6, 8))
    parts = [g.add("slice", x, begin=(0, 0, 0), shape=(2, 3, 8)) for _ in range(2)]
    joined = g.add("concat", parts[0], g.add("exp", parts[1]), axis=1)
    return g.finish(g.add("sub", joined, g.add("reduce_max", joined, axis=2)))


@pytest.mark.parametrize("make", [repeated_after_a_row, exponentials_after_a_row])
def test_joins(make: object) -> None:
    check_cpu(make(), "float32", 0)  # type: ignore[operator]


@pytest.mark.parametrize("seed", range(0, 24, 2))
def test_random_chains_of_cpus(seed: int) -> None:
    drawn = Drawn(seed)
    check_cpu(drawn.chain(), drawn.ttype, seed)


def check_cpu(graph: Graph, ttype: str, seed: int) -> None:
    """Execute a chain's loop nest before and after the passes, and compare both with the reference."""
    if row_axes(graph, graph.outputs) is None:
        return  # the partition cuts it
    function = emit_chain(graph, CPU, "chain")
    for stage in (function, as_it_runs(function, CPU.tvm_target)):
        arrays, outputs, exact = data_of(graph, ttype, seed)
        translate(stage)(*arrays, *outputs)
        for got, want in zip(outputs, exact, strict=True):
            bound = max(BOUNDS[ttype], BOUNDS[str(got.dtype)]) * max(1.0, float(np.abs(want).max()))
            np.testing.assert_allclose(got.astype(np.float64), want, atol=bound)


def data_of(
    graph: Graph, ttype: str, seed: int
) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
    """Return inputs, outputs that nothing wrote, and what should be in them."""
    rng, dtype = np.random.default_rng(seed), DTYPES[ttype]
    inputs = [rng.uniform(-1, 1, node.tile.known_shape).astype(dtype) for node in graph.inputs]
    tiles = [graph.tile(value) for value in graph.outputs]
    outputs = [np.full(tile.known_shape, np.nan, DTYPES[tile.ttype.name]) for tile in tiles]
    exact = evaluate(graph, inputs)
    return inputs, outputs, list(exact) if isinstance(exact, tuple) else [exact]


@pytest.mark.parametrize("seed", range(1, 16, 3))
def test_random_chains_of_gpus(seed: int) -> None:
    """As compiled, on the simulator; `test_random_chains` has them before the passes."""
    drawn, device = Drawn(seed), get_device("cuda/sm_90a")
    graph = drawn.chain()
    if row_axes(graph, graph.outputs) is None:
        return
    moves = random.Random(seed).choice(ranked(graph, machine_of(device)))
    try:
        function = emit_chain(graph, device, "chain", moves.mapping)
    except ScheduleError:  # tiles need alignments that the emitter looks for
        return
    inputs, outputs, exact = data_of(graph, drawn.ttype, seed)
    places = tuple(range(len(inputs), len(inputs) + len(outputs)))
    result = simulate_launch(
        as_it_runs(function, device.tvm_target),
        [*inputs, *outputs],
        outputs=places,
        target=device,
    )
    assert not result.findings, result.report()
    for got, want in zip(outputs, exact, strict=True):
        bound = max(BOUNDS[drawn.ttype], BOUNDS[drawn.result]) * max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got.astype(np.float64), want, atol=bound)


@pytest.mark.parametrize("target", ["cpu/avx512_vnni", "cuda/sm_90a"])
@pytest.mark.parametrize(("operator", "count"), [("add", 60), ("tanh", 12)])
def test_expressions_do_not_grow_with_what_stands_in_them_twice(
    operator: str, count: int, target: str
) -> None:
    """Each value is computed once, before and after the passes."""
    g = GraphBuilder("chain")
    value = g.input("x", "float32", (37,))
    for _ in range(count):
        value = g.add(operator, value, value) if operator == "add" else g.add(operator, value)
    device = get_device(target)
    function = emit_chain(g.finish(value), device, "chain")
    assert len(as_it_runs(function, device.tvm_target).script()) < 12000 * count


@pytest.mark.parametrize("seed", range(8))
def test_products(seed: int) -> None:
    """`test_drawn` has them before the passes."""
    drawn = next(draw(1, seed, begin=seed))
    function = as_it_runs(drawn.function(), get_device(drawn.target).tvm_target)
    require_right(function, drawn.gemm, drawn.m, drawn.target)


@pytest.mark.parametrize(
    ("case", "schedule"),
    [
        (block_graphs.gated_mlp(8, 256, 64, 32, 32), BlockSchedule(2, 1, 3, 2)),
        (block_graphs.rmsnorm_matmul(2, 256, 96, 48, 32), BlockSchedule(groups=3, stages=2)),
        (block_graphs.lora(16, 64, 64, 16, 32, 16), BlockSchedule(groups=2)),
    ],
    ids=["gated_mlp", "rmsnorm_matmul", "lora"],
)
def test_block_graphs(
    case: block_graphs.Case, schedule: BlockSchedule, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`test_blocks` has them before the passes."""

    def emitted(block: object, device: TileDevice, *rest: object) -> object:
        return as_it_runs(emit(block, device, *rest), device.tvm_target)

    monkeypatch.setattr(block_graphs, "emit", emitted)
    result, error = block_graphs.run(case, schedule)
    assert not result.findings, result.report()
    assert error <= BOUNDS["float16"]
