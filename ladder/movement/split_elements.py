"""Elements that are stored, and summed in parts: all in the shape of the parts, and so in one kernel.

A kernel is a loop over rows that all its results share. The parts of a sum over a whole tensor are no rows
of it, but rows of the same elements in another shape, which what is computed element by element can have.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from ladder.ir.build import GraphBuilder, draws, is_by_element, node_attributes
from ladder.ir.extents import Shape, product
from ladder.ir.graph import Graph, Node

Readers = Mapping[str, Sequence[Node | None]]
"""Value -> the nodes that read it, None for results."""


def shapes_of_elements(graph: Graph, summed: Mapping[str, Shape], users: Readers) -> dict[str, Shape]:
    """Return what is stored and summed, and what that is computed of -> the shape of the parts of the sum.

    Not where others read it that need not wait for the sum: in their kernels it has its own shape.

    summed: Reductions -> what they read, in parts.
    """
    found, later = dict[str, Shape](), _made_of(graph, summed)
    for name, shape in summed.items():
        members = _by_element(graph, graph.producer(name).inputs[0])
        if members is None or any(found.get(member, shape) != shape for member in members):
            continue
        together = {other for other, parts in summed.items() if parts == shape}
        others = [reader for value in members for reader in _others(value, members | together, users)]
        if others and all(reader is None or reader.name in later for reader in others):
            found |= dict.fromkeys(members, shape)
    return found


def _made_of(graph: Graph, values: Container[str]) -> set[str]:
    """Return what is computed of some values: it comes in later kernels."""
    found = set[str]()
    for node in graph.nodes:
        if any(value in values or value in found for value in node.inputs):
            found.update(node.values)
    return found


def _by_element(graph: Graph, value: str) -> set[str] | None:
    """Return what computes a value element by element; None if it reads what has other extents."""
    count, ahead, found = product(graph.tile(value).shape), [value], set[str]()
    while ahead:
        node = graph.producer(ahead.pop())
        if node.name in found or product(node.tile.shape) == 1 != count:
            continue
        if product(node.tile.shape) != count:
            return None
        if node.operator == "reshape":
            ahead += node.inputs
        elif is_by_element(node) and node.inputs and not draws(node):
            found.add(node.name)
            ahead += node.inputs
    return found


def _others(value: str, members: Container[str], users: Readers) -> list[Node | None]:
    """Return the nodes, None for results, that read a value, in whatever shape, and are no members."""
    found = list[Node | None]()
    for reader in users[value]:
        if reader is not None and reader.operator == "reshape":
            found += _others(reader.name, members, users)
        elif reader is None or reader.name not in members:
            found.append(reader)
    return found


def in_shape(builder: GraphBuilder, node: Node, inputs: Sequence[str], shape: Shape) -> str:
    """Add a node that computes by element in another shape, and its result in its own."""
    operands = [_shaped(builder, value, shape) for value in inputs]
    made = builder.add(node.operator, *operands, **node_attributes(node))
    return reshaped(builder, made, node.tile.shape)


def _shaped(builder: GraphBuilder, value: str, shape: Shape) -> str:
    return reshaped(builder, value, () if product(builder.tile(value).shape) == 1 else shape)


def reshaped(builder: GraphBuilder, value: str, shape: Shape) -> str:
    """Add a value in another shape, if it is in no such one, nor made of one that is."""
    below = builder.node(value)
    while below.tile.shape != shape and below.operator == "reshape":
        below = builder.node(below.inputs[0])
    if below.tile.shape == shape:
        return below.name
    return builder.add("reshape", value, shape=shape)
