"""Shared passes: elimination of common subexpressions, and the pattern match of softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ladder.ir.build import GraphBuilder, draws, is_by_element, node_attributes
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from tile_types.forms import HALVES


def merge_equal(graph: Graph) -> Graph:
    """Keep the first of all nodes that apply one operator to the same values.

    Reductions that differ in axes of one element are one, reshaped. A product of 16 bits to which a
    vector is added before it is rounded is none that others read.
    Other people's library calls stay as often as they are made: they may draw random numbers.
    """
    return _merged(graph, _is_pure)


def merge_all_but_windows(graph: Graph) -> Graph:
    """Do as `merge_equal`, but let each reader gather its own windows: storing them moves more elements."""
    rank = {
        value: len(tile.shape) for n in graph.nodes for value, tile in zip(n.values, n.tiles, strict=True)
    }

    def merges(node: Node) -> bool:
        gathers = node.operator == "map" and rank[node.name] > rank[node.inputs[0]]
        return _is_pure(node) and not gathers

    return _merged(graph, merges)


def merge_reshaped(graph: Graph) -> Graph:
    """Keep the first of all nodes that compute the same elements in the same order: others are it, reshaped.

    As where a reduction reads a value with two axes as one, and others read it as it is.
    """
    builder = GraphBuilder(graph.name, graph.level)
    keys: dict[str, Any] = {}
    seen: dict[Any, str] = {}
    for node in graph.nodes:
        key = _elements_of(builder, node, keys)
        keys |= dict.fromkeys(node.values, node.name) | {node.name: key}
        first = seen.setdefault(key, node.name) if get_operator(node.operator).elementwise else node.name
        if first != node.name:
            node = Node(node.name, "reshape", (first,), (("shape", node.tile.shape),), node.tiles)
        builder.insert(node)
    return builder.finish(*graph.outputs)


def _elements_of(builder: GraphBuilder, node: Node, keys: Mapping[str, Any]) -> Any:
    """Return what a node's elements are, whatever its axes: equal for those of the same ones in order."""
    shapes = [builder.tile(value).shape for value in node.inputs]
    count = product(node.tile.shape)
    if node.operator == "reshape" or node.operator == "constant":
        return keys[node.inputs[0]] if node.inputs else (node.operator, node.attributes, node.tile.ttype)
    computed = is_by_element(node)
    if not computed or any(product(shape) not in (count, 1) for shape in shapes) or not _is_pure(node):
        return node.name
    return node.operator, node.attributes, node.tile.ttype, count, *(keys[value] for value in node.inputs)


def _merged(graph: Graph, merges: Callable[[Node], bool]) -> Graph:
    builder = GraphBuilder(graph.name, graph.level)
    renamed: dict[str, str] = {}
    seen: dict[Any, tuple[str, ...]] = {}
    added = _added_before_rounding(graph)
    for node in graph.nodes:
        inputs = tuple(renamed[value] for value in node.inputs)
        copy = replace(node, inputs=inputs)
        key = (node.operator, inputs, node.attributes, node.tiles, node.body, added.get(node.name))
        values = seen.get(key) if merges(node) else None
        reduction = _reduction(builder, copy) if values is None else None
        other = seen.get(reduction) if reduction is not None else None
        if other is not None:
            copy = Node(node.name, "reshape", other, (("shape", node.tile.shape),), node.tiles)
        if values is None:
            builder.insert(copy)
            values = seen[key] = copy.values
            if reduction is not None:
                seen.setdefault(reduction, values)
        renamed.update(zip(node.values, values, strict=True))
    return builder.finish(*(renamed[output] for output in graph.outputs))


def _added_before_rounding(graph: Graph) -> dict[str, str]:
    """Return the stored vector that is added to a product of 16 bits, if nothing else reads the product.

    ``convert(convert(a · b) + convert(vector))``: torch's product rounds the sum alone.
    """
    readers: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            readers.setdefault(value, []).append(node)
    found = {}
    for node in graph.nodes:
        if node.operator == "matmul" and node.tile.ttype.name in HALVES:
            way = [node, *_followed(graph, readers, node.name, ("convert", "add", "convert"))]
            if len(way) == 4 and not node_attributes(way[-1]).get("exact"):
                others = {graph.unconverted(value) for value in way[2].inputs if value != way[1].name}
                vector = next(iter(others), "")
                if vector and graph.producer(vector).operator == "input":
                    found[node.name] = vector
    return found


def _followed(
    graph: Graph, readers: dict[str, list[Node]], value: str, operators: tuple[str, ...]
) -> Iterator[Node]:
    """Yield what alone reads a value, what alone reads that and so on, as long as they apply `operators`."""
    for operator in operators:
        following = readers.get(value, ())
        if value in graph.outputs or len(following) != 1 or following[0].operator != operator:
            return
        yield following[0]
        value = following[0].name


def _reduction(builder: GraphBuilder, node: Node) -> Any:
    """Return what a reduction is, but for axes of one element, also of what it reads; None of other nodes."""
    if not node.operator.startswith("reduce_"):
        return None
    (value,), given = node.inputs, node_attributes(node)
    shape, kept = builder.tile(value).shape, given.pop("keep", True)
    axis = given.pop("axis") % len(shape)
    if shape[axis] == 1:
        return node.operator, value, kept, axis
    place, long = len(_long(shape[:axis])), _long(shape)
    while (below := builder.node(value)).operator == "reshape" and long == _long(
        builder.tile(below.inputs[0]).shape
    ):
        value = below.inputs[0]
    return node.operator, value, place, tuple(sorted(given.items()))


def _long(shape: Shape) -> Shape:
    """Return the extents other than 1."""
    return tuple(extent for extent in shape if extent != 1)


def _is_pure(node: Node) -> bool:
    """Tell whether a node computes the same from the same values each time."""
    ours = str(dict(node.attributes).get("target", "")).startswith("ladder.")
    return not draws(node) and (ours or get_operator(node.operator).role == "value")


def softmax_maximum(builder: GraphBuilder, dividend: str, divisor: str) -> Node | None:
    """Return the maximum in ``e / sum(e)`` of ``e = exp(x - max(x))``, both along one axis; else None."""
    powers, total = builder.node(dividend), builder.node(divisor)
    if powers.operator != "exp" or total.operator != "reduce_sum" or total.inputs[0] != dividend:
        return None
    shifted = builder.node(powers.inputs[0])
    if shifted.operator != "sub":
        return None
    most = builder.node(shifted.inputs[1])
    if most.operator != "reduce_max" or most.inputs[0] != shifted.inputs[0]:
        return None
    rank = len(powers.tile.shape)
    one, other = (node_attributes(node) for node in (most, total))
    same = one["axis"] % rank == other["axis"] % rank and one["keep"] == other["keep"]
    return most if same else None
