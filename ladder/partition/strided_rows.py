"""Chains whose rows are counted by axes of their results that are not the leading ones, as tiles of a matrix.

Such a chain is computed as one whose results have these axes in front and all others, in one, behind; each
element is then stored where it belongs. What reduces several axes of a tile reduces that one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ladder.ir.build import GraphBuilder, node_attributes, prune
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.partition.directions import reads_columns
from ladder.partition.rows import (
    REDUCTIONS,
    SCANS,
    Index,
    column_axes,
    operand_index,
    reduced_place,
    row_axes,
)
from tile_types.tile import Tile

LEAST_RUN, LITTLE_READ = 256, 1 << 20
"""Bits side by side that rows have at least, else blocks share sectors of memory; elements of a result for
which a launch costs more."""

LEAST_COLUMNS, MOST_COLUMNS = 64, 1 << 15
"""Elements of such a row: threads would reduce fewer alone, and lanes hold no more."""


@dataclass(frozen=True)
class Order:
    """How the elements of a result are counted.

    tile: The tensor.
    axes: Its axes in the order in which they are counted: those of rows, then those of columns.
    rows: How many of them count rows.
    """

    tile: Tile
    axes: tuple[int, ...]
    rows: int

    @property
    def run(self) -> int:
        """Columns that lie one after the other."""
        shape = [int(self.tile.shape[axis]) for axis in self.axes[self.rows :]]
        return next((extent for extent in reversed(shape) if extent != 1), 1)


@dataclass(frozen=True)
class StridedRows:
    """A chain with its rows in front.

    graph: Its results have leading axes of rows, and one of columns where a row has several elements.
    orders: Result -> how its elements are counted.
    """

    graph: Graph
    orders: Mapping[str, Order]


@lru_cache(maxsize=1024)
def strided_rows(graph: Graph) -> StridedRows | None:
    """Return a chain with its rows in front; None if no axes count rows, or leading ones do."""
    operators = {node.operator for node in graph.nodes}
    if not operators.intersection(REDUCTIONS) or operators.intersection((*SCANS, "map", "put", "gather")):
        return None
    if row_axes(graph, graph.outputs) is not None or column_axes(graph, graph.outputs) is not None:
        return None
    found = [_rows_of(graph, value) for value in graph.outputs]
    orders = [Order(graph.tile(v), *axes) for v, axes in zip(graph.outputs, found, strict=True) if axes]
    if len(orders) < len(found) or not _fit(orders) or _is_scattered(graph, orders):
        return None
    turned = _turned(graph, orders)
    rows = orders[0].rows
    if row_axes(turned, turned.outputs, again=False) != rows or not _is_of_rows(turned, rows):
        return None
    if reads_columns(turned, turned.outputs, rows):
        return None
    return StridedRows(turned, dict(zip(turned.outputs, orders, strict=True)))


def with_rows(graph: Graph, outputs: Sequence[str], on_gpu: bool) -> tuple[Graph, Sequence[str]]:
    """Return a chain and its results with rows in front, where a device counts others than leading ones."""
    found = strided_rows(graph) if on_gpu and tuple(outputs) == graph.outputs else None
    return (graph, outputs) if found is None else (found.graph, found.graph.outputs)


def _fit(orders: list[Order]) -> bool:
    """Tell whether results are numbers or columns of the same rows, some of which lie apart."""
    first = orders[0]
    rows = [tuple(order.tile.shape[axis] for axis in order.axes[: order.rows]) for order in orders]
    columns = [tuple(order.tile.shape[axis] for axis in order.axes[order.rows :]) for order in orders]
    if any(other != rows[0] for other in rows) or not first.rows:
        return False
    long = [shape for shape in columns if product(shape) != 1]
    known = all(isinstance(extent, int) for shape in columns for extent in shape)
    if not long or not known or any(product(shape) != product(long[0]) for shape in long):
        return False
    apart = any(order.axes != tuple(range(len(order.axes))) for order in orders)
    ends = all(
        order.axes[-1] == max(axis for axis, extent in enumerate(order.tile.shape) if extent != 1)
        for order, shape in zip(orders, columns, strict=True)
        if product(shape) != 1
    )
    return apart and ends and LEAST_COLUMNS <= int(product(long[0])) <= MOST_COLUMNS


def _is_scattered(graph: Graph, orders: Sequence[Order]) -> bool:
    """Tell whether much is read in pieces that are shorter than a sector of memory."""
    wide = max((node.tile.ttype.elem_bits for node in graph.inputs), default=0)
    much = max(order.run * wide for order in orders) < LEAST_RUN
    return much and any(int(product(order.tile.shape)) > LITTLE_READ for order in orders)


def _rows_of(graph: Graph, value: str) -> tuple[tuple[int, ...], int] | None:
    """Return the axes of a result, those on which all its reductions depend first, and how many these are."""
    shape = graph.tile(value).shape
    place = tuple(frozenset() if extent == 1 else frozenset({f"o{at}"}) for at, extent in enumerate(shape))
    used = {frozenset[str]().union(*index) for _, index in _first_reductions(graph, value, place)}
    if len(used) != 1:
        return None
    (loops,) = used
    rows = [axis for axis, part in enumerate(place) if part and part <= loops]
    others = [axis for axis in range(len(shape)) if axis not in rows]
    units = [axis for axis in others if shape[axis] == 1]
    columns = [axis for axis in others if shape[axis] != 1]
    return (*rows, *units, *columns), len(rows)


def _first_reductions(graph: Graph, value: str, place: Index) -> set[tuple[str, Index]]:
    """Return the first reductions below a value, and what their places depend on."""
    found, seen = set[tuple[str, Index]](), {(value, place)}
    ahead = [(value, place)]
    while ahead:
        value, place = ahead.pop()
        node = graph.producer(value)
        if node.operator in REDUCTIONS:
            found.add((value, place))
            continue
        reads = {(operand, operand_index(graph, node, at, place)) for at, operand in enumerate(node.inputs)}
        ahead += reads - seen
        seen |= reads
    return found


def _turned(graph: Graph, orders: list[Order]) -> Graph:
    """Return a graph with results in other orders, whose reductions run along one axis each."""
    builder, names = GraphBuilder(graph.name, graph.level), dict[str, str]()
    for node in graph.nodes:
        inputs = tuple(names[value] for value in node.inputs)
        found = _along_one(builder, graph, node, names) if node.operator in REDUCTIONS else None
        values = builder.copy(node, inputs) if found is None else (found,)
        names.update(zip(node.values, values, strict=True))
    results = []
    for value, order in zip(graph.outputs, orders, strict=True):
        shape = [order.tile.shape[axis] for axis in order.axes]
        columns = product(shape[order.rows :])
        turned = builder.add("transpose", names[value], permutation=order.axes)
        whole = (*shape[: order.rows], *(() if columns == 1 else (columns,)))
        results.append(builder.add("reshape", turned, shape=whole))
    return prune(builder.finish(*results))


def _is_of_rows(graph: Graph, rows: int) -> bool:
    """Tell whether each reduction is of a row, along the last axis."""
    count = product(graph.tile(graph.outputs[0]).shape[:rows])
    for node in graph.nodes:
        if node.operator in REDUCTIONS:
            *outer, _ = shape = graph.tile(node.inputs[0]).shape
            if node_attributes(node)["axis"] % len(shape) != len(outer) or product(outer) != count:
                return False
    return True


def _along_one(builder: GraphBuilder, graph: Graph, node: Node, names: Mapping[str, str]) -> str | None:
    """Add a reduction and those that it reads as they are as one along one axis; None: it is one."""
    place = tuple(frozenset({f"o{axis}"}) for axis in range(len(node.tile.shape)))
    place = tuple(p if e != 1 else frozenset() for p, e in zip(place, node.tile.shape, strict=True))
    below, count = node, 0
    while True:
        place = reduced_place(graph, below, place, f"k{count}")
        value, count = below.inputs[0], count + 1
        source, at = graph.producer(value), place
        while source.operator == "reshape" and _moves_units(graph, source):
            at = operand_index(graph, source, 0, at)
            source = graph.producer(source.inputs[0])
        if source.operator != node.operator:
            break
        below, place = source, at
    shape = graph.tile(value).shape
    if any(len(part) > 1 for part in place):
        return None
    outer = sorted((next(iter(part)), axis) for axis, part in enumerate(place) if part and "o" in min(part))
    inner = [axis for axis, part in enumerate(place) if part and "k" in min(part)]
    units = [axis for axis, part in enumerate(place) if not part]
    rows = [axis for _, axis in sorted(outer, key=lambda one: int(one[0][1:]))]
    if not inner or (count == 1 and inner == [len(shape) - 1]):
        return None
    turned = builder.add("transpose", names[value], permutation=(*units, *rows, *inner))
    extents = (*(shape[axis] for axis in rows), product(shape[axis] for axis in inner))
    joined = builder.add("reshape", turned, shape=extents)
    total = builder.add(node.operator, joined, axis=len(rows), keep=False)
    return builder.add("reshape", total, shape=node.tile.shape)


def _moves_units(graph: Graph, node: Node) -> bool:
    """Tell whether a reshape adds or drops axes of one element only."""
    before, after = graph.tile(node.inputs[0]).shape, node.tile.shape
    return [extent for extent in before if extent != 1] == [extent for extent in after if extent != 1]
