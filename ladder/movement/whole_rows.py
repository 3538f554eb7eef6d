"""Rows of a few elements of which one thread of a GPU has all.

Threads of single elements would compute what the elements of a row have in common for each of them, lanes
that share a row would leave some without an element, and exchange what each of them found.
"""

from __future__ import annotations

from ladder.ir.build import is_along_last, node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.partition.rows import REDUCTIONS
from tile_types.tile import Extent

MOST_WHOLE, LEAST_PARTS, WORK_OF_PART = 16, 3, 2
"""Elements of a joined row, parts that it is joined of, and element-wise operators of a chain for each."""

MOST_SHORT = 8
"""Elements of a row that a thread has for what it reduces of them."""

ACCESS, MOST_BESIDE, BUSY_THREADS = 16, 4, 132 * 256
"""Bytes of an access, rows side by side that a thread has to fill them, and threads that keep a GPU busy."""

MOST_COMPUTED = 1024
"""Elements of all element-wise operators that a thread computes, unrolled."""


def whole_rows(graph: Graph) -> int | None:
    """Return the leading axes of a chain's results that count rows of which a thread has whole ones.

    None if it has no such rows, or if they are numbers, which threads take anyway.
    """
    shapes = [graph.tile(value).shape for value in graph.outputs]
    if reduces_short_rows(graph):
        rows = min(map(len, shapes)) - (len({*map(len, shapes)}) == 1)
        lengths = [_length(shape[rows:]) for shape in shapes]
        if len({shape[:rows] for shape in shapes}) == 1 and all(0 < n <= MOST_SHORT for n in lengths):
            bits = max(lengths) * max(graph.tile(value).ttype.elem_bits for value in graph.outputs)
            lanes = bits > 8 * ACCESS and bits % (8 * ACCESS) == 0  # they store accesses side by side
            return rows if max(lengths) > 1 and not lanes else None
    joins = [len(node.inputs) for node in graph.nodes if node.operator == "concat"]
    parts, shape = max(joins, default=0), shapes[0]
    if len({*shapes}) > 1 or parts < LEAST_PARTS or len(_computed(graph)) < parts * WORK_OF_PART:
        return None
    counts = {rows: _length(shape[rows:]) for rows in range(1, len(shape))}
    return min((rows for rows, count in counts.items() if parts <= count <= MOST_WHOLE), default=None)


def reduces_short_rows(graph: Graph) -> bool:
    """Tell whether all that a chain reduces are rows of so few elements that a thread unrolls them."""
    reduced = [node for node in graph.nodes if node.operator in REDUCTIONS]
    return bool(reduced) and all(_is_short(graph, node) for node in reduced)


def reads_whole_rows(graph: Graph) -> bool:
    """Tell whether threads that work alone have all elements of the rows that they reduce."""
    return reduces_short_rows(graph) and takes_whole_rows(graph)


def of_rows_alone(graph: Graph, rows: int) -> bool:
    """Tell whether a chain reads for each number of its results a row that it reads for no other."""
    count = _length(graph.tile(graph.outputs[0]).shape[:rows])
    read = max((_length(node.tile.shape) for node in graph.inputs), default=0)
    return 0 < count * max(map(_length, _reduced_rows(graph)), default=0) <= read


def takes_whole_rows(graph: Graph) -> bool:
    """Tell whether threads of whole rows may unroll what they read: no windows, and no long rows."""
    reduces = any(node.operator in REDUCTIONS for node in graph.nodes)
    return (not reduces or reduces_short_rows(graph)) and not _is_cut(graph)


def _is_cut(graph: Graph) -> bool:
    return any(node.operator in ("pad", "map") for node in graph.nodes)


def _reduced_rows(graph: Graph) -> list[tuple[Extent, ...]]:
    """Return the last axes of what is reduced."""
    return [graph.tile(n.inputs[0]).shape[-1:] for n in graph.nodes if n.operator in REDUCTIONS]


def _is_short(graph: Graph, node: Node) -> bool:
    columns = graph.tile(node.inputs[0]).shape[-1:]
    return is_along_last(graph, node) and 0 < _length(columns) <= MOST_SHORT


def rows_beside(graph: Graph, rows: int) -> int:
    """Return how many whole rows a thread has, one after the other in memory: as many as fill accesses.

    One where too few threads would be left, or where rows are joined to others.

    rows: Leading axes of results that count them.
    """
    shapes = [graph.tile(value).shape for value in graph.outputs]
    above, read = shapes[0][:rows], map(_length, _reduced_rows(graph))
    length = max(*(_length(shape[rows:]) for shape in shapes), *read, 1)
    bits = min((node.tile.ttype.elem_bits for node in graph.inputs), default=32)
    count, crossed = product(above), _is_cut(graph)
    joined = any(_joins_rows(node, rows) for node in graph.nodes if node.operator == "concat")
    if not above or not isinstance(count, int) or not isinstance(above[-1], int) or crossed or joined:
        return 1
    beside = 1
    while (
        length * beside * bits % (8 * ACCESS)
        and beside < MOST_BESIDE
        and above[-1] % (2 * beside) == 0
        and count >= 2 * beside * BUSY_THREADS
        and 2 * beside * length * len(_computed(graph)) <= MOST_COMPUTED
    ):
        beside *= 2
    return beside


def _joins_rows(node: Node, rows: int) -> bool:
    """Tell whether a join may be along an axis that counts rows."""
    rank = len(node.tile.shape)
    return rank <= rows or bool(node_attributes(node)["axis"] % rank < rows)


def _computed(graph: Graph) -> list[Node]:
    return [node for node in graph.nodes if get_operator(node.operator).elementwise]


def _length(shape: tuple[Extent, ...]) -> int:
    """Return the elements of a shape; 0 if not known."""
    count = product(shape)
    return count if isinstance(count, int) else 0
