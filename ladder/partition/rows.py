"""Test whether a chain is a loop over rows, the form of loop nest that chains are lowered to.

A row is what one task computes alone: all its reductions, then all its results. The first ``rows`` axes of
every result count rows, the others are its columns. A chain has that form if each reduction depends on row
axes only, or on those and on the reductions around it, and none is computed more than once, or else over so
few elements (`MOST_REPEATED`, `MOST_REPEATED_INSIDE`) that a launch costs more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.ir.build import node_attributes
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import parse_indexing
from tile_types.tile import Extent

Loops = frozenset[str]
Index = tuple[Loops, ...]
"""For each axis of a value: the loops that its position depends on."""

REDUCTIONS = ("reduce_sum", "reduce_max")

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
    lead = len(index) - len(shape)
    return tuple(frozenset() if extent == 1 else index[lead + axis] for axis, extent in enumerate(shape))


def row_axes(graph: Graph, outputs: Sequence[str], again: bool = True) -> int | None:
    """Return how many leading axes of every result count rows; None if the chain has no such form.

    again: Whether short reductions may be computed more than once.
    """
    shapes = [graph.tile(value).shape for value in outputs]
    rank = min(map(len, shapes))
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
    if rows is not None or any(node.operator in REDUCTIONS for node in graph.nodes):
        return rows
    shapes = [graph.tile(value).shape for value in outputs]
    most = max(min(map(len, shapes)) - 1, 0)
    return next(rows for rows in range(most, -1, -1) if len({shape[:rows] for shape in shapes}) == 1)


def _fits(graph: Graph, value: str, rows: int, again: bool) -> bool:
    shape = graph.tile(value).shape
    names = [frozenset() if extent == 1 else frozenset({f"o{axis}"}) for axis, extent in enumerate(shape)]
    loops: Loops = frozenset().union(*names[:rows]) if rows else frozenset()
    around = Around(loops, product(shape[:rows]))
    return _Legality(graph, again).ok(value, tuple(names), around)
