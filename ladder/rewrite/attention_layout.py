"""Attention of queries in the layout ``[tokens, heads]``: the result gets that layout, without a copy."""

from __future__ import annotations

from typing import Any

from ladder.ir.build import node_attributes
from ladder.ir.ops import get_operator
from ladder.rewrite.rules import Match, Rule, Rules, pattern

HEADS_FIRST = (0, 2, 1, 3)
"""Swaps heads and tokens, both ways."""


def _swapped(values: Any) -> tuple[Any, ...]:
    """Return what belongs to four axes with the middle two swapped."""
    return (values[0], values[2], values[1], values[3])


def _behind(match: Match, value: str) -> str | None:
    """Return a value ``[B, H, T, D]`` computed as ``[B, T, H, D]``; None where that takes a copy."""
    node, shape = match.builder.node(value), match.builder.tile(value).shape
    if node.operator == "transpose":
        same = node_attributes(node)["permutation"] == HEADS_FIRST
        return node.inputs[0] if same else None
    given: dict[str, Any] = dict(node.attributes)
    if node.operator == "slice":
        given |= {name: _swapped(given[name]) for name in ("begin", "shape", "step") if given.get(name)}
    elif node.operator == "concat":
        if given["axis"] % 4 != 3:
            return None
    elif not (get_operator(node.operator).elementwise or node.operator == "convert") or not node.inputs:
        return None
    operands = []
    for operand in node.inputs:
        own = match.builder.tile(operand).shape
        found = _behind(match, operand) if own == shape or (len(own) == 4 and own[1] != 1) else None
        if found is None and (own == shape or len(own) > 4):
            return None
        operands.append(found if found is not None else _spread(match, operand))
        if operands[-1] is None:
            return None
    return match.builder.add(node.operator, *operands, **given)


def _spread(match: Match, value: str) -> Any:
    """Return a value that is the same for all heads as it spreads over ``[B, T, H, D]``; None for others."""
    shape = match.builder.tile(value).shape
    lead = (1,) * (4 - len(shape)) + tuple(shape)
    if lead[1] != 1:
        return None
    return value if not shape else match.builder.add("reshape", value, shape=_swapped(lead))


def _heads_behind(match: Match) -> str | None:
    """``attention(f(transpose(x)), ...)`` -> ``attention(transpose(f(x)), ...)``."""
    q, *rest = match.root.inputs
    shape = match.builder.tile(q).shape
    operator = match.builder.node(q).operator
    computed = get_operator(operator).elementwise or operator in ("convert", "concat")
    if not computed or len(shape) != 4 or 1 in shape[1:3]:
        return None
    found = _behind(match, q)
    if found is None:
        return None
    turned = match.builder.add("transpose", found, permutation=HEADS_FIRST)
    attributes: dict[str, Any] = dict(match.root.attributes)
    return match.builder.add("attention", turned, *rest, **attributes)


QUERY_LAYOUT: Rules = (Rule("queries by tokens", pattern("attention"), _heads_behind),)
"""Where attention writes its result in the order of its queries."""
