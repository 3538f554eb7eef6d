"""What the reductions of a chain read: how many elements, over which positions, and of which columns.

Whether reductions along axes before the last stay in columns, as their kernels for GPUs take them, is tested
here: of each those below it are followed, as `ladder.lower.chain.column_reductions` does when it emits the
kernel. One that runs anew for each position is itself what is reduced, by the same operator.
"""

from __future__ import annotations

from collections.abc import Sequence

from ladder.ir.build import reduced_axis
from ladder.ir.extents import Shape, larger, product, total
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.partition.rows import REDUCTIONS, Index, operand_index, reduced_place
from tile_types.tile import Extent

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
        place = reduced_place(graph, node, place, loop)
        inside = _below(graph, node.inputs[0], place)
        along = [one for one in inside if any(part & loops for part in one[1])]
        if not _stay(graph, [one for one in inside if one not in along], columns):
            return False
        if not along:
            return place[len(place) - len(columns) :] == columns and _ends_alike(graph, node, columns)
        name, below, moved = along[0]
        if len(inside) > 1 or not moved or graph.producer(name).operator != node.operator:
            return False
        node, place = graph.producer(name), below


def _ends_alike(graph: Graph, node: Node, columns: Index) -> bool:
    """Tell whether the last axes of what a reduction reads are those of results, not some of many in one."""
    count = len(columns)
    read = graph.tile(node.inputs[0]).shape[-count:]
    return any(graph.tile(value).shape[-count:] == read for value in graph.outputs)


def reduced_elements(graph: Graph, values: Sequence[str]) -> Extent:
    """Return how many elements are reduced for one of each value: side by side they add, nested multiply."""
    ahead, found = [*values], dict[str, Extent]()
    seen = set[str]()
    while ahead:
        node = graph.producer(ahead.pop())
        if node.name in seen:
            continue
        seen.add(node.name)
        if node.operator in REDUCTIONS:
            extent, below = _operand(graph, node)
            inner = dict.fromkeys(name for name, at, _ in below if any(at))
            found |= {name: reduced_elements(graph, [name]) for name, _, _ in below if name not in inner}
            found[node.name] = product([extent, larger(1, reduced_elements(graph, [*inner]))])
        else:
            ahead += node.inputs
    return total(found.values())


def _operand(graph: Graph, node: Node) -> tuple[Extent, list[Below]]:
    """Return the extent that a reduction runs along, and the first reductions below what it reads there."""
    shape, axis = _along(graph, node)
    place = tuple(frozenset({"k"} if at == axis else ()) for at in range(len(shape)))
    return shape[axis], _below(graph, node.inputs[0], place)


def _along(graph: Graph, node: Node) -> tuple[Shape, int]:
    """Return the shape of what a reduction reads, and the axis that it runs along."""
    shape = graph.tile(node.inputs[0]).shape
    return shape, reduced_axis(graph, node)


def positions(graph: Graph, node: Node) -> Extent:
    """Return the positions of a reduction and of one that it reads as it is: lanes take those of both."""
    extent, below = _operand(graph, node)
    if len(below) != 1 or not below[0][2] or not any(below[0][1]):
        return extent
    inner = graph.producer(below[0][0])
    return product([extent, positions(graph, inner)]) if inner.operator == node.operator else extent


def reduced_extents(graph: Graph) -> list[Extent]:
    """Return the extents of the axes that a chain reduces."""
    along = (_along(graph, node) for node in graph.nodes if node.operator in REDUCTIONS)
    return [shape[axis] for shape, axis in along]
