"""Reductions of a few positions are computed by element, where nobody else reads what they read."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.rewrite import simplify
from targets import get_device

H200 = get_device("cuda/sm_90a")


def reductions(graph: Graph) -> int:
    return sum(node.operator.startswith("reduce") for node in graph.nodes)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("extent", [1, 2, 3, 4])
def test_values_stay(extent: int, keep: bool) -> None:
    """NaN, infinities and zeros of both signs too; operands that are broadcast."""
    g = GraphBuilder("model")
    x, w = g.input("x", "float32", (5, extent, 8)), g.input("w", "float32", (extent, 1))
    scaled = g.add("mul", x, w)
    graph = g.finish(*(g.add(name, scaled, axis=1, keep=keep) for name in ("reduce_sum", "reduce_max")))
    found = simplify(graph, H200)
    assert reductions(found) == 0 or extent == 1
    values = np.random.default_rng(0).standard_normal((5, extent, 8)).astype(np.float32)
    values[0], values[1, 0], values[2, 0], values[3, :, 0] = -0.0, np.nan, np.inf, 0.0
    given = {"x": values, "w": np.abs(values[4, :, :1]) + 1}
    for one, other in zip(evaluate(graph, given), evaluate(found, given), strict=True):
        np.testing.assert_array_equal(one.astype(np.float32), other.astype(np.float32))
        assert np.array_equal(np.signbit(one), np.signbit(other)) or np.isnan(one).any()


def test_only_short_ones_that_nobody_reads_again() -> None:
    def reduced(shape: tuple[int, ...], axis: int, *, again: bool = False) -> int:
        g = GraphBuilder("model")
        x = g.add("exp", g.input("x", "float32", shape))
        total = g.add("reduce_sum", x, axis=axis, keep=True)
        return reductions(simplify(g.finish(g.add("sub", x, total) if again else total), H200))

    assert reduced((7, 3, 64), 1) == 0
    assert reduced((7, 3, 64), 1, again=True) == 1  # as norms do
    assert reduced((7, 5, 64), 1) == 1
    assert reduced((7, 3, 4), 1) == 1
    assert reduced((7, 64, 3), 2) == 1


def test_a_sum_of_what_is_joined_reads_what_was_joined() -> None:
    g = GraphBuilder("model")
    x, y = (g.input(name, "float16", (4, 1, 64)) for name in "xy")
    both = g.add("convert", g.add("concat", x, y, axis=1), type="float32")
    found = simplify(g.finish(g.add("reduce_sum", both, axis=1)), H200)
    assert not {"concat", "slice", "reduce_sum"} & {node.operator for node in found.nodes}


def test_positions_of_the_axis_may_be_read_beside_them() -> None:
    """As colours are, of a picture whose extremes are taken too; positions of another axis may not."""

    def reduced(begin: tuple[int, ...], shape: tuple[int, ...]) -> int:
        g = GraphBuilder("model")
        x = g.add("exp", g.input("x", "float32", (7, 3, 8, 64)))
        red = g.add("slice", x, begin=begin, shape=shape)
        return reductions(
            simplify(g.finish(g.add("sub", g.add("reduce_max", x, axis=1, keep=True), red)), H200)
        )

    assert reduced((0, 2, 0, 0), (7, 1, 8, 64)) == 0
    assert reduced((0, 0, 1, 0), (7, 3, 1, 64)) == 1


def test_distances_of_pairs_that_are_read_beside_them() -> None:
    """As of forces: a pair's differences are computed again where they would be stored to be summed."""
    g = GraphBuilder("model")
    x = g.input("x", "float32", (300, 3))
    pairs = (g.add("reshape", x, shape=shape) for shape in ((1, 300, 3), (300, 1, 3)))
    apart = g.add("sub", *pairs)
    squares = g.add("reduce_sum", g.add("square", apart), axis=2, keep=True)
    graph = g.finish(g.add("reduce_sum", g.add("mul", apart, g.add("exp", squares)), axis=1, keep=False))
    found = simplify(graph, H200)
    assert reductions(found) == 1
    values = {"x": np.random.default_rng(3).uniform(-1, 1, (300, 3)).astype(np.float32)}
    np.testing.assert_allclose(evaluate(found, values), evaluate(graph, values), rtol=1e-6, atol=1e-4)
