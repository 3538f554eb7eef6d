"""Reductions of a few positions, written out: they join what reads and gives them, an element a thread.

A kernel of rows or columns has one loop for all that it computes. So what is reduced over three colours, and
then joined, or read along other axes, would be several kernels, each with its traffic.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from typing import Any

from ladder.ir.build import GraphBuilder, is_by_element, node_attributes, transformed
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.shapes import replaced
from ladder.rewrite.axis_rules import JOIN_FOLDING
from ladder.rewrite.rules import rewrite

COMBINING = {"reduce_sum": "add", "reduce_max": "maximum"}
"""Reduction -> what combines two elements."""

FEW, LEAST_BEHIND = 4, 8
"""Elements at most of a reduction that is written out, and at least behind its axis: a vector's.

Elements of a last axis lie side by side, where lanes share a row; but those of pairs, which are computed of
few, as distances are of points."""

SPREAD, LEAST_PAIRS = 16, 1 << 16
"""Times as many pairs as what they are computed of has elements, and pairs, at least."""


Readers = dict[str, list[Node]]
"""Value -> the nodes that read it."""


def written_out(graph: Graph) -> Graph:
    """Return a graph without short reductions of what nobody else reads.

    Norms read what they reduce again: kernels of columns read it once.
    """
    readers: Readers = {}
    for user in graph.nodes:
        for value in user.inputs:
            readers.setdefault(value, []).append(user)
    short = {node.name for node in graph.nodes if _is_short(graph, node, readers)}
    if not short:
        return graph
    reduced = _reduced_alone(graph, short, readers)
    short = {name for name in short if _may_be_read_again(graph, graph.producer(name), reduced)}

    def one(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        return _in_parts(builder, node, inputs[0]) if node.name in short else None

    if not short:
        return graph
    return rewrite(replace(transformed(graph, one), grid=graph.grid), JOIN_FOLDING)


def _is_short(graph: Graph, node: Node, readers: Readers) -> bool:
    if node.operator not in COMBINING or node.tile.ttype.name == "bool":
        return False
    shape = graph.tile(node.inputs[0]).shape
    axis = node_attributes(node)["axis"] % len(shape)
    extent, behind = shape[axis], product(shape[axis + 1 :])
    if not (isinstance(extent, int) and 0 < extent <= FEW):
        return False
    if axis == len(shape) - 1:
        return _is_spread(graph, node)
    return not (isinstance(behind, int) and behind < LEAST_BEHIND) or _is_widely_read(node, readers)


def _is_widely_read(node: Node, readers: Readers) -> bool:
    """Tell whether something of many more elements reads a result, as vectors do their weights' sum."""
    ahead, made = [*readers.get(node.name, ())], product(node.tile.shape)
    seen = set[str]()
    while ahead:
        user = ahead.pop()
        if user.name in seen or not _is_passed(user):
            continue
        seen.add(user.name)
        count = product(user.tile.shape)
        if isinstance(count, int) and isinstance(made, int) and count >= 2 * LEAST_BEHIND * made:
            return True
        ahead += readers.get(user.name, ())
    return False


def _is_spread(graph: Graph, node: Node) -> bool:
    """Tell whether what a node is made of is much less than it has: pairs of few, which caches hold."""
    ahead, made, read = [*node.inputs], product(node.tile.shape), 0
    seen = set[str]()
    while ahead:
        below = graph.producer(ahead.pop())
        if below.name in seen:
            continue
        seen.add(below.name)
        if _is_passed(below):
            ahead += below.inputs
            continue
        count = product(below.tile.shape)
        read += count if isinstance(count, int) else LEAST_PAIRS
    return isinstance(made, int) and made >= LEAST_PAIRS and SPREAD * read <= made


def _is_passed(node: Node) -> bool:
    """Tell whether a node's elements are made of one element of each operand."""
    row = get_operator(node.operator)
    return row.elementwise or row.engine == "view" or node.operator == "convert"


def _reduced_alone(graph: Graph, short: set[str], readers: Readers) -> set[str]:
    """Return the values that only short reductions read, also through what is computed by element.

    A position of their axis that is cut out is one that the reduction written out reads too.
    """
    found = set[str]()
    returned = set(graph.outputs)
    axes = {_axis_from_end(graph, graph.producer(name)) for name in short}
    for node in reversed(graph.nodes):
        for value in node.values:
            ahead = readers.get(value, [])
            alone = all(
                user.name in short
                or (_is_passed(user) and user.name in found)
                or _is_one_position(graph, user, axes)
                for user in ahead
            ) and any(user.name in short or user.name in found for user in ahead)
            if ahead and value not in returned and alone:
                found.add(value)
    return found


def _axis_from_end(graph: Graph, node: Node) -> int:
    rank = len(graph.tile(node.inputs[0]).shape)
    return int(node_attributes(node)["axis"]) % rank - rank


def _is_one_position(graph: Graph, node: Node, axes: set[int]) -> bool:
    """Tell whether a node is one position of an axis, counted from the end, and all of the others."""
    if node.operator != "slice":
        return False
    whole, part = graph.tile(node.inputs[0]).shape, node.tile.shape
    differ = [at - len(whole) for at, pair in enumerate(zip(whole, part, strict=True)) if pair[0] != pair[1]]
    return len(differ) == 1 and differ[0] in axes and part[differ[0]] == 1


def _may_be_read_again(graph: Graph, node: Node, reduced: set[str]) -> bool:
    """Tell whether what a reduction reads only such reductions read, or it is made of few for each pair."""
    (value,) = node.inputs
    pairs = _axis_from_end(graph, node) == -1  # as `_is_short` has found
    return pairs or _may_be_read_in_parts(graph, value, reduced)


def _may_be_read_in_parts(graph: Graph, value: str, reduced: set[str]) -> bool:
    """Tell whether what has as many elements as a value, and it is made of, is read by reductions alone."""
    ahead, most = [value], product(graph.tile(value).shape)
    while ahead:
        name = ahead.pop()
        node = graph.producer(name)
        if name not in reduced and product(node.tile.shape) == most:
            return False
        ahead += node.inputs if _is_passed(node) else ()
    return True


def _in_parts(builder: GraphBuilder, node: Node, value: str) -> str:
    """Add a reduction written out; a sum begins with 0, so that it is 0 of zeros of either sign."""
    shape, given = builder.tile(value).shape, node_attributes(node)
    axis = given["axis"] % len(shape)
    parts = [_position(builder, value, axis - len(shape), at) for at in range(int(shape[axis]))]
    if node.operator == "reduce_sum":
        parts.insert(0, builder.add("constant", value=0, shape=(), type=node.tile.ttype.name))
    found = reduce(lambda a, b: builder.add(COMBINING[node.operator], a, b), parts)
    return found if given["keep"] else builder.add("reshape", found, shape=node.tile.shape)


def _position(builder: GraphBuilder, value: str, axis: int, at: int) -> str:
    """Return a value at one position of an axis, counted from the end: of operands where it is computed."""
    node, shape = builder.node(value), builder.tile(value).shape
    place = len(shape) + axis
    if place < 0 or shape[place] == 1:
        return value
    if is_by_element(node):
        operands = [_position(builder, operand, axis, at) for operand in node.inputs]
        attributes: dict[str, Any] = dict(node.attributes)
        return builder.add(node.operator, *operands, **attributes)
    begin = replaced((0,) * len(shape), place, at)
    return builder.add("slice", value, begin=begin, shape=replaced(shape, place, 1))
