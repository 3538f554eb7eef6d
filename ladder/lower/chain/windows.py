"""Reductions of one thread: windows (pooling, depthwise convolution) on vectors of channels, and short rows.

Elements of a window are taken one after the other, unrolled: each is a vector of neighbouring channels, so
that conditions and addresses are worked out once for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import BYTES, Nest, Reduction
from ladder.lower.chain.vectors import ACCESS_BYTES, Vectors
from ladder.movement.mapping import BUSY_ROWS, WINDOW
from ladder.movement.reductions import reduced_extents

MOST_SHARING, MOST_UNROLLED = 4, 64
"""Windows side by side that a thread takes, and elements of them that it unrolls: of more it loops
over rows."""


def window_width(graph: Graph, value: str) -> int:
    """Return how many neighbouring elements a thread takes of a result of reductions, which it unrolls.

    Channels where those are last, as vectors; else positions, whose windows share what they read. Fewer where
    they would leave multiprocessors with less than a quarter of their threads.
    """
    shape, elements = graph.tile(value).shape, product(reduced_extents(graph))
    unrolled = isinstance(elements, int) and 1 < elements <= WINDOW
    if not unrolled or not isinstance(shape[-1], int):
        return 1
    width = ACCESS_BYTES // BYTES.get(stored_type(graph.tile(value).ttype.name), ACCESS_BYTES)
    count = product(shape)
    if _slides_along_last(graph):
        known = count if isinstance(count, int) else 0
        most = min(MOST_SHARING, MOST_UNROLLED // int(elements), known // BUSY_ROWS)
        return next((width for width in range(most, 1, -1) if shape[-1] % width == 0), 1)
    while width > 1 and (shape[-1] % width or (isinstance(count, int) and count // width < BUSY_ROWS)):
        width //= 2
    return width


def windows_beside(graph: Graph, value: str, width: int) -> int:
    """Return how many windows along the axis before the channels a thread takes: they share what they read.

    width: Channels of a thread's vectors.
    """
    shape = graph.tile(value).shape
    if width == 1 or len(shape) < 3 or not _slides(graph, -2) or _slides(graph, -1):
        return 1
    count = product(shape)
    if not isinstance(count, int) or not isinstance(shape[-2], int):
        return 1
    most = min(MOST_SHARING, count // width // BUSY_ROWS)
    return next((beside for beside in range(most, 1, -1) if shape[-2] % beside == 0), 1)


def _slides_along_last(graph: Graph) -> bool:
    """Tell whether windows move along the last axis of what they read, and are reduced along it."""
    return _slides(graph, -1)


def _slides(graph: Graph, axis: int) -> bool:
    indexings = [parse_indexing(node_attributes(n)["spec"]) for n in graph.nodes if n.operator == "map"]
    images = [indexing.operands[0] for indexing in indexings]
    return any(len(image) >= -axis and len(image[axis].terms) > 1 for image in images)


def reduce_vectors(nest: Nest, vectors: Vectors, value: str, places: Sequence[Index], lanes: int) -> None:
    """Emit the reductions that vectors of neighbouring elements of a value need, each of so many lanes."""
    needed = [nest.values.needed(value, place) for place in places]
    for together in zip(*needed, strict=True):
        node = together[0][0]
        _reduce(nest, vectors, node, [index for _, index in together], lanes)


def _reduce(nest: Nest, vectors: Vectors, node: Node, indices: Sequence[Index], lanes: int) -> None:
    parts = [Reduction(nest, node, index) for index in indices]
    totals = [b.Variable(it.dtype, it.neutral) for it in parts]

    def combine(position: Expr) -> None:
        places = [it.at(position) for it in parts]
        reduce_vectors(nest, vectors, parts[0].operand, places, lanes)
        for at, (it, total, place) in enumerate(zip(parts, totals, places, strict=True)):
            vectors.lane = at % lanes
            with nest.values.keeping(nest.register):
                found = nest.values.at(it.operand, place)
            total.set(it.combine(total.value, found))
        vectors.lane = 0
        nest.values.forget()  # but for what is loaded: the next window begins within this one

    extent = int(parts[0].extent)
    further = nest.values.needed(parts[0].operand, parts[0].at(0))
    beside, elements = len(indices) // lanes, product(reduced_extents(nest.graph))
    if beside > 1 < extent and further and beside * int(elements) > MOST_UNROLLED:
        words = vectors.words
        with nest.loop(extent) as position:
            vectors.words = {}
            combine(position)
        vectors.words = words
    else:
        for position in range(extent):
            combine(position)
    for index, total in zip(indices, totals, strict=True):
        nest.keep_cell(node, index, b.bind(total.value))


def reduce_unrolled(nest: Nest, node: Node, index: Index) -> None:
    """Emit a reduction of a few elements, which stay in a thread's registers."""
    it = Reduction(nest, node, index)
    total = it.neutral
    for position in range(int(it.extent)):
        place = it.at(position)
        nest.prepare(it.operand, place, ())
        with nest.values.keeping(nest.register):
            value = nest.register(nest.values.at(it.operand, place))
        nest.values.memory[nest.values.key(it.operand, tuple(map(nest.values.simplified, place)))] = value
        total = nest.register(it.combine(total, value))
    nest.keep_cell(node, index, total)
