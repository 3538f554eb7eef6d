"""Long reductions of transposed values, as of logits along their columns, run along the axis as it lies.

Lanes that share a row of a transposed value would read far elements of memory, each a sector of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ladder.ir.build import GraphBuilder, draws, is_by_element, node_attributes, transformed
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node
from ladder.ir.shapes import replaced
from ladder.rewrite.short_reductions import COMBINING

LEAST_LENGTH, LEAST_ROW, MUCH_READ = 2048, 1024, 1 << 20
"""Elements of a reduction that becomes one of columns, or of rows, and of all that it reads, from which on it
counts how they lie: tiles of shorter rows are turned in shared memory, lanes hold shorter columns."""

Permutation = tuple[int, ...]


def as_they_lie(graph: Graph) -> Graph:
    """Return a graph whose long reductions of transposed values are transposes of others."""
    orders = {node.name: order for node in graph.nodes if (order := _order(graph, node)) is not None}
    if not orders:
        return graph
    names: dict[str, str] = {}
    made: dict[tuple[str, Permutation], str] = {}

    def one(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        names.update(zip(node.inputs, inputs, strict=True))
        if node.name not in orders:
            return None
        order = orders[node.name]
        whole = graph.tile(node.inputs[0]).shape
        value = _in_order(builder, graph, node.inputs[0], order, whole, names, made)
        return _reduced(builder, node, value, order)

    return replace(transformed(graph, one), grid=graph.grid)


def _order(graph: Graph, node: Node) -> Permutation | None:
    """Return the permutation of what a long reduction reads, if that moves its axis to the end or from it."""
    if node.operator not in COMBINING:
        return None
    shape = graph.tile(node.inputs[0]).shape
    count, axis = product(shape), node_attributes(node)["axis"] % len(shape)
    length = shape[axis]
    if not isinstance(count, int) or not isinstance(length, int) or count < MUCH_READ:
        return None
    found, ahead, seen = set[Permutation](), [node.inputs[0]], set[str]()
    while ahead:
        below = graph.producer(ahead.pop())
        if below.name in seen or _is_spread(below.tile.shape) or _is_repeated(below.tile.shape, shape):
            continue
        seen.add(below.name)
        if below.operator == "transpose":
            found.add(node_attributes(below)["permutation"])
        elif below.tile.shape == shape and _by_element(below):
            ahead += below.inputs
        elif below.operator != "iota":
            return None
    if len(found) != 1:
        return None
    (order,) = found
    last = len(shape) - 1
    least = LEAST_LENGTH if axis == last else LEAST_ROW
    return order if length >= least and (axis == last) != (order[axis] == last) else None


def _by_element(node: Node) -> bool:
    return is_by_element(node) and bool(node.inputs) and not draws(node)


def _is_spread(shape: Shape) -> bool:
    """Tell whether a shape has one axis at most that is longer than one element: any order is a reshape."""
    return sum(extent != 1 for extent in shape) <= 1


def _is_repeated(shape: Shape, whole: Shape) -> bool:
    """Tell whether a value is repeated along some axis of what is computed of it: any order costs little."""
    padded = (*[1] * (len(whole) - len(shape)), *shape)
    return all(extent in (1, other) for extent, other in zip(padded, whole, strict=True)) and padded != whole


def _in_order(
    builder: GraphBuilder, graph: Graph, value: str, order: Permutation, full: Shape, names: dict[str, str],
    made: dict[tuple[str, Permutation], str],
) -> str:  # fmt: skip
    """Add what is computed of transposed values, of shape ``full``, of these values as they lie."""
    if (value, order) in made:
        return made[value, order]
    node, shape = graph.producer(value), graph.tile(value).shape
    back = [order.index(axis) for axis in range(len(order))]
    whole = (*[1] * (len(order) - len(shape)), *shape)
    if not shape:
        found = names[value]
    elif _is_spread(shape):
        found = builder.add("reshape", names[value], shape=tuple(whole[axis] for axis in back))
    elif _is_repeated(shape, full):
        opened = builder.add("reshape", names[value], shape=whole)
        found = builder.add("transpose", opened, permutation=tuple(back))
    elif node.operator == "transpose":
        found = names[node.inputs[0]]
    elif node.operator == "iota":
        attributes = node_attributes(node)
        found = builder.add("iota", **attributes | {"axis": order[attributes["axis"] % len(order)]})
    else:
        operands = [_in_order(builder, graph, one, order, full, names, made) for one in node.inputs]
        given: dict[str, Any] = dict(node.attributes)
        found = builder.add(node.operator, *operands, **given)
    made[value, order] = found
    return found


def _reduced(builder: GraphBuilder, node: Node, value: str, order: Permutation) -> str:
    """Add a reduction of a value as it lies, and its result in the order of the transposed one."""
    shape, attributes = builder.tile(value).shape, node_attributes(node)
    axis = attributes["axis"] % len(shape)
    found = builder.add(node.operator, value, axis=order[axis], keep=True)
    turned = builder.add("transpose", found, permutation=order)
    assert builder.tile(turned).shape == replaced(builder.tile(turned).shape, axis, 1)
    rest = [one for one in order if one != order[axis] and shape[one] != 1]
    as_it_lies = found if rest == sorted(rest) else turned
    return builder.add("reshape", as_it_lies, shape=node.tile.shape)
