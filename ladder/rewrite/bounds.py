"""Rules on least and largest numbers: clamps of what has been clamped are one, or none.

A conversion to a float of 8 bits clamps where torch saturates, as programs that quantize do before it. NaN
passes through all of these, and no rule looks at it.
"""

from __future__ import annotations

import math

import numpy as np

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.graph import Node
from ladder.ir.ops import get_operator
from ladder.rewrite.rules import Match, Rule, Rules, pattern
from tile_types.library import get_type

Range = tuple[float, float]
"""What no number, NaN aside, is less than, and what none is larger than."""

EVERY: Range = (-math.inf, math.inf)

MOST_PASSED = 16
"""Values between a bound and an earlier one."""

BOUNDS = {"maximum": max, "minimum": min}


def _bounded(builder: GraphBuilder, node: Node) -> tuple[str, float] | None:
    """Return (operand, number) of a bound by a number; None if a node is none, or changes the tile."""
    if node.operator not in BOUNDS:
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        constant = builder.node(other)
        number = node_attributes(constant)["value"] if constant.operator == "constant" else math.nan
        if builder.tile(value) == node.tile and not math.isnan(number):
            return value, number
    return None


def _range(builder: GraphBuilder, value: str) -> Range:
    """Return the range of a value, as the bounds that it went through give it."""
    passed: list[Node] = []
    found = EVERY
    while len(passed) < MOST_PASSED:
        node = builder.node(value)
        if node.operator == "relu":
            found = (0.0, math.inf)
        if (bounded := _bounded(builder, node)) is not None:
            value = bounded[0]
        elif node.operator == "convert" or (
            len(node.inputs) == 1 and get_operator(node.operator).engine == "view"
        ):
            value = node.inputs[0]
        else:
            break
        passed.append(node)
    for node in reversed(passed):
        if (bounded := _bounded(builder, node)) is not None:
            low, high = (BOUNDS[node.operator](end, bounded[1]) for end in found)
            found = (low, high)
        elif node.operator == "convert" and not _are_numbers_of(node.tile.ttype.name, found):
            found = EVERY
    return found


def _are_numbers_of(ttype: str, ends: Range) -> bool:
    """Tell whether a float type has the ends of a range: rounding to it then leaves no number outside."""
    target = get_type(ttype)
    known = np.array([end for end in ends if math.isfinite(end)])
    return "float" in ttype and target.holds(known)


def _drop_bound(match: Match) -> str | None:
    """``maximum(x, a)`` or ``minimum(x, b)`` -> ``x`` where no number of x is below a, or above b."""
    bounded = _bounded(match.builder, match.root)
    if bounded is None:
        return None
    low, high = _range(match.builder, bounded[0])
    fits = low >= bounded[1] if match.root.operator == "maximum" else high <= bounded[1]
    return bounded[0] if fits else None


def _join_bounds(match: Match) -> str | None:
    """``clamp(clamp(x, a, b), c, d)`` -> ``clamp(x, ...)``, of nothing that others read."""
    builder, node = match.builder, match.root
    steps: list[tuple[str, float]] = []
    while (bounded := _bounded(builder, node)) is not None and (not steps or node.name not in match.shared):
        steps.append((node.operator, bounded[1]))
        value, node = bounded[0], builder.node(bounded[0])
    low, high = EVERY
    for operator, number in reversed(steps):
        low, high = (BOUNDS[operator](end, number) for end in (low, high))
    kept = [(o, end) for o, end, none in zip(BOUNDS, (low, high), EVERY, strict=True) if end != none]
    if len(kept) >= len(steps):
        return None
    for operator, number in kept:
        constant = builder.add("constant", value=number, type=match.root.tile.ttype.name)
        value = builder.add(operator, value, constant, level=match.root.tile.level)
    return value


BOUND_FOLDING: Rules = (
    Rule("drop bounds that hold", pattern("maximum|minimum"), _drop_bound),
    Rule("join bounds", pattern("maximum|minimum"), _join_bounds),
)
