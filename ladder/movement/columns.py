"""Test whether reductions along axes before the last stay in columns, as their kernels for GPUs take them.

Of each reduction those below it are followed, as `ladder.lower.chain.column_reductions` does when it emits
the kernel: one that runs anew for each position is itself what is reduced, by the same operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.partition.rows import REDUCTIONS, Index, operand_index

Below = tuple[str, Index, bool]
"""A reduction that a value is computed of, what its place depends on, and whether it is only moved."""


def reduces_columns(graph: Graph, axes: int) -> bool:
    """Tell whether every reduction reads the column that it is the result of.

    axes: Trailing axes of results that are columns.
    """
    for value in graph.outputs:
        shape = graph.tile(value).shape
        place = tuple(frozenset() if e == 1 else frozenset({f"d{at}"}) for at, e in enumerate(shape))
        if not _stay(graph, _below(graph, value, place), place[len(place) - axes :]):
            return False
    return True


def _stay(graph: Graph, found: Sequence[Below], columns: Index) -> bool:
    return all(_is_series(graph, graph.producer(name), place, columns) for name, place, _ in found)


def _below(graph: Graph, value: str, place: Index) -> list[Below]:
    """Return the first reductions below an element of a value."""
    found: dict[Below, None] = {}
    seen = {(value, place, True)}
    open_values = [*seen]
    while open_values:
        value, place, moved = open_values.pop()
        node = graph.producer(value)
        if node.operator in REDUCTIONS:
            found[node.name, place, moved] = None
            continue
        moved = moved and get_operator(node.operator).engine == "view"
        reads = [(o, operand_index(graph, node, at, place), moved) for at, o in enumerate(node.inputs)]
        open_values += [read for read in dict.fromkeys(reads) if read not in seen]
        seen.update(reads)
    return list(found)


def _is_series(graph: Graph, node: Node, place: Index, columns: Index) -> bool:
    """Tell whether a reduction, those that it reduces as they are, and those they read are of a column."""
    loops: set[str] = set()
    while True:
        loops.add(loop := f"k{len(loops)}")
        place = _operand_place(graph, node, place, loop)
        inside = _below(graph, node.inputs[0], place)
        along = [one for one in inside if any(part & loops for part in one[1])]
        if not _stay(graph, [one for one in inside if one not in along], columns):
            return False
        if not along:
            return place[len(place) - len(columns) :] == columns
        name, below, moved = along[0]
        if len(inside) > 1 or not moved or graph.producer(name).operator != node.operator:
            return False
        node, place = graph.producer(name), below


def _operand_place(graph: Graph, node: Node, place: Index, loop: str) -> Index:
    """Return what the place depends on of an element that a reduction reads."""
    attributes, shape = node_attributes(node), graph.tile(node.inputs[0]).shape
    axis = attributes["axis"] % len(shape)
    own = frozenset[str]() if shape[axis] == 1 else frozenset({loop})
    return (*place[:axis], own, *place[axis + 1 if attributes["keep"] else axis :])
