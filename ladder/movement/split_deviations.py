"""Sums of products of deviations from means (variances, covariances) of few long rows or columns, in parts.

The mean of a whole has to be known before the first deviation is squared, so that it is read twice. A part
has its own mean instead: its sum of products misses its length times the product of what its means lie from
those of the whole (Chan, Golub and LeVeque, Updating formulae for computing sample variances, 1979). So one
kernel, which holds the part, finds sums and products.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.movement.split_softmax import TYPES, in_equal_parts, renamed
from ladder.partition.rows import REDUCTIONS

VIEWS = ("reshape", "broadcast")


class Side(NamedTuple):
    """Deviations of a value from its mean along an axis.

    read: The value.
    mean: Its means, one for each row or column.
    total: The ``reduce_sum`` that they are made of.
    """

    read: str
    mean: str
    total: Node


class Deviations(NamedTuple):
    """A sum of squares of deviations, or of products of two: the ``reduce_sum``, and what is multiplied."""

    node: Node
    sides: tuple[Side, Side]


def sums_of_deviations(graph: Graph) -> list[Deviations]:
    """Return the sums of products of deviations whose means nothing else that is reduced is made of."""
    found = [one for node in graph.nodes if (one := _deviations(graph, node)) is not None]
    own = {one.node.name for one in found}
    others = {one.node.name for one in found if any(_reduced_of(graph, s.mean) - own for s in one.sides)}
    return [one for one in found if one.node.name not in others]


def _deviations(graph: Graph, node: Node) -> Deviations | None:
    if node.operator != "reduce_sum" or node.tile.ttype.name not in TYPES:
        return None
    multiplied = graph.producer(node.inputs[0])
    if multiplied.operator not in ("square", "mul"):
        return None
    first, *other = (_side(graph, value, node) for value in multiplied.inputs)
    second = other[0] if other else first
    return None if first is None or second is None else Deviations(node, (first, second))


def _side(graph: Graph, value: str, node: Node) -> Side | None:
    """Return the deviations that a value is, from means along the axis of a reduction of it."""
    below, shape = graph.producer(value), graph.tile(node.inputs[0]).shape
    if below.operator != "sub" or not all(isinstance(extent, int) for extent in shape):
        return None
    read, mean = below.inputs
    quotient = _shown(graph, mean)
    if graph.tile(read).shape != shape or quotient.operator != "div":
        return None
    axis, count = node_attributes(node)["axis"] % len(shape), graph.producer(quotient.inputs[1])
    total = _shown(graph, quotient.inputs[0])
    number = node_attributes(count)["value"] if count.operator == "constant" else 0
    alike = total.operator == "reduce_sum" and total.inputs == (read,) and number == shape[axis]
    spread = (*graph.tile(mean).shape,)
    kept = (*[1] * (len(shape) - len(spread)), *spread) == (*shape[:axis], 1, *shape[axis + 1 :])
    return (
        Side(read, mean, total)
        if alike and kept and node_attributes(total)["axis"] % len(shape) == axis
        else None
    )


def _shown(graph: Graph, value: str) -> Node:
    """Return what gives a value, but for axes of one element."""
    node = graph.producer(value)
    while node.operator in VIEWS and product(node.tile.shape) == product(graph.tile(node.inputs[0]).shape):
        node = graph.producer(node.inputs[0])
    return node


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
    """Of the parts of a value: itself, their length, sums and means, along the axis behind that of parts."""

    rows: str
    length: str
    sums: str
    means: str


def deviations_in_parts(graph: Graph, counts: Mapping[str, int]) -> Graph:
    """Return a graph whose sums of deviations, and the means in them, are of parts first.

    counts: ``reduce_sum`` -> equal parts of its axis.
    """
    chosen = {one.node.name: one for one in sums_of_deviations(graph) if counts.get(one.node.name, 1) > 1}
    totals = {side.total.name: counts[name] for name, one in chosen.items() for side in one.sides}
    wanted = {side.mean for one in chosen.values() for side in one.sides}
    parts, names = dict[str, Parts](), dict[str, str]()

    def divided(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        if node.name in totals:
            axis = node_attributes(node)["axis"] % len(builder.tile(inputs[0]).shape)
            parts[node.name] = parts_of(builder, inputs[0], axis, totals[node.name])
            return _over_parts(builder, node, parts[node.name].sums)
        if node.name in chosen:
            one = chosen[node.name]
            sides = [(parts[side.total.name], names[side.mean]) for side in one.sides]
            return _joined(builder, node, *sides)
        return None

    return renamed(graph, divided, wanted, names) if chosen else graph


def parts_of(builder: GraphBuilder, value: str, axis: int, count: int) -> Parts:
    """Add the parts of a value along an axis, which they divide, and their sums and means."""
    rows = in_equal_parts(builder, value, axis, count, 0.0)
    tile = builder.tile(rows)
    length = builder.add("constant", value=float(tile.known_shape[axis + 1]), type=tile.ttype.name)
    sums = builder.add("reduce_sum", rows, axis=axis + 1, keep=True)
    return Parts(rows, length, sums, builder.add("div", sums, length))


def products_of_parts(builder: GraphBuilder, axis: int, first: Parts, second: Parts) -> str:
    """Add the sums of products of deviations of parts from their own means."""
    sides = [builder.add("sub", side.rows, side.means) for side in dict.fromkeys((first, second))]
    made = builder.add("square", *sides) if len(sides) == 1 else builder.add("mul", *sides)
    return builder.add("reduce_sum", made, axis=axis + 1, keep=True)


def _joined(builder: GraphBuilder, node: Node, first: tuple[Parts, str], second: tuple[Parts, str]) -> str:
    """Add the sum over the whole: of what parts have, and of what their means lie from those of the whole."""
    axis = node_attributes(node)["axis"] % (len(builder.tile(first[0].rows).shape) - 1)
    found = products_of_parts(builder, axis, first[0], second[0])
    apart = []
    for parts, mean in dict.fromkeys((first, second)):
        shape = builder.tile(parts.means).known_shape
        whole = builder.add("reshape", mean, shape=(*shape[:axis], 1, *shape[axis + 1 :]))
        apart.append(builder.add("sub", parts.means, whole))
    missing = builder.add("square", *apart) if len(apart) == 1 else builder.add("mul", *apart)
    return _over_parts(builder, node, builder.add("add", found, builder.add("mul", missing, first[0].length)))


def _over_parts(builder: GraphBuilder, node: Node, value: str) -> str:
    """Sum what parts have as a node sums the whole."""
    shape, given = builder.tile(value).known_shape, node_attributes(node)
    axis = given["axis"] % (len(shape) - 1)
    found = builder.add("reshape", value, shape=(*shape[: axis + 1], *shape[axis + 2 :]))
    return builder.add("reduce_sum", found, axis=axis, keep=given["keep"])
