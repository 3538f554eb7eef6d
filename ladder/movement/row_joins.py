"""Rows that lanes hold of what is joined, bordered or taken in windows.

Which operand of a join between rows an element is of is the same for all of its row. Long windows side by
side, the frames of a signal, are rows of which neighbours share elements.
"""

from __future__ import annotations

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from ladder.partition.rows import Loops, places_read

COLUMN: Loops = frozenset({"column"})
"""The loop over what a row has."""

LEAST_FRAME = 64
"""Elements of a window from which on lanes share it."""


def between_rows(graph: Graph, rows: int) -> frozenset[str]:
    """Return the joins and pads of a loop over rows that no element's column decides."""
    across: set[str] = set()
    for value, place in places_read(graph, graph.outputs, rows, (frozenset(), COLUMN), lambda _: "column"):
        node = graph.producer(value)
        if any(place[axis] for axis in _cut_axes(node)):
            across.add(node.name)
    return frozenset(n.name for n in graph.nodes if n.operator in ("concat", "pad")) - across


def is_of_frames(node: Node) -> bool:
    """Tell whether windows are long and their elements neighbours, without borders."""
    attributes, length = node_attributes(node), node.tile.shape[-1]
    if attributes["pad"] or not isinstance(length, int) or length < LEAST_FRAME:
        return False
    indexing = parse_indexing(attributes["spec"])
    last, along = indexing.result[-1], [dict(axis.terms) for axis in indexing.operands[0]]
    return along[-1].get(last) == 1 and all(last not in terms for terms in along[:-1])


def _cut_axes(node: Node) -> list[int]:
    """Return the axes along which a join or a pad is of several pieces."""
    if node.operator == "concat":
        return [node_attributes(node)["axis"] % len(node.tile.shape)]
    if node.operator != "pad":
        return []
    low, high = (node_attributes(node)[end] for end in ("low", "high"))
    return [axis for axis in range(len(low)) if (low[axis], high[axis]) != (0, 0)]
