"""Places of the largest elements (argmax) of long rows on GPUs, in parts.

A place is the least number of an element that equals the maximum, which has to be known before: rows are
read twice, with all that is computed of them. A part has its own maximum and the place of that instead, so
that one kernel finds both; the row's place is that of the first part whose maximum is the row's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

from ladder.ir.build import GraphBuilder, is_along_last, node_attributes, prune, transformed
from ladder.ir.extents import Shape
from ladder.ir.graph import Graph, Node
from ladder.movement.split_softmax import in_equal_parts, over_parts


class Place(NamedTuple):
    """The place of the first of the largest elements of rows, below 0: ``max(x is max(x) ? -place : least)``.

    node: The ``reduce_max`` of numbers.
    maximum: That of the rows, which keeps their axis.
    read: The rows, of float32.
    """

    node: Node
    maximum: Node
    read: str


def places_of_maxima(graph: Graph) -> list[Place]:
    """Return the places of maxima along the last axis of known extents."""
    found = (_place(graph, node) for node in graph.nodes if node.operator == "reduce_max")
    return [one for one in found if one is not None]


def _place(graph: Graph, node: Node) -> Place | None:
    chosen = _shown(graph, node.inputs[0])
    if chosen.operator != "select" or not is_along_last(graph, node):
        return None
    where, numbers = (_shown(graph, value) for value in chosen.inputs[:2])
    if where.operator != "either" or not _count_down(numbers, graph.tile(node.inputs[0]).shape):
        return None
    same, other = (graph.producer(value) for value in where.inputs)
    if same.operator != "equal" or not _are_no_numbers(graph, other, same.inputs[0]):
        return None
    maximum = _shown(graph, same.inputs[1])
    if maximum.operator != "reduce_max" or not is_along_last(graph, maximum):
        return None
    (read,) = maximum.inputs
    tile, kept = graph.tile(read), node_attributes(maximum)["keep"]
    alike = (
        _shown(graph, same.inputs[0]) is _shown(graph, read)
        and tile.shape == graph.tile(node.inputs[0]).shape
    )
    known = all(isinstance(extent, int) for extent in tile.shape)
    return Place(node, maximum, read) if alike and known and kept and tile.ttype.name == "float32" else None


def _shown(graph: Graph, value: str) -> Node:
    """Return what gives a value but for axes of one element."""
    node = graph.producer(value)
    while node.operator == "reshape":
        before, after = graph.tile(node.inputs[0]).shape, node.tile.shape
        if [extent for extent in before if extent != 1] != [extent for extent in after if extent != 1]:
            break
        node = graph.producer(node.inputs[0])
    return node


def _count_down(node: Node, shape: Shape) -> bool:
    """Tell whether a node has a number for each element of rows: 0, -1, -2 and so on."""
    given = node_attributes(node)
    return node.operator == "iota" and (given["begin"], given["step"], given["extent"]) == (0, -1, shape[-1])


def _are_no_numbers(graph: Graph, node: Node, value: str) -> bool:
    """Tell whether a node says which elements of a value are NaN."""
    if node.operator != "negation":
        return False
    same = graph.producer(node.inputs[0])
    return same.operator == "equal" and same.inputs == (value, value)


def places_in_parts(graph: Graph, counts: Mapping[str, int]) -> Graph:
    """Return a graph whose places of maxima are those of parts first.

    counts: Place's ``reduce_max`` -> parts of its rows.
    """
    places = {one.node.name: one for one in places_of_maxima(graph) if counts.get(one.node.name, 1) > 1}
    of_maxima = {one.maximum.name: one for one in places.values()}
    rows: dict[str, str] = {}
    """Maximum -> its rows in parts, then what parts have and what the rows have."""
    largest: dict[str, tuple[str, str]] = {}

    def divided(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        if node.name in of_maxima:
            one, last = of_maxima[node.name], len(builder.tile(inputs[0]).shape)
            rows[node.name] = in_equal_parts(builder, inputs[0], last - 1, counts[one.node.name], -inf)
            maxima = builder.add("reduce_max", rows[node.name], axis=last, keep=True)
            largest[node.name] = maxima, over_parts(builder, node, maxima, last - 1)
            return largest[node.name][1]
        if node.name in places:
            name = places[node.name].maximum.name
            return _of_parts(builder, node, rows[name], *largest[name])
        return None

    return replace(prune(transformed(graph, divided)), grid=graph.grid) if places else graph


def _of_parts(builder: GraphBuilder, node: Node, rows: str, maxima: str, most: str) -> str:
    """Add a row's place, of the places in its parts."""
    *_, count, length = shape = builder.tile(rows).known_shape
    rank, last = len(shape), len(shape) - 1
    least = builder.add("constant", value=-count * length, type="int32")
    within = builder.add("iota", extent=length, axis=last, rank=rank, begin=0, step=-1, type="int32")
    before = builder.add("iota", extent=count, axis=last - 1, rank=rank, begin=0, step=-length, type="int32")

    def first(values: str, largest: str, numbers: str) -> str:
        odd = builder.add("negation", builder.add("equal", values, values))
        where = builder.add("either", builder.add("equal", values, largest), odd)
        return builder.add("select", where, numbers, least)

    part = builder.add("reduce_max", first(rows, maxima, within), axis=last, keep=True)
    whole = builder.add("reshape", most, shape=(*builder.tile(most).known_shape, 1))
    return over_parts(builder, node, first(maxima, whole, builder.add("add", part, before)), last - 1)
