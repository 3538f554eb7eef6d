"""Elements of joins (``concat``): of which operand they are, and where they lie in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower import Expr
from ladder.lower.chain.element_types import computed_type
from ladder.lower.chain.indices import Index, is_same

if TYPE_CHECKING:
    from ladder.lower.chain.values import Values

Bounds = tuple[Expr, Expr]
"""Where an operand begins and ends along the axis of a join."""

VIEWS = ("slice", "broadcast", "reshape", "transpose")
"""Operators whose operands are looked through for what parts of a join are parts of."""


def before_the_last(graph: Graph) -> set[str]:
    """Return the joins along axes before the last: neighbours, as of a vector, are of one operand."""
    joins = [node for node in graph.nodes if node.operator == "concat"]
    return {n.name for n in joins if node_attributes(n)["axis"] % len(n.tile.shape) < len(n.tile.shape) - 1}


def computed_apart(graph: Graph, known: int | None = None) -> int:
    """Return how many operators, at most, compute operands of a join, but not all of them.

    known: An axis, from the end, along which it is known of which operand an element is.
    """
    below: dict[str, frozenset[str]] = {}
    apart = 0
    for node in graph.nodes:
        own = frozenset({node.name} if get_operator(node.operator).elementwise else ())
        parts = [below[value] for value in node.inputs]
        every = frozenset().union(*parts)
        if node.operator == "concat" and _axis_from_end(node) != known:
            apart = max(apart, len(every - parts[0].intersection(*parts)))
        below |= dict.fromkeys(node.values, own | every)
    return apart


def _axis_from_end(node: Node) -> int:
    rank = len(node.tile.shape)
    return int(node_attributes(node)["axis"]) % rank - rank


def bounds_of(values: Values, node: Node, axis: int) -> list[Bounds]:
    """Return (begin, end) of each operand along the axis."""
    bounds, begin = [], 0
    for value in node.inputs:
        end = values.simplified(begin + values.extent(values.graph.tile(value).shape[axis]))
        bounds.append((begin, end))
        begin = end
    return bounds


def places(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> list[Index | None]:
    """Return where an element lies in each operand; None of those that it is not of."""
    axis = attributes["axis"] % len(index)
    found: list[Index | None] = []
    for operand, (begin, end) in zip(node.inputs, bounds_of(values, node, axis), strict=True):
        outside = values.is_below(index[axis], begin) is True or values.is_below(index[axis], end) is False
        if outside or is_same(begin, end):
            found.append(None)
            continue
        place = values.between(operand, axis, index[axis], begin, end) - begin
        found.append((*index[:axis], values.simplified(place), *index[axis + 1 :]))
    return found


def element(values: Values, node: Node, index: Index, attributes: Mapping[str, Any]) -> Expr:
    """Choose the operand: where the loop's range decides, without a branch."""
    axis = attributes["axis"] % len(index)
    read = places(values, node, index, attributes)
    parts = zip(node.inputs, read, bounds_of(values, node, axis), strict=True)
    kept = [(operand, place, bounds) for operand, place, bounds in parts if place is not None]
    if not kept:  # what is assumed here rules out all operands, so this is never reached
        return tirx.const(0, computed_type(node.tile.ttype.name))
    if len(kept) == 1:
        return values.at(kept[0][0], kept[0][1])
    if node.name in values.joined_by_position:
        one = _in_one_value(values, index, axis, [(operand, bounds) for operand, _, bounds in kept])
        if one is not None:
            return values.at(*one)
    result: Expr = None
    for number, (operand, place, (begin, end)) in reversed(list(enumerate(kept))):
        first, last = number == 0, number == len(kept) - 1
        outside = ([] if first else [index[axis] >= begin]) + ([] if last else [index[axis] < end])
        value = values.under(outside, partial(values.at, operand, place))
        if not last:
            values.note_break(index[axis], end)
            values.open.append(values.compared(index[axis], end))
            value = T.if_then_else(index[axis] < end, value, result)
        result = value
    return result


def _in_one_value(
    values: Values, index: Index, axis: int, parts: Sequence[tuple[str, Bounds]]
) -> tuple[str, Index] | None:
    """Return the value that all operands are views of, and the element's place there; None if there is none.

    As of borders that mirror or repeat rows, and of rows that are turned round: one load serves for all.
    """
    found = []
    for operand, (begin, _) in parts:
        found.append(_viewed(values, operand, (*index[:axis], index[axis] - begin, *index[axis + 1 :])))
    value, last = found[-1]
    if any(other != value for other, _ in found):
        return None
    apart = {at for _, place in found for at, part in enumerate(place) if not is_same(part, last[at])}
    if len(apart) > 1:
        return None
    position = list(last)
    for at in apart:
        for (_, place), (_, (_, end)) in reversed([*zip(found[:-1], parts[:-1], strict=True)]):
            position[at] = T.Select(index[axis] < end, place[at], position[at])
    return value, tuple(position)


def _viewed(values: Values, value: str, index: Index) -> tuple[str, Index]:
    """Return what a value shows, and where."""
    index = tuple(map(values.simplified, index))
    while (node := values.graph.producer(value)).operator in VIEWS:
        (place,) = values.places(node, index)
        assert place is not None  # views read all of what they show
        value, index = node.inputs[0], tuple(map(values.simplified, place))
    return value, index
