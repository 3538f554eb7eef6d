"""Sums of products of deviations (variances, covariances, third and fourth moments), in parts.

What is subtracted, the mean of a whole, has to be known before the first deviation is squared, so that
all is read twice. A part has its own mean instead: ``x - c = (x - m) + (m - c)``, and what is summed of
products of such sums are powers of ``m - c``, a number of each part, and sums of the deviations from ``m``
(Chan, Golub and LeVeque, Updating formulae for computing sample variances, 1979). So one kernel, which
holds the part, finds sums and products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations
from math import prod
from typing import NamedTuple

from ladder.ir.build import GraphBuilder, node_attributes, reduced_axis
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.movement.split_elements import reshaped
from ladder.movement.split_softmax import TYPES, over_parts, renamed
from ladder.partition.rows import REDUCTIONS

VIEWS = ("reshape", "broadcast")

MOST_FACTORS = 4
"""Deviations that are multiplied at most."""

FEW_BITS = 512
"""Bits of columns up to which parts are every n-th position: so few fill no accesses, or no sectors."""


class Side(NamedTuple):
    """Deviations of a value from a number of each row or column.

    read: The value.
    less: What is subtracted.
    total: The ``reduce_sum`` of the value along the same axis, of which that is made.
    """

    read: str
    less: str
    total: Node


class Deviations(NamedTuple):
    """A sum of products of deviations: the ``reduce_sum``, and what is multiplied."""

    node: Node
    sides: tuple[Side, ...]

    def sums_further(self, graph: Graph) -> bool:
        """Tell whether sums of rows or columns are summed on for what is subtracted, as of batches."""
        return any(
            product(graph.tile(side.less).shape) != product(side.total.tile.shape) for side in self.sides
        )


def sums_of_deviations(graph: Graph) -> list[Deviations]:
    """Return the sums of products of deviations whose means nothing else that is reduced is made of."""
    found = [one for node in graph.nodes if (one := _deviations(graph, node)) is not None]
    own = {one.node.name for one in found}
    others = {one.node.name for one in found if any(_reduced_of(graph, s.less) - own for s in one.sides)}
    return [one for one in found if one.node.name not in others]


def _deviations(graph: Graph, node: Node) -> Deviations | None:
    if node.operator != "reduce_sum" or node.tile.ttype.name not in TYPES:
        return None
    sides = [_side(graph, value, node) for value in _factors(graph, node.inputs[0])]
    known = [side for side in sides if side is not None]
    if not 2 <= len(known) == len(sides) <= MOST_FACTORS or len({*known}) > (2 if len(known) == 2 else 1):
        return None
    return Deviations(node, tuple(known))


def _factors(graph: Graph, value: str) -> list[str]:
    """Return what is multiplied to give a value; more than count are left as they are."""
    node = graph.producer(value)
    if node.operator not in ("square", "mul"):
        return [value]
    operands = node.inputs * 2 if node.operator == "square" else node.inputs
    found = [_factors(graph, operand) if operand != value else [operand] for operand in operands]
    return [factor for factors in found for factor in factors]


def _side(graph: Graph, value: str, node: Node) -> Side | None:
    """Return the deviations that a value is, from what is made of sums along the axis of a reduction."""
    below, shape = graph.producer(value), graph.tile(node.inputs[0]).shape
    if below.operator != "sub" or not all(isinstance(extent, int) for extent in shape):
        return None
    read, less = below.inputs
    if graph.tile(read).shape != shape:
        return None
    axis, spread = reduced_axis(graph, node), graph.tile(less).shape
    along = axis - len(shape) + len(spread)
    if along >= 0 and spread[along] != 1:
        return None
    total = _total_of(graph, less, read, axis)
    return None if total is None else Side(read, less, total)


def _total_of(graph: Graph, less: str, read: str, axis: int) -> Node | None:
    """Return the sum along an axis of ``read`` of which a number is made, as means are: by sums and scales.

    What is infinite or NaN in a part then is so in what is subtracted from all, as it is in the part's mean.
    """
    node = graph.producer(less)
    while True:
        if node.operator == "reduce_sum" and node.inputs[0] == read:
            return node if reduced_axis(graph, node) == axis else None
        scales = node.operator in ("div", "mul") and graph.producer(node.inputs[1]).operator == "constant"
        if not scales and node.operator not in (*VIEWS, "reduce_sum"):
            return None
        node = graph.producer(node.inputs[0])


def _reduced_of(graph: Graph, mean: str) -> set[str]:
    """Return the reductions that read what is computed by element of means and has more elements."""
    made, found, few = {mean}, set[str](), product(graph.tile(mean).shape)
    for node in graph.nodes:
        if not made.intersection(node.inputs):
            continue
        if node.operator in REDUCTIONS:
            found.update(node.values if product(graph.tile(node.inputs[0]).shape) != few else ())
        elif get_operator(node.operator).elementwise or node.operator in (*VIEWS, "convert"):
            made.update(node.values)
    return found


class Parts(NamedTuple):
    """Of the parts of a value: itself, its axis within them, their length, sums and means.

    shape: Of numbers of parts: an axis of parts, and one of one element behind it.
    """

    rows: str
    axis: int
    length: str
    sums: str
    means: str
    shape: Shape


def deviations_in_parts(graph: Graph, counts: Mapping[str, int]) -> Graph:
    """Return a graph whose sums of deviations, and those of which means are made, are of parts first.

    counts: ``reduce_sum`` -> equal parts of its axis; one: rows, or columns, are parts of what is subtracted.
    """
    chosen = {one.node.name: one for one in sums_of_deviations(graph) if one.node.name in counts}
    totals = {side.total.name: counts[name] for name, one in chosen.items() for side in one.sides}
    wanted = {side.less for one in chosen.values() for side in one.sides}
    parts, names = dict[str, Parts](), dict[str, str]()
    made = dict[tuple[Parts, ...], str]()

    def divided(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        if node.name in totals:
            axis = node_attributes(node)["axis"] % len(builder.tile(inputs[0]).shape)
            parts[node.name] = parts_of(builder, inputs[0], axis, totals[node.name])
            return over_parts(builder, node, parts[node.name].sums, axis)
        if node.name in chosen:
            sides = [(parts[side.total.name], names[side.less]) for side in chosen[node.name].sides]
            return _joined(builder, node, sides, made)
        return None

    return renamed(graph, divided, wanted, names) if chosen else graph


def parts_of(builder: GraphBuilder, value: str, axis: int, count: int) -> Parts:
    """Add the parts of a value along an axis, which they divide, and their sums and means.

    Columns are one axis. Few are in vectors with those of other parts, which then are every n-th position.
    """
    tile = builder.tile(value)
    shape = tile.known_shape
    columns, last = prod(shape[axis + 1 :]), axis == len(shape) - 1
    if count > 1 and 1 < columns * tile.ttype.elem_bits <= FEW_BITS and not last:
        along, whole = axis, (*shape[:axis], shape[axis] // count, count * columns)
    else:
        along, whole = axis + 1, (*shape[:axis], count, shape[axis] // count, *(() if last else (columns,)))
    rows = reshaped(builder, value, whole)
    length = builder.add("constant", value=float(shape[axis] // count), type=tile.ttype.name)
    sums = builder.add("reduce_sum", rows, axis=along, keep=True)
    numbers = (*shape[:axis], count, 1, *shape[axis + 1 :])
    return Parts(
        rows, along, length, reshaped(builder, sums, numbers), builder.add("div", sums, length), numbers
    )


def products_of_parts(builder: GraphBuilder, sides: Sequence[Parts]) -> str:
    """Add the sums of products of deviations of parts from their own means."""
    apart = [builder.add("sub", side.rows, side.means) for side in dict.fromkeys(sides)]
    made = apart[0] if len(apart) == 1 else builder.add("mul", *apart)
    multiplied = _power(builder, made, len(sides)) if len(apart) == 1 else made
    found = builder.add("reduce_sum", multiplied, axis=sides[0].axis, keep=True)
    return reshaped(builder, found, sides[0].shape)


def _power(builder: GraphBuilder, value: str, exponent: int) -> str:
    """Add a value multiplied by itself."""
    if exponent == 1:
        return value
    half = builder.add("square", _power(builder, value, exponent // 2))
    return builder.add("mul", half, value) if exponent % 2 else half


def _joined(
    builder: GraphBuilder, node: Node, sides: Sequence[tuple[Parts, str]], made: dict[tuple[Parts, ...], str]
) -> str:
    """Add the sum over the whole, of products of deviations in parts and of those of the parts' means.

    made: Sums of products of parts that there are.
    """
    apart = {parts: _beyond(builder, node, parts, less) for parts, less in dict.fromkeys(sides)}
    factors, terms = [parts for parts, _ in sides], list[str]()
    for few in (0, *range(2, len(factors) + 1)):  # deviations of a part have the sum 0
        for inside, times in Counter(combinations(factors, few)).items():
            outside = Counter(factors) - Counter(inside)
            if inside and inside not in made:
                made[inside] = products_of_parts(builder, inside)
            term = made[inside] if inside else factors[0].length
            for parts, exponent in outside.items():
                term = builder.add("mul", _power(builder, apart[parts], exponent), term)
            if times > 1:
                number = builder.add("constant", value=float(times), type=node.tile.ttype.name)
                term = builder.add("mul", term, number)
            terms.append(term)
    total = terms[-1]
    for term in terms[-2::-1]:
        total = builder.add("add", total, term)
    return over_parts(builder, node, total, _axis_of(node, factors[0]))


def _beyond(builder: GraphBuilder, node: Node, parts: Parts, less: str) -> str:
    """Add what means of parts lie from what is subtracted from the whole."""
    axis, given = _axis_of(node, parts), builder.tile(less).known_shape
    given = (*[1] * (len(parts.shape) - 1 - len(given)), *given)
    whole = builder.add("reshape", less, shape=(*given[: axis + 1], 1, *given[axis + 1 :]))
    return builder.add("sub", reshaped(builder, parts.means, parts.shape), whole)


def _axis_of(node: Node, parts: Parts) -> int:
    """Return the axis that a reduction of the whole runs along, which is that of parts."""
    return int(node_attributes(node)["axis"] % (len(parts.shape) - 1))
