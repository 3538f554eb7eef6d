"""Test whether a chain is a loop over rows, the form of loop nest that chains are lowered to.

A row is what one task computes alone: all its reductions, then all its results. The first ``rows`` axes of
every result count rows, the others are its columns. A chain has that form if each reduction depends on row
axes only, or on those and on the reductions around it, and none is computed more than once, or else over so
few elements (`MOST_REPEATED`, `MOST_REPEATED_INSIDE`) that a launch costs more.

A chain of columns (`column_axes`) has another form, which kernels for GPUs have: the last axis of its results
counts rows too, what lies between the leading ones and it is reduced or has an element for each position.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Any

from ladder.ir.build import is_by_element, node_attributes
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from ladder.ir.ops import get_operator
from tile_types.tile import Extent

Loops = frozenset[str]
Index = tuple[Loops, ...]
"""For each axis of a value: the loops that its position depends on."""

DATA: Loops = frozenset({"data"})
"""Of a position that is a number in memory: nothing is reduced for it."""

REDUCTIONS = ("reduce_sum", "reduce_max")

SCANS = ("scan_sum", "scan_max", "scan_product", "scan_logsumexp")
"""Accumulations along an axis: kernels for GPUs keep rows, or parts of columns, in registers."""

ONE_WORD = ("float32", "float16", "bfloat16", "int32")
"""Types of which chains of columns reduce."""

SCANNED = 1 << 13
"""Vectors of up to 16 bytes of a row that lanes of a block scan at once, or half the single elements."""

UNHELD = ("concat", "pad", "map", "repeat", "put", "gather")
"""Operators that cut rows into pieces: lanes that hold what is scanned do not have what these read of it."""

MOST_REPEATED, MOST_REPEATED_INSIDE = 1 << 14, 16
"""Most elements that a repeated reduction reads in all, and, inside of another one, in each repetition."""


@dataclass(frozen=True)
class Around:
    """The loops around a place of the loop nest: row axes and the reductions in progress."""

    rows: Loops
    count: Extent
    inner: Loops = frozenset()
    steps: Extent = 1


def reshape_groups(old: Shape, new: Shape) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return which axes of two shapes of equal size correspond: runs of axes with equal products."""
    groups, i, j = [], 0, 0
    while i < len(old) or j < len(new):
        left: list[int] = []
        right: list[int] = []
        while not left or product(old[a] for a in left) != product(new[a] for a in right):
            a, b = product(old[x] for x in left), product(new[x] for x in right)
            take_left = i < len(old) and (not left or j >= len(new) or _less(a, b))
            if take_left:
                left.append(i)
                i += 1
            elif j < len(new):
                right.append(j)
                j += 1
            else:
                break
        groups.append((tuple(left), tuple(right)))
    return groups


def _less(a: Extent, b: Extent) -> bool:
    """Order products of extents: one that divides into the other's text comes first."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return len(str(a)) < len(str(b)) or (isinstance(a, int) and not isinstance(b, int))


class _Legality:
    """Follows index dependences from the results to every reduction; ``again``: as `row_axes` takes it."""

    def __init__(self, graph: Graph, again: bool) -> None:
        self.graph, self.again = graph, again
        self.seen: set[tuple[str, Index, Around, bool]] = set()

    def ok(self, value: str, index: Index, around: Around, guarded: bool = False) -> bool:
        """Tell whether reductions below a value are legal; ``guarded``: for some rows there are none."""
        key = (value, index, around, guarded)
        if key in self.seen:
            return True
        self.seen.add(key)
        node = self.graph.producer(value)
        if node.operator in REDUCTIONS:
            return not guarded and self.reduction(node, index, around)
        guarded = guarded or any(index[axis] & around.rows for axis in _guarded_axes(node))
        return all(
            self.ok(operand, operand_index(self.graph, node, at, index), around, guarded)
            for at, operand in enumerate(node.inputs)
        )

    def reduction(self, node: Node, index: Index, around: Around) -> bool:
        used: Loops = frozenset().union(*index) if index else frozenset()
        if not used <= around.rows | around.inner:
            return False
        outer = Around(around.rows, around.count) if used <= around.rows else around
        operand = self.graph.tile(node.inputs[0])
        attributes = node_attributes(node)
        axis = attributes["axis"] % len(operand.shape)
        times = product([outer.count, outer.steps])
        if times != product(node.tile.shape) and not self.is_little(times, operand.shape[axis], outer):
            return False
        loop = f"k{len(outer.inner)}"  # as in other reductions: what lies below several is looked at once
        inner = list(index)
        if attributes["keep"]:
            inner[axis] = frozenset({loop})
        else:
            inner.insert(axis, frozenset({loop}))
        deeper = Around(
            outer.rows, outer.count, outer.inner | {loop}, product([outer.steps, operand.shape[axis]])
        )
        return self.ok(node.inputs[0], tuple(inner), deeper)

    def is_little(self, times: Extent, extent: Extent, outer: Around) -> bool:
        """Tell whether a reduction of ``extent`` elements may be computed more often than it has results."""
        if not self.again or not isinstance(times, int) or not isinstance(extent, int):
            return False
        return times * extent <= MOST_REPEATED and (not outer.inner or extent <= MOST_REPEATED_INSIDE)


def _guarded_axes(node: Node) -> list[int]:
    """Return the axes along which a node reads an operand for some positions only."""
    attributes, rank = node_attributes(node), len(node.tile.shape)
    if node.operator == "concat":
        return [attributes["axis"] % rank]
    if node.operator == "pad":
        borders = zip(attributes["low"], attributes["high"], strict=True)
        return [axis for axis, border in enumerate(borders) if border != (0, 0)]
    return list(range(rank)) if node.operator == "map" and attributes["pad"] else []


def operand_index(graph: Graph, node: Node, at: int, index: Index) -> Index:
    """Return what the position in operand ``at`` depends on, given that in the result."""
    shape = graph.tile(node.inputs[at]).shape
    if node.operator == "reshape":
        found: list[Loops] = [frozenset()] * len(shape)
        for old, new in reshape_groups(shape, node.tile.shape):
            joined = frozenset().union(*(index[a] for a in new)) if new else frozenset()
            for axis in old:
                found[axis] = joined if shape[axis] != 1 else frozenset()
        return tuple(found)
    if node.operator == "transpose":
        permutation = node_attributes(node)["permutation"]
        return tuple(index[permutation.index(axis)] for axis in range(len(shape)))
    if node.operator == "map":
        indexing = parse_indexing(node_attributes(node)["spec"])
        by_name = dict(zip(indexing.result, index, strict=True))
        return tuple(
            frozenset().union(*(by_name[name] for name in axis.names)) if axis.names else frozenset()
            for axis in indexing.operands[0]
        )
    if node.operator == "gather":
        place = gathered_from(node, len(graph.tile(node.inputs[0]).shape), index, DATA)[at]
        return tuple(frozenset() if extent == 1 else part for extent, part in zip(shape, place, strict=True))
    lead = len(index) - len(shape)
    return tuple(frozenset() if extent == 1 else index[lead + axis] for axis, extent in enumerate(shape))


def reduced_place(graph: Graph, node: Node, place: Index, loop: str) -> Index:
    """Return what the place depends on of an element that a reduction reads."""
    attributes, shape = node_attributes(node), graph.tile(node.inputs[0]).shape
    axis = attributes["axis"] % len(shape)
    own = frozenset[str]() if shape[axis] == 1 else frozenset({loop})
    return (*place[:axis], own, *place[axis + 1 if attributes["keep"] else axis :])


def places_read(
    graph: Graph, outputs: Sequence[str], rows: int, ends: tuple[Loops, Loops], loop: Callable[[Node], str]
) -> Iterator[tuple[str, Index]]:
    """Yield all (value, what the place of an element of it depends on) that results of rows are made of.

    ends: What the places of results depend on, along the axes of rows and along the others.
    loop: Names the loop of a reduction.
    """
    seen: set[tuple[str, Index]] = set()
    ahead: list[tuple[str, Index]] = []
    for value in outputs:
        columns = len(graph.tile(value).shape) - rows
        ahead.append((value, (*[ends[0]] * rows, *[ends[1]] * columns)))
    while ahead:
        value, place = ahead.pop()
        if (value, place) in seen:
            continue
        seen.add((value, place))
        yield value, place
        node = graph.producer(value)
        if node.operator in REDUCTIONS:
            ahead.append((node.inputs[0], reduced_place(graph, node, place, loop(node))))
            continue
        ahead += [(operand, operand_index(graph, node, at, place)) for at, operand in enumerate(node.inputs)]


def gathered_from(node: Node, rank: int, index: Sequence[Any], number: Any) -> tuple[tuple[Any, ...], ...]:
    """Return where a gather reads what it takes elements of, given their number there, and where the number.

    rank: Axes of what it takes elements of.
    """
    axis, along = (node_attributes(node)[name] for name in ("axis", "along"))
    behind = axis + 1 if along else axis + 1 + len(index) - rank
    own = tuple(index) if along else tuple(index[axis:behind])
    return (*index[:axis], number, *index[behind:]), own


def row_axes(graph: Graph, outputs: Sequence[str], again: bool = True) -> int | None:
    """Return how many leading axes of every result count rows; None if the chain has no such form.

    again: Whether short reductions may be computed more than once.
    """
    shapes = [graph.tile(value).shape for value in outputs]
    rank = min(map(len, shapes))
    if scans := [node.tile.shape for node in graph.nodes if node.operator in SCANS]:
        return len(scans[0]) - 1 if _scans_along(graph, shapes, scans[0], len(scans[0]) - 1) else None
    reduces = any(node.operator in REDUCTIONS for node in graph.nodes)
    choices = [max(rank - 1, 0)] if not reduces else [*range(rank - 1, -1, -1), rank]
    alike = [rows for rows in choices if len({shape[:rows] for shape in shapes}) == 1]
    return next(
        (
            rows
            for repeated in (False, True)[: 1 + again]
            for rows in alike
            if all(_fits(graph, value, rows, repeated) for value in outputs)
        ),
        None,
    )


def most_scanned(length: int, bits: int) -> int:
    """Return how many elements of so many bits the lanes of a block scan, of rows of this length."""
    return SCANNED * max(2, gcd(length, 128 // bits))


def _scans_along(graph: Graph, results: Sequence[Shape], shape: Shape, axis: int) -> bool:
    """Tell whether a chain is a loop over what it scans along an axis: what is computed of one stays there.

    shape: Of all scans. Lanes hold their rows, whose length is known; along other axes nothing is reduced.
    """
    last = axis == len(shape) - 1
    numbers = (shape[:-1], (*shape[:-1], 1)) if last else ()
    made: set[str] = set()
    for node in graph.nodes:
        reduces, scans = node.operator in REDUCTIONS, node.operator in SCANS
        read = [graph.tile(value).shape for value in node.inputs]
        along = node_attributes(node)["axis"] % len(shape) == axis if reduces or scans else True
        along = along and (last or not reduces)
        cut = node.operator in UNHELD and made.intersection(node.inputs)
        if ((reduces or scans) and read != [shape]) or not along or cut:
            return False
        if not made.intersection(node.inputs) and not scans:
            continue
        computes = is_by_element(node)
        if not (reduces or scans or computes) or node.tile.shape not in (shape, *numbers):
            return False
        made.add(node.name)
    if not last:
        known = all(isinstance(extent, int) and extent for extent in shape[axis:])
        return known and all(result == shape for result in results)
    length = shape[-1]
    bits = max(node.tile.ttype.elem_bits for node in graph.nodes if node.operator in SCANS)
    held = isinstance(length, int) and 0 < length <= most_scanned(length, bits)
    return held and all(result in (shape, *numbers) for result in results)


def scanned_axis(node: Node) -> int:
    """Return the axis of a scan, from the first on."""
    return int(node_attributes(node)["axis"] % len(node.tile.shape))


def column_axes(graph: Graph, outputs: Sequence[str]) -> tuple[int, int] | None:
    """Return how many leading and how many trailing axes of results count rows, if together they do.

    None if the chain has no such form, or if what it computes of a reduction it reads from other columns.
    """
    shapes = [graph.tile(value).shape for value in outputs]
    if scans := [node for node in graph.nodes if node.operator in SCANS]:
        shape = scans[0].tile.shape
        axis = scanned_axis(scans[0])
        across = axis < len(shape) - 1 and _scans_along(graph, shapes, shape, axis)
        return (axis, len(shape) - 1 - axis) if across else None
    if {"map", "put"} & {node.operator for node in graph.nodes}:
        return None
    for last in range(1, min(map(len, shapes)) + 1):
        columns = {shape[len(shape) - last :] for shape in shapes}
        if len(columns) != 1 or not all(isinstance(extent, int) for extent in next(iter(columns))):
            return None
        for rows in range(min(map(len, shapes)) - last, -1, -1):
            count = product([*shapes[0][:rows], *next(iter(columns))])
            alike = len({shape[:rows] for shape in shapes}) == 1 and _has_columns(graph, count, last)
            if alike and all(_fits(graph, value, rows, False, last) for value in outputs):
                return rows, last
    return None


def _has_columns(graph: Graph, count: Extent, last: int) -> bool:
    """Tell whether reductions stay in their columns, as do values that are computed of them.

    count: Columns of all rows; reductions of more results are only reduced further, as they are.
    last: Trailing axes of columns.
    """
    made: dict[str, str] = {}
    """Value that is computed of reductions -> the operator of the one that it has elements of; or nothing."""
    for node in graph.nodes:
        below = {made[value] for value in node.inputs if value in made}
        reduces, moves = node.operator in REDUCTIONS, node.operator == "reshape"
        read = [graph.tile(value).shape for value in node.inputs]
        if reduces and node_attributes(node)["axis"] % len(read[0]) >= len(read[0]) - last:
            return False
        if reduces and node.tile.ttype.name not in ONE_WORD:
            return False
        if not below and not reduces:
            continue
        if moves and node.tile.shape[-last:] != read[0][-last:]:
            return False
        computes = get_operator(node.operator).elementwise or node.operator in ("convert", "broadcast")
        computes = computes or _gathers_before(node, last)
        if not (reduces or moves or computes) or (not moves and below - {"", node.operator}):
            return False
        made[node.name] = min(below) if moves else ""
        if reduces and product(node.tile.shape) != count:
            made[node.name] = node.operator
    return any(node.operator in REDUCTIONS for node in graph.nodes)


def _gathers_before(node: Node, last: int) -> bool:
    """Tell whether a node gathers along one of the axes before the ``last`` ones: it stays in its columns."""
    given = node_attributes(node) if node.operator == "gather" else {"along": False}
    return bool(given["along"]) and given["axis"] < len(node.tile.shape) - last


def separate_loops(graph: Graph, outputs: Sequence[str]) -> list[tuple[str, ...]] | None:
    """Return the results of each loop over rows that a graph consists of; None if some are in no such loop.

    Results that share a reduction are of one loop: of different ones, nothing is reduced twice.
    """
    reduced: dict[str, frozenset[str]] = {}
    for node in graph.nodes:
        own = {node.name} if node.operator in REDUCTIONS else ()
        found = frozenset(own).union(*(reduced[value] for value in node.inputs))
        reduced |= dict.fromkeys(node.values, found)
    groups: list[tuple[frozenset[str], tuple[str, ...]]] = []
    for value in outputs:
        alike = [group for group in groups if group[0] & reduced[value]]
        groups = [group for group in groups if group not in alike]
        names = (name for group in alike for name in group[1])
        groups.append((reduced[value].union(*(group[0] for group in alike)), (*names, value)))
    if any(row_axes(graph, results) is None for _, results in groups):
        return None
    return [results for _, results in groups]


def loop_axes(graph: Graph, outputs: Sequence[str]) -> int | None:
    """Return what `row_axes` does or, where nothing is reduced, how many leading axes all results share.

    Results without reductions are loops of their own, one after the other: they need share nothing.
    """
    rows = row_axes(graph, outputs)
    if rows is not None or any(node.operator in (*REDUCTIONS, *SCANS) for node in graph.nodes):
        return rows
    shapes = [graph.tile(value).shape for value in outputs]
    most = max(min(map(len, shapes)) - 1, 0)
    return next(rows for rows in range(most, -1, -1) if len({shape[:rows] for shape in shapes}) == 1)


def loop_extents(graph: Graph, outputs: Sequence[str]) -> Shape:
    """Return the extents of what a chain is a loop over: rows, or rows and columns; else a result's."""
    shape, rows = graph.tile(outputs[0]).shape, loop_axes(graph, outputs)
    if rows is None and (axes := column_axes(graph, outputs)) is not None:
        return (*shape[: axes[0]], *shape[-axes[1] :])
    return shape[:rows]


def _fits(graph: Graph, value: str, rows: int, again: bool, last: int = 0) -> bool:
    """Tell whether a result is a loop over its first ``rows`` and its ``last`` axes."""
    shape = graph.tile(value).shape
    names = [frozenset() if extent == 1 else frozenset({f"o{axis}"}) for axis, extent in enumerate(shape)]
    loops: Loops = frozenset().union(*names[:rows], *names[len(names) - last :])
    around = Around(loops, product([*shape[:rows], *shape[len(shape) - last :]]))
    return _Legality(graph, again).ok(value, tuple(names), around)
