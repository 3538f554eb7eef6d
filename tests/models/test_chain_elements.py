"""Elements of chains where a slip shows in few of them: borders of loops, conditions, roundings, NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from chain_targets import TARGETS, TORCH, run_chain
from interpreted import interpret_chains
from test_gpu_chains import simulated

import ladder
from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.partition.partition import partition
from ladder.partition.rows import row_axes
from ladder.runtime.compile import target_of
from targets import get_device
from tests.bounds import unproven

NAN, INF = math.nan, math.inf


def chain(make: Callable[..., str | tuple[str, ...]], *tensors: torch.Tensor) -> Graph:
    """Return the chain that a function adds, of inputs like tensors."""
    names = {dtype: name for name, dtype in TORCH.items()}
    g = GraphBuilder("chain")
    inputs = [g.input(f"x{at}", names[t.dtype], tuple(t.shape)) for at, t in enumerate(tensors)]
    found = make(g, *inputs)
    return g.finish(*((found,) if isinstance(found, str) else found))


def assert_equal(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    assert bool(((got == want) | (got.isnan() & want.isnan())).all()), (got, want)


@pytest.mark.parametrize("target", TARGETS)
def test_relu_keeps_what_is_no_number(target: str) -> None:
    x = torch.tensor([NAN, -1.0, 0.0, -0.0, INF, -INF, 2.0, -NAN] * 4)
    (got,) = run_chain(chain(lambda g, x: g.add("relu", x), x), (x,), target)
    assert_equal(got, torch.relu(x))


@pytest.mark.parametrize("target", TARGETS)
def test_negatives_of_zeros(target: str) -> None:
    x = torch.tensor([0.0, -0.0, 1.0, -INF] * 4)
    (got,) = run_chain(chain(lambda g, x: g.add("neg", x), x), (x,), target)
    assert_equal(got, -x)
    assert torch.equal(got.signbit(), (-x).signbit())


ROUNDED = (
    *(0x7F800001, 0x7FFFFFFF, 0xFF800001, 0xFFFFFFFF, 0x7FC00000, 0x7F800000, 0x7F7FFFFF),
    *(0x3F808000, 0x3F818000, 0xBF808000, 0xBF818000, 0x3F807FFF, 0x3F808001, 0x00008000, 0x00018000),
    0x80000000,
)
"""Bits of float32: NaN of all kinds, limits, halfway between two bfloat16, the lower even or odd."""


@pytest.mark.parametrize("target", TARGETS)
def test_floats_become_the_nearest_bfloat16(target: str) -> None:
    x = torch.from_numpy(np.array(ROUNDED, np.uint32).view(np.float32))

    def make(g: GraphBuilder, x: str) -> tuple[str, str]:
        stored = g.add("convert", x, type="bfloat16")
        within = g.add("convert", g.add("convert", x, type="bfloat16", exact=True), type="float32")
        return stored, within

    stored, within = run_chain(chain(make, x), (x,), target)
    assert_equal(stored.float(), x.bfloat16().float())
    assert_equal(within, x.bfloat16().float())


@pytest.mark.parametrize("target", TARGETS)
def test_conversions_within_a_chain_keep_what_their_type_holds(target: str) -> None:
    whole = torch.tensor([300, -129, 128, 127, -1, 256, 511, -300] * 4, dtype=torch.int32)
    x = torch.tensor([1 + 2.0**-12, 2049.0, 65520.0, 1e-8, -(1 + 2.0**-11), 0.1, 3.0, 2.0**-25] * 4)

    def make(g: GraphBuilder, whole: str, x: str) -> tuple[str, ...]:
        bytes_ = [g.add("convert", whole, type=name) for name in ("int8", "uint8")]
        half = g.add("convert", x, type="float16", exact=True)
        return tuple(g.add("convert", value, type="float32") for value in (*bytes_, half))

    signed, unsigned, half = run_chain(chain(make, whole, x), (whole, x), target)
    assert_equal(signed, whole.to(torch.int8).float())
    assert_equal(unsigned, whole.to(torch.uint8).float())
    assert_equal(half, x.half().float())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("columns", [3, 16, 19, 32, 45])
def test_no_column_is_left_out(target: str, columns: int) -> None:
    """Columns of whole vectors, and beyond them; each lane of a sum and of a maximum."""
    x = torch.eye(columns)[torch.arange(columns)] * (torch.arange(columns) + 1.0)
    most = -1 - x

    def make(g: GraphBuilder, x: str, most: str) -> tuple[str, ...]:
        total = g.add("reduce_sum", x, axis=1, keep=True)
        return g.add("add", x, total), g.add("add", g.add("reduce_max", most, axis=1, keep=True), most)

    sums, maxima = run_chain(chain(make, x, most), (x, most), target)
    assert_equal(sums, x + x.sum(1, keepdim=True))
    assert_equal(maxima, most + most.amax(1, keepdim=True))


@pytest.mark.parametrize("target", TARGETS)
def test_maxima_of_infinities(target: str) -> None:
    x = torch.full((3, 20), -INF)
    x[1, 4] = -1e38
    (got,) = run_chain(chain(lambda g, x: g.add("reduce_max", x, axis=1, keep=False), x), (x,), target)
    assert_equal(got, x.amax(1))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("keep", [False, True])
def test_reductions_along_each_axis(target: str, axis: int, keep: bool) -> None:
    x = torch.arange(60.0).reshape(3, 4, 5)
    (got,) = run_chain(chain(lambda g, x: g.add("reduce_sum", x, axis=axis, keep=keep), x), (x,), target)
    assert_equal(got, x.sum(axis, keepdim=keep))


@pytest.mark.parametrize("target", TARGETS)
def test_sums_of_all_that_depend_on_sums_of_all(target: str) -> None:
    """Each is computed once, before the loop of the next."""
    x = torch.arange(24.0).reshape(4, 6)

    def total(g: GraphBuilder, x: str) -> str:
        return g.add("reduce_sum", g.add("reduce_sum", x, axis=1, keep=False), axis=0, keep=False)

    def make(g: GraphBuilder, x: str) -> tuple[str, ...]:
        first = g.add("add", x, total(g, x))
        second = g.add("add", x, total(g, first))
        return g.add("slice", second, begin=(1, 0), shape=(3, 6)), g.add("mul", first, second)

    first = x + x.sum()
    second = x + first.sum()
    for got, want in zip(run_chain(chain(make, x), (x,), target), (second[1:], first * second), strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("moved", [False, True])
def test_sums_of_sums_of_nothing(target: str, moved: bool) -> None:
    """As of detections of which none were found."""
    x = torch.zeros(0, 5, 3, 2, 2)

    def make(g: GraphBuilder, x: str) -> str:
        sums = g.add("reduce_sum", g.add("reduce_sum", x, axis=4, keep=False), axis=3, keep=False)
        mean = g.add("div", sums, g.add("constant", type="float32", value=4.0))
        return g.add("reshape", mean, shape=(0, 15)) if moved else mean

    (got,) = run_chain(chain(make, x), (x,), target)
    assert got.shape == ((0, 15) if moved else (0, 5, 3))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("first", ["guarded", "plain"])
def test_what_is_read_under_a_condition_is_read_again_where_there_is_none(
    target: str, first: str, axis: int
) -> None:
    x = torch.arange(24 * 24.0).reshape(24, 24) + 1

    def make(g: GraphBuilder, x: str) -> str:
        short, long, behind = ([24, 24] for _ in range(3))
        short[axis], long[axis], behind[axis], begin = 10, 20, 10, [0, 0]
        behind[1 - axis], begin[axis] = 0, 1
        part = g.add("slice", x, begin=tuple(begin), shape=tuple(short))
        guarded = g.add("pad", part, low=(0, 0), high=tuple(behind), value=0.0)
        plain = g.add("slice", x, begin=tuple(begin), shape=tuple(long))
        return g.add("add", *((guarded, plain) if first == "guarded" else (plain, guarded)))

    (got,) = run_chain(chain(make, x), (x,), target)
    plain = x.narrow(axis, 1, 20)
    guarded = torch.cat([x.narrow(axis, 1, 10), torch.zeros_like(x.narrow(axis, 0, 10))], axis)
    assert_equal(got, guarded + plain)


def joins_of_joins(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = torch.cat([x, y, x + y], 0)
    return torch.cat([inner, inner * 2, y, inner[1:]], 0)


def test_joins_of_joins_choose_the_part(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret_chains(monkeypatch)
    x, y = torch.arange(10.0).reshape(2, 5), -torch.arange(10.0).reshape(2, 5)
    compiled = ladder.compile(joins_of_joins)
    with torch.no_grad():
        assert torch.equal(compiled(x, y), joins_of_joins(x, y))
    assert not compiled.refused


@pytest.mark.parametrize("target", TARGETS)
def test_long_parts_of_joins_are_read_within_bounds(target: str) -> None:
    """They are computed before it is known which part a lane takes: each lies on its own side."""
    x, y = torch.arange(10.0).reshape(2, 5) + 1, -torch.arange(10.0).reshape(2, 5)

    def make(g: GraphBuilder, x: str, y: str) -> str:
        value = x
        for _ in range(40):
            value = g.add("neg", g.add("add", value, x))
        return g.add("repeat", g.add("concat", value, y, axis=1), axis=1, times=3)

    graph = chain(make, x, y)
    if target == "cpu":  # the simulator checks the others' accesses
        assert not unproven(emit_chain(graph, get_device(target_of(torch.device("cpu"))), "chain"))
    (got,) = run_chain(graph, (x, y), target)
    value = x
    for _ in range(40):
        value = -(value + x)
    assert_equal(got, torch.cat([value, y], 1).repeat_interleave(3, 1))


def test_rows_without_a_reduction_are_in_no_chain_with_it() -> None:
    """As many rows are reduced as the join has, but not those of the join."""
    g = GraphBuilder("joined")
    x, y = g.input("x", "float32", (4, 8)), g.input("y", "float32", (4, 1))
    total = g.add("reduce_sum", x, axis=1, keep=True)
    later = g.add("slice", total, begin=(1, 0), shape=(3, 1))
    first = g.add("slice", y, begin=(0, 0), shape=(1, 1))
    graph = g.finish(g.add("concat", later, first, axis=0))
    assert row_axes(graph, graph.outputs) is None


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_rows_before_the_first_are_not_put(target: str) -> None:
    """A GPU leaves out rows beyond either end; numbers below 0 count from the last."""
    g = GraphBuilder("chain")
    x, ids = g.input("x", "float32", (3, 4)), g.input("ids", "int64", (3,))
    base = g.input("base", "float32", (5, 4))
    graph = g.finish(g.add("put", base, ids, g.add("neg", x), axis=0))
    values, into = np.arange(12, dtype=np.float32).reshape(3, 4) + 1, np.zeros((5, 4), np.float32)
    function = emit_chain(graph, get_device(target), "chain")
    found = simulated(function, target, [values, np.array([-6, -5, 5]), into], (2,))
    assert {finding.kind for finding in found.findings} <= {"unwritten"}, found.report()
    assert np.array_equal(into[0], -values[1])
    assert not into[1:].any()


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_cosines_of_few_angles_are_computed_once(target: str) -> None:
    """Code that reduces arguments is long: heads read the cosines of a token, each by a load."""
    for heads, chains in ((8, 2), (2, 1)):
        g = GraphBuilder("rotary")
        angle = g.add("reshape", g.input("angles", "float32", (1, 64)), shape=(1, 1, 64))
        turned = g.add("mul", g.input("x", "float32", (1, heads, 64)), g.add("cos", angle))
        assert [part.kind for part in partition(g.finish(turned), device=get_device(target))] == [
            "chain"
        ] * chains
