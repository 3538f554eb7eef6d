"""Chains of few rows: what they read is on its way before they wait, and no load waits for another."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.vector_loops import VectorLoops
from ladder.movement.choose import ranked
from ladder.movement.mapping import WARP, Mapping
from ladder.simulate import simulate_launch
from targets import get_device

H200 = get_device("cuda/sm_90a")
WAIT, SYNC, LOAD, PREFETCH = 'griddepcontrol("wait"', "cta_sync", "T.ptx.ld(", "T.ptx.prefetch("


def norm(rows: int, width: int) -> Graph:
    """Return the sum of two inputs, and its root mean square norm times a parameter."""
    g = GraphBuilder("chain")
    x, y = g.input("x", "float16", (rows, width)), g.input("y", "float16", (rows, width))
    total = g.add("add", x, y)
    wide = g.add("convert", total, type="float32")
    squares = g.add("reduce_sum", g.add("square", wide), axis=1)
    normed = g.add("convert", g.add("mul", wide, g.add("rsqrt", squares)), type="float16")
    return g.finish(total, g.add("mul", g.input("w", "float16", (width,)), normed))


def pieces(rows: int, width: int) -> Graph:
    """Return parts of an input that differ in size: two of them, and one times a table."""
    g = GraphBuilder("chain")
    x, table = g.input("x", "float16", (rows, width)), g.input("table", "float16", (1, width // 4))
    parts, begin = [], 0
    for share in (width // 2, width // 4, width // 4):
        parts.append(g.add("slice", x, begin=(0, begin), shape=(rows, share)))
        begin += share
    return g.finish(g.add("neg", parts[0]), g.add("mul", parts[1], table), g.add("relu", parts[2]))


def script(graph: Graph, device: Any = H200, mapping: Mapping | None = None) -> str:
    return emit_chain(graph, device, "chain", mapping).script()


def check(graph: Graph, mapping: Mapping | None = None) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(-2, 2, node.tile.shape).astype(np.float16) for node in graph.inputs]
    outputs = [np.full(graph.tile(value).shape, np.nan, np.float16) for value in graph.outputs]
    places = tuple(range(len(inputs), len(inputs) + len(outputs)))
    result = simulate_launch(emit_chain(graph, H200, "k", mapping), [*inputs, *outputs], outputs=places)
    assert not result.findings, result.report()
    for got, exact in zip(outputs, evaluate(graph, inputs), strict=True):
        assert np.allclose(got.astype(np.float64), exact, rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("make", [norm, pieces])
def test_only_prefetches_come_before_the_wait(make: Callable[[int, int], Graph]) -> None:
    before, after = script(make(1, 4096)).split(WAIT)
    assert before.count(PREFETCH) == len(make(1, 4096).inputs)
    assert LOAD not in before
    assert PREFETCH not in after
    assert LOAD in after


def test_lines_of_small_inputs_are_prefetched_and_none_beyond() -> None:
    """An address of 128 bytes per line; of 3 x 100 halves there are five lines, the last one not whole."""
    g = GraphBuilder("chain")
    graph = g.finish(g.add("neg", g.input("x", "float16", (3, 100))))
    (lines,) = re.findall(r"if (\w+) < (\d+):\s+T\.ptx\.prefetch", script(graph).split(WAIT)[0])
    assert int(lines[1]) == 5
    g = GraphBuilder("chain")
    large = g.finish(g.add("neg", g.input("large", "float16", (64, 4096))))
    assert PREFETCH not in script(large)


def test_older_devices_prefetch_nothing() -> None:
    assert PREFETCH not in script(norm(1, 4096), get_device("cuda/sm_80"))


def test_parameters_are_loaded_before_the_barrier() -> None:
    before, after = script(norm(1, 4096)).split(SYNC)
    assert before.count(LOAD) == 3
    assert LOAD not in after


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("mapping", [None, Mapping(64, 2), Mapping(32, 3, teams=2)])
def test_norms_are_right(rows: int, mapping: Mapping | None) -> None:
    check(norm(rows, 640 if mapping is None or mapping.num == 2 else 744), mapping)


def test_many_rows_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers are scarce where blocks are many, so parameters are loaded after the reduction."""
    mapping, many = Mapping(64, 8), norm(H200.units + 1, 4096)
    plain = script(many, mapping=mapping)
    assert LOAD in plain.split(SYNC)[1]
    monkeypatch.setattr(RowLoops, "may_load_first", lambda self: True)
    assert LOAD not in script(many, mapping=mapping).split(SYNC)[1]


@pytest.mark.parametrize(("rows", "width"), [(1, 4096), (3, 96), (5, 4 * 88)])
@pytest.mark.parametrize("mapping", [None, Mapping(), Mapping(threads=128), Mapping(num=2)])
def test_results_of_different_sizes_are_right(rows: int, width: int, mapping: Mapping | None) -> None:
    check(pieces(rows, width), mapping)


def test_results_of_different_sizes_have_threads_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """256 vectors and 128 pairs in three blocks of 128 threads; in two where a thread has of both kinds."""
    mapping, graph = Mapping(threads=128), pieces(1, 4096)
    apart = script(graph, mapping=mapping)
    assert "cta_id([3])" in apart  # equal sizes share threads
    assert re.search(r" = \w+ - 256$", apart, re.MULTILINE)
    monkeypatch.setattr(VectorLoops, "may_be_side_by_side", lambda self, counts: False)
    assert "cta_id([2])" in script(graph, mapping=mapping)


def test_what_fills_the_device_stays_as_it_is() -> None:
    """A row has 384 vectors in three blocks, of which the smaller pieces may fill the device once."""
    fit = H200.units
    most, more = (script(pieces(rows, 4096), mapping=Mapping(threads=128)) for rows in (fit, fit + 1))
    assert f"cta_id([{3 * fit}])" in most
    assert f"cta_id([{2 * (fit + 1)}])" in more


def test_numbers_are_read_before_one_is_stored() -> None:
    """As the positions that a cache counts layer by layer: each would wait for the store before it."""
    g = GraphBuilder("chain")
    numbers = [g.input(f"n{at}", "float16", (1,)) for at in range(5)]
    graph = g.finish(*(g.add("mul", number, number) for number in numbers))
    lines = script(graph).partition(WAIT)[2].splitlines()
    reads = [at for at, line in enumerate(lines) if re.search(r"= .*buffer\w*\[0\]", line)]
    stores = [at for at, line in enumerate(lines) if re.match(r" *buffer\w*\[0\] =", line)]
    assert len(stores) == len(reads) == len(numbers)
    assert max(reads) < min(stores)
    check(graph)


def turned(rows: int, width: int) -> Graph:
    """Return the cosines and sines of positions times frequencies, and a row that they turn."""
    g = GraphBuilder("chain")
    place, steps = g.input("place", "float32", (rows, 1)), g.input("steps", "float32", (width // 2,))
    half = g.add("mul", place, steps)
    angles = g.add("concat", half, half, axis=1)
    cos, sin = g.add("cos", angles), g.add("sin", angles)
    x = g.add("convert", g.input("x", "float16", (rows, width)), type="float32")
    return g.finish(cos, sin, g.add("convert", g.add("mul", x, cos), type="float16"))


@pytest.mark.parametrize("device", ["cuda/sm_90a", "rocm/gfx942"])
def test_few_long_functions_are_of_single_elements(device: str) -> None:
    """One thread had the code of 32 cosines and sines, which it fetched: 11 us of each decoded token."""
    few, many = (script(turned(rows, 64), get_device(device)).count("\n") for rows in (1, 8192))
    assert 3 * few < 2 * many


@pytest.mark.parametrize("rows", [1, 3])
def test_long_functions_of_single_elements_are_right(rows: int) -> None:
    graph = turned(rows, 64)
    rng = np.random.default_rng(0)
    kinds = [np.float32, np.float32, np.float16]
    inputs = [
        rng.uniform(0, 40, node.tile.shape).astype(kind)
        for node, kind in zip(graph.inputs, kinds, strict=True)
    ]
    outputs = [np.full((rows, 64), np.nan, kind) for kind in kinds]
    result = simulate_launch(emit_chain(graph, H200, "k"), [*inputs, *outputs], outputs=(3, 4, 5))
    assert not result.findings, result.report()
    for got, exact, bound in zip(outputs, evaluate(graph, inputs), (2e-4, 2e-4, 0.04), strict=True):
        assert np.allclose(got.astype(np.float64), exact, rtol=0, atol=bound)


def test_rows_that_are_stored_after_barriers_have_few_warps() -> None:
    """The last warp of a block keeps the others from what they store; two vectors a lane hide that."""
    g = GraphBuilder("chain")
    x, y = (g.input(name, "float32", (4096, 2048)) for name in "xy")
    norms = [g.add("sqrt", g.add("reduce_sum", g.add("square", v), axis=1)) for v in (x, y)]
    graph = g.finish(g.add("sub", x, g.add("mul", y, g.add("div", *norms))))
    best = ranked(graph)[0].mapping
    assert WARP < best.lanes <= 256
    assert best.num > 1


def test_few_gathered_rows_are_summed_by_threads_alone() -> None:
    g = GraphBuilder("chain")
    table, ids = g.input("table", "float16", (50000, 128)), g.input("ids", "int64", (8192, 8))
    weights = g.add("reshape", g.input("weights", "float32", (8192, 8)), shape=(8192, 8, 1))
    rows = g.add("convert", g.add("gather", table, ids, axis=0), type="float32")
    graph = g.finish(
        g.add("convert", g.add("reduce_sum", g.add("mul", rows, weights), axis=1), type="float16")
    )
    best = ranked(graph)[0].mapping
    assert (best.lanes, best.num) == (1, 0)


@pytest.mark.parametrize("shape", [(40, 64), (3, 200, 16)])
def test_numbers_are_reduced_along_inner_axes_without_inputs(shape: tuple[int, ...]) -> None:
    g, axis = GraphBuilder("chain"), len(shape) - 2
    rows, columns = (
        g.add("iota", extent=shape[at], axis=at, rank=len(shape), type="float32") for at in (axis, axis + 1)
    )
    product = g.add("cos", g.add("mul", rows, columns))
    total = g.add("reduce_sum", product, axis=axis)
    check(g.finish(g.add("convert", total, type="float16")))
