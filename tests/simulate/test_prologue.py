"""Products whose activation rows are computed in their kernel, against the chain and the product apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from problems import gemm, gemv, problem_of

from ladder.ir import Graph, GraphBuilder
from ladder.ir.gemm import Gemm
from ladder.lower.build import emit, emit_with_prologue
from ladder.lower.chain import emit_chain
from ladder.lower.cuda.prologue import PrologueForm
from ladder.simulate import simulate_launch
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types.errors import ScheduleError
from tile_types.arrays import numpy_dtype

H200 = get_device("cuda/sm_90a")


def digits(**fields: Any) -> GpuSchedule:
    return GpuSchedule("digits", 1, stages=2, warps=6, split_k=2, placement="accumulator", **fields)


def residual_norm(rows: tuple[int, ...], width: int, kind: str, layer: bool = False) -> tuple[Graph, str]:
    """Return the sum of two tensors, and its norm: of the root mean square, or of mean and variance."""
    g = GraphBuilder("chain")
    x, y = g.input("x", kind, (*rows, width)), g.input("y", kind, (*rows, width))
    w, last = g.input("w", kind, (width,)), len(rows)
    total = g.add("add", x, y)
    wide, share = g.add("convert", total, type="float32"), g.add("constant", value=1 / width, type="float32")
    if layer:
        mean = g.add("mul", g.add("reduce_sum", wide, axis=last), share)
        wide = g.add("sub", wide, mean)
    mean = g.add("mul", g.add("reduce_sum", g.add("square", wide), axis=last), share)
    mean = g.add("add", mean, g.add("constant", value=1e-6, type="float32"))
    normed = g.add("mul", w, g.add("convert", g.add("mul", wide, g.add("rsqrt", mean)), type=kind))
    return g.finish(total, normed), normed


WIDE = {"warp_rows": 32}
INT4 = {"weight": "int4", "scale": True, "output": "float16"}
CASES: dict[str, tuple[Gemm, GpuSchedule, tuple[int, ...], bool]] = {
    "gemv": (gemm(n=200, k=200, group_size=64, **INT4), gemv(), (1, 1), False),
    "gemv, three rows, warps of no power of two": (
        gemm(n=130, k=328, group_size=128, bias=True, **INT4), gemv(warps=6), (3,), False,
    ),
    "gemv, two blocks share K": (
        gemm(n=384, k=600, weight="uint3", scale=True, group_size=64, output="bfloat16", activation="bfloat16"),
        gemv(**WIDE, placement="accumulator", cluster=2), (2, 1), True,
    ),
    "gemv, gate": (
        gemm(n=256, k=200, weight="nf4", scale=True, group_size=64, output="float16", gate="silu"),
        gemv(**WIDE), (1, 2), True,
    ),
    "float16": (gemm(n=128, k=72, weight="float16", output="float16"), gemv(warps=2, split_k=1), (1,), False),
    "digits": (gemm(n=256, k=200, group_size=128, **INT4), digits(**WIDE), (1,), False),
    "digits, gate, two blocks share K": (
        gemm(n=384, k=704, group_size=128, bias=True, gate="silu", **INT4), digits(**WIDE, cluster=2), (1, 1), True,
    ),
    "digits, two rows, long": (gemm(n=64, k=2056, group_size=128, **INT4), digits(), (2,), False),
}  # fmt: skip


def launched(function: Any, arrays: list[Any], results: int, **options: Any) -> None:
    outputs = tuple(range(-results, 0))
    result = simulate_launch(function, arrays, outputs=outputs, **options)
    assert not result.findings, result.findings[:3]


def apart(graph: Graph, value: str, given: list[Any], problem: Gemm, schedule: GpuSchedule, weights: list[Any]):
    """Return the other result of a chain, and the product, by a kernel each."""
    kind = numpy_dtype(problem.activation)
    made = {name: np.full(graph.tile(name).shape, np.nan, kind) for name in graph.outputs}
    launched(emit_chain(graph, H200, "chain"), [*given, *made.values()], len(made))
    rows = made[value].reshape(-1, problem.k)
    y = np.full((len(rows), problem.columns), np.nan, numpy_dtype(problem.output))
    launched(emit(problem, H200, schedule, "product"), [rows, *weights, y], 1)
    return [made[name] for name in graph.outputs if name != value], y


@pytest.mark.daily(3)
@pytest.mark.parametrize("name", CASES)
def test_as_apart(name: str) -> None:
    problem, schedule, rows, layer = CASES[name]
    graph, value = residual_norm(rows, problem.k, problem.activation, layer)
    rng = np.random.default_rng(0)
    given = [rng.normal(size=node.tile.shape).astype(numpy_dtype(problem.activation)) for node in graph.inputs]
    weights = [array.copy() for array in problem_of(problem, 1).arrays[1:]]
    if problem.weight == "float16":  # of random bits
        weights[-1] *= np.float32(2.0**-14)
    others, wanted = apart(graph, value, given, problem, schedule, weights)
    form = PrologueForm(graph, value)
    function = emit_with_prologue(form, problem, H200, schedule, "fused")
    sums = [np.full(other.shape, np.nan, other.dtype) for other in others]
    y = np.full(wanted.shape, np.nan, wanted.dtype)
    for order in ("together", "last warps first"):
        arrays = [*given, *sums, *weights, y]
        outputs = (len(given), -1)
        result = simulate_launch(function, arrays, outputs=outputs, order=order)
        assert not result.findings, result.findings[:3]
        for found, other in zip(sums, others, strict=True):
            assert np.array_equal(found.astype(np.float32), other.astype(np.float32))
        difference = y.astype(np.float64) - wanted.astype(np.float64)
        assert np.isfinite(difference).all()
        rounding = 2.0 ** (-8 if problem.output == "bfloat16" else -11)
        assert np.linalg.norm(difference) <= rounding * np.linalg.norm(wanted.astype(np.float64)), name
