"""Mappings of columns are proposed for the chains that their emitter takes, and for no others."""

from __future__ import annotations

import pytest

from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.mapping import mappings
from targets import get_device

GPU = get_device("cuda/sm_90a")


def turned(g: GraphBuilder, value: str, *permutation: int) -> str:
    shape = g.tile(value).shape
    return g.add("reshape", g.add("transpose", value, permutation=permutation), shape=shape)


def turned_through() -> Graph:
    """Sum over an axis of what is turned and has its order again: one element has its column."""
    g = GraphBuilder("chain")
    x = turned(g, g.input("x", "float32", (3, 1, 8)), 2, 0, 1)
    return g.finish(g.add("convert", g.add("reduce_sum", x, axis=0, keep=False), type="float16"))


def from_largest(inner: int, outer: int, scaled: bool = True) -> Graph:
    """Sum along an axis what is left of another axis's largest; or those themselves."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (6, 2, 64))
    found = g.add("reduce_max", x, axis=inner, keep=True)
    return g.finish(g.add("reduce_sum", g.add("sub", x, found) if scaled else found, axis=outer, keep=False))


def beside_turned() -> Graph:
    """Return a row's results twice, one turned: it reads sums of other columns."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (7, 5, 40))
    rows = g.add("add", x, g.add("reduce_sum", x, axis=0, keep=True))
    return g.finish(turned(g, rows, 1, 0, 2), rows)


def beside_another() -> Graph:
    """Sum what is made of two reductions of each position."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (6, 2, 64))
    both = g.add("add", g.add("reduce_max", x, axis=1), g.add("reduce_sum", x, axis=1))
    return g.finish(g.add("reduce_sum", both, axis=0, keep=False))


GRAPHS = {
    "turned through": (turned_through(), True),
    "of the same axis": (from_largest(0, 0), True),
    "of another axis": (from_largest(1, 0), False),
    "of another operator": (from_largest(1, 0, False), False),
    "beside another": (beside_another(), False),
    "beside turned rows": (beside_turned(), False),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_all_that_are_proposed_are_emitted(name: str) -> None:
    graph, fits = GRAPHS[name]
    found = mappings(graph)
    assert any(mapping.across for mapping in found) == fits
    for mapping in found:
        emit_chain(graph, GPU, "chain", mapping)
