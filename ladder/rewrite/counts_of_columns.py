"""Sums of masks beside sums of what they mask, along an axis before the last, are sums of columns too.

As means of the tokens that are there: each block has the mask in registers, where it sums columns of masked
elements; a kernel of its own would count first, and the other wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.build import GraphBuilder, draws, is_by_element, node_attributes, transformed
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.rewrite.short_reductions import COMBINING

WIDE = 32
"""Bits of a number up to which a lane counts for each column as fast as it sums."""


@dataclass(frozen=True)
class Count:
    """A reduction of a number for each position of columns, and what is made of it before columns read it.

    shape: Of the columns.
    axis: Along which they are reduced.
    computed: Nodes that have one number for all columns.
    """

    shape: Shape
    axis: int
    computed: frozenset[str]


def with_columns(graph: Graph) -> Graph:
    """Return a graph whose reductions of masks have a number for each column that reads them."""
    users: dict[str, list[Node | None]] = {value: [None] for value in graph.outputs}
    for node in graph.nodes:
        for value in node.inputs:
            users.setdefault(value, []).append(node)
    columns = [node for node in graph.nodes if node.operator in COMBINING and _is_of_columns(graph, node)]
    found: dict[str, Count] = {}
    for node in graph.nodes if columns else ():
        if node.operator in COMBINING and (count := _count(graph, node, columns, users)) is not None:
            found |= dict.fromkeys(count.computed, count)
    if not found:
        return graph

    def one(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        if node.name not in found:
            return None
        count = found[node.name]
        if node.operator in COMBINING:
            return _of_columns(builder, node, inputs[0], count)
        if node.operator == "reshape":
            return inputs[0]
        given: dict[str, Any] = dict(node.attributes)
        return builder.add(node.operator, *inputs, **given)

    return replace(transformed(graph, one), grid=graph.grid)


def _is_of_columns(graph: Graph, node: Node) -> bool:
    shape = graph.tile(node.inputs[0]).shape
    axis, known = node_attributes(node)["axis"] % len(shape), all(isinstance(e, int) for e in shape)
    return known and 1 not in (shape[axis], product(shape[axis + 1 :]))


def _count(
    graph: Graph, node: Node, columns: list[Node], users: Mapping[str, list[Node | None]]
) -> Count | None:
    """Return what a reduction is if all that reads it is computed of the columns of one of some others."""
    shape = graph.tile(node.inputs[0]).shape
    axis = node_attributes(node)["axis"] % len(shape)
    known = all(isinstance(extent, int) for extent in shape)
    if product(shape[axis + 1 :]) != 1 or not known or node.tile.ttype.elem_bits > WIDE:
        return None
    read = _sources(graph, node.inputs[0])
    for other in columns:
        whole = graph.tile(other.inputs[0]).shape
        along = node_attributes(other)["axis"] % len(whole)
        if shape[: axis + 1] != whole[: along + 1] or not read <= _sources(graph, other.inputs[0]):
            continue
        result = replace(other.tile, shape=(*whole[:along], *whole[along + 1 :])).shape
        computed = _computed(graph, node, result, other, users)
        if computed is not None:
            return Count(whole, along, computed)
    return None


def _computed(
    graph: Graph, node: Node, result: Shape, other: Node, users: Mapping[str, list[Node | None]]
) -> frozenset[str] | None:
    """Return the nodes that have one number for all columns, until all is computed of columns; else None."""
    found, ahead = {node.name}, [node.name]
    dropped = other.tile.shape == result
    while ahead:
        for user in users.get(ahead.pop(), ()):
            if user is None:
                return None
            shape = user.tile.shape
            if _by_element(user) and shape == other.tile.shape:
                rest = [value for value in user.inputs if value not in found]
                if not dropped or not all(_is_made_of(graph, value, other.name) for value in rest):
                    return None
                continue
            alike = _by_element(user) or user.operator == "reshape"
            numbers = product(shape) == product(node.tile.shape)
            others = [value for value in user.inputs if value not in found]
            if not (alike and numbers and all(product(graph.tile(v).shape) == 1 for v in others)):
                return None
            if user.name not in found:
                found.add(user.name)
                ahead.append(user.name)
    return frozenset(found)


def _by_element(node: Node) -> bool:
    return is_by_element(node) and not draws(node)


def _is_made_of(graph: Graph, value: str, name: str) -> bool:
    """Tell whether a value is computed of a node's result, element by element."""
    ahead = [value]
    while ahead:
        node = graph.producer(ahead.pop())
        if node.name == name:
            return True
        ahead += node.inputs if _by_element(node) else ()
    return False


def _sources(graph: Graph, value: str) -> set[str]:
    """Return what is read for a value, through what is computed of it element by element."""
    found, ahead, seen = set[str](), [value], set[str]()
    while ahead:
        node = graph.producer(ahead.pop())
        if node.name in seen or get_operator(node.operator).engine == "leaf":
            continue
        seen.add(node.name)
        if _by_element(node) or node.operator in ("reshape", "broadcast"):
            ahead += node.inputs
        else:
            found.update(node.values)
    return found


def _of_columns(builder: GraphBuilder, node: Node, value: str, count: Count) -> str:
    """Add a reduction of the same numbers for every column."""
    front, behind = count.shape[: count.axis + 1], count.shape[count.axis + 1 :]
    whole = builder.add("reshape", value, shape=(*front, *(1,) * len(behind)))
    whole = builder.add("broadcast", whole, shape=count.shape)
    return builder.add(node.operator, whole, axis=count.axis, keep=False)
