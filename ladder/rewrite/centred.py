"""Squared deviations of deviations are squared deviations: the mean of deviations is 0, but for rounding.

As of variances of columns that a program has centred already, which would read them once more. Only sums of
squares are made of fewer: where an element is infinite or NaN, all deviations of deviations are NaN, of which
one makes a sum NaN.
"""

from __future__ import annotations

from math import prod
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes, reduced_axis
from ladder.rewrite.rules import Match, Rule, Rules, pattern

STEPS = ("reshape", "reduce_sum", "div")
"""Operators of a mean, down to what it is of."""


def _squares_again(match: Match) -> str | None:
    """``sum(square(d - mean(d)))`` -> ``sum(square(d))`` for ``d = x - mean(x)``, all along one axis."""
    builder, root = match.builder, match.root
    squares = builder.node(root.inputs[0])
    if squares.operator != "square" and not (squares.operator == "mul" and len({*squares.inputs}) == 1):
        return None
    again = builder.node(squares.inputs[0])
    if again.operator != "sub":
        return None
    d, mean = again.inputs
    below = builder.node(d)
    if below.operator != "sub" or below.tile.shape != again.tile.shape:
        return None
    x, first = below.inputs
    if builder.tile(x).shape != below.tile.shape or "float" not in below.tile.ttype.name:
        return None
    steps, shape = _mean_of(builder, mean, d), below.tile.shape
    if steps is None or steps != _mean_of(builder, first, x):
        return None
    reduced = [along for operator, along in steps if operator == "reduce_sum"]
    divided = prod(number for operator, number in steps if operator == "div")
    axis = reduced_axis(builder, root)
    if reduced != [(shape, axis)] or divided != shape[axis]:
        return None
    return builder.add("reduce_sum", builder.add("square", d), **node_attributes(root))


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
            steps.append(("reduce_sum", (shape, reduced_axis(builder, node))))
        elif [e for e in shape if e != 1] != [e for e in node.tile.shape if e != 1]:
            steps.append(("reshape", node.tile.shape))
        value = below
    return steps


CENTRED: Rules = (Rule("deviations of deviations", pattern("reduce_sum"), _squares_again),)
