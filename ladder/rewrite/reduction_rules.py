"""Rules that make reductions along neighbouring axes one: a long loop in place of several short ones."""

from __future__ import annotations

from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.ops import get_operator
from ladder.rewrite.rules import Match, Rule, Rules, pattern
from tile_types.tile import Extent

Pair = tuple[Extent, ...]
"""Extents of two neighbouring axes."""


def _merge(match: Match) -> str | None:
    """``reduce(reduce(x, axis + 1), axis)`` -> reduction of x with both axes joined."""
    inner, shape = match.node("inner"), match.tile("x").shape
    outer, below = node_attributes(match.root), node_attributes(inner)
    axis = outer["axis"] % len(inner.tile.shape)
    same = inner.operator == match.root.operator and outer["keep"] == below["keep"]
    if not same or below["axis"] % len(shape) != axis + 1:
        return None
    joined = _joined(match, match["x"], axis - len(shape), shape[axis : axis + 2])
    if joined is None:
        return None
    given: dict[str, Any] = dict(match.root.attributes) | {"axis": axis}
    value = match.builder.add(match.root.operator, joined, **given)
    return match.builder.add("reshape", value, shape=match.root.tile.shape)


def _joined(match: Match, value: str, axis: int, pair: Pair) -> str | None:
    """Return a value with an axis, counted from the end, and the next joined; None where that takes work.

    pair: The extents of both in what is computed of it.
    """
    node, shape = match.builder.node(value), match.builder.tile(value).shape
    at, row = len(shape) + axis, get_operator(node.operator)
    if at < 0:
        return value if at < -1 or shape[0] == 1 else None
    if row.elementwise or node.operator == "convert":
        operands = [_joined(match, operand, axis, pair) for operand in node.inputs]
        found = [operand for operand in operands if operand is not None]
        attributes: dict[str, Any] = dict(node.attributes)
        return match.builder.add(node.operator, *found, **attributes) if found == operands else None
    both = shape[at : at + 2]
    stored = row.role == "input" or row.engine in ("product", "library") or node.operator == "reshape"
    if both != (1, 1) and not (stored and both == pair):
        return None
    return match.builder.add("reshape", value, shape=(*shape[:at], product(both), *shape[at + 2 :]))


MERGED_REDUCTIONS: Rules = (
    Rule(
        "neighbouring axes of reductions",
        pattern("reduce_sum|reduce_max", pattern("reduce_sum|reduce_max", "x", name="inner")),
        _merge,
    ),
)
