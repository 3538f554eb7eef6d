"""Reductions of what other reductions give, on the simulator: lanes take the positions of all together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from test_column_reductions import exact_of, run

from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.movement.reductions import positions
from targets import get_device

TARGETS = ("cuda/sm_90a", "rocm/gfx942", "rocm/gfx1100")


def over(g: GraphBuilder, value: str, axes: tuple[int, ...], operator: str = "reduce_sum") -> str:
    """Add reductions along axes, one after the other, none of which stays."""
    for axis in axes:
        value = g.add(operator, value, axis=axis, keep=False)
    return value


def whole(shape: tuple[int, ...], operator: str = "reduce_sum") -> Graph:
    """Return what all elements give, axis by axis."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", shape)
    found = over(g, g.add("neg", x), tuple(reversed(range(len(shape)))), operator)
    return g.finish(g.add("reshape", found, shape=(1,)))


def largest(shape: tuple[int, ...]) -> Graph:
    return whole(shape, "reduce_max")


def classes(shape: tuple[int, ...]) -> Graph:
    """Return a sum over few classes of quotients of sums over the images and pixels of each."""
    g = GraphBuilder("chain")
    x, y = g.input("x", "float32", shape), g.input("y", "float32", shape)
    top, bottom = (over(g, value, (2, 0)) for value in (g.add("mul", x, y), g.add("add", x, y)))
    one = g.add("constant", value=1000.0, type="float32")
    found = over(g, g.add("div", top, g.add("add", bottom, one)), (0,))
    return g.finish(g.add("reshape", found, shape=(1,)))


def deviations(shape: tuple[int, ...]) -> Graph:
    """Return the sum over few columns of what lies from their means: three reductions, one in the other."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", shape)
    mean = g.add("mul", over(g, x, (0,)), g.add("constant", value=1 / shape[0], type="float32"))
    squares = over(g, g.add("square", g.add("sub", x, mean)), (0,))
    return g.finish(g.add("reshape", over(g, g.add("sqrt", squares), (0,)), shape=(1,)))


def shares(shape: tuple[int, ...]) -> Graph:
    """Return elements over the sum of two axes of theirs."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", shape)
    total = g.add("reduce_sum", g.add("reduce_sum", x, axis=3, keep=True), axis=2, keep=True)
    return g.finish(g.add("div", x, total))


CASES: dict[str, tuple[Callable[..., Graph], tuple[int, ...], int]] = {
    "vectors": (whole, (5, 300), 1),
    "odd": (whole, (5, 301), 1),
    "three axes": (whole, (3, 4, 70), 1),
    "one": (whole, (1, 1), 1),
    "largest": (largest, (7, 130), 1),
    "classes": (classes, (4, 3, 130), 2),
    "deviations": (deviations, (9, 6), 1),
    "shares": (shares, (2, 3, 4, 130), 1),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES)
def test_lanes_take_the_positions_of_all(case: str, target: str) -> None:
    make, shape, count = CASES[case]
    graph = make(shape)
    rng = np.random.default_rng(3)
    given: list[Any] = [rng.normal(1.0, 1.0, shape).astype(np.float32) for _ in range(count)]
    found, exact = run(graph, given, target, None)[0], exact_of(graph, given)[0]
    assert np.linalg.norm(found - exact) <= 1e-5 * np.linalg.norm(exact)
    for special in (np.nan, np.inf):
        given[0].flat[-1] = special
        with np.errstate(invalid="ignore"):
            found, exact = run(graph, given, target, None)[0], exact_of(graph, given)[0]
        np.testing.assert_array_equal(np.isnan(found), np.isnan(exact))
        np.testing.assert_array_equal(np.isinf(found), np.isinf(exact))


def test_no_lane_reduces_a_row_alone() -> None:
    for graph, count in ((whole((4, 2048)), 8192), (classes((4, 4, 256)), 1024)):
        ends = [node for node in graph.nodes if node.operator == "reduce_sum"]
        assert max(positions(graph, node) for node in ends) == count
        (best, *_) = ranked(graph, machine_of(get_device("cuda/sm_90a")))
        source = emit_chain(graph, get_device("cuda/sm_90a"), "chain").script()
        assert best.mapping.lanes >= count // 8
        assert all(f"in range({length})" not in source for length in (256, 2048))
