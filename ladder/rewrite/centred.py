"""Deviations from the mean of deviations are these deviations: their mean is 0, but for how it was rounded.

As of variances of columns that a program has centred already, which would read them once more.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.extents import product
from ladder.rewrite.rules import Match, Rule, Rules, pattern

STEPS = ("reshape", "reduce_sum", "div")
"""Operators of a mean, down to what it is of."""


def _deviations_again(match: Match) -> str | None:
    """``sub(d, mean(d))`` -> ``d`` for ``d = sub(x, mean(x))``, both along the same axes."""
    builder, (d, mean) = match.builder, match.root.inputs
    below = builder.node(d)
    if below.operator != "sub" or below.tile.shape != match.root.tile.shape:
        return None
    x, first = below.inputs
    if builder.tile(x).shape != below.tile.shape or "float" not in below.tile.ttype.name:
        return None
    steps = _mean_of(builder, mean, d)
    if steps is None or steps != _mean_of(builder, first, x):
        return None
    count, means = product(below.tile.shape), product(builder.tile(mean).shape)
    if not isinstance(count, int) or not isinstance(means, int):
        return None
    divided = prod(number for operator, number in steps if operator == "div")
    return d if divided * means == count else None


def _mean_of(builder: GraphBuilder, value: str, read: str) -> list[tuple[str, Any]] | None:
    """Return the steps in which a value is made of the sum of another one; None if it is not.

    Axes of one element, which some keep, are no steps.
    """
    steps: list[tuple[str, Any]] = []
    while value != read:
        node, (below, *others) = builder.node(value), builder.node(value).inputs or ("",)
        number = builder.node(others[0]) if others else node
        if node.operator not in STEPS or (node.operator == "div" and number.operator != "constant"):
            return None
        shape = builder.tile(below).shape
        if node.operator == "div":
            steps.append(("div", node_attributes(number)["value"]))
        elif node.operator == "reduce_sum":
            steps.append(("reduce_sum", (shape, node_attributes(node)["axis"] % len(shape))))
        elif [e for e in shape if e != 1] != [e for e in node.tile.shape if e != 1]:
            steps.append(("reshape", node.tile.shape))
        value = below
    return steps


CENTRED: Rules = (Rule("deviations of deviations", pattern("sub"), _deviations_again),)
