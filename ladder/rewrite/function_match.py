"""Pattern match of activation functions that are written as several operators.

``0.5 x (1 + tanh(0.798 (x + 0.0447 x³)))`` is GELU in whatever order its products are taken: polynomials in x
and in the inner function of x are compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.rewrite.rules import Match, Rule, Rules, pattern

Polynomial = dict[tuple[int, int], float]
"""(Power of x, power of the inner function) -> coefficient."""

LARGEST_POWER = 4
"""Of polynomials that are followed."""

TOLERANCE = 1e-6
"""Relative difference of coefficients that are taken for equal: constants are written with some digits."""

LONGEST_PATH = 24
"""Operators on a path that are looked through, two conversions beside each of 16 bits included."""

TYPES = ("float16", "bfloat16", "float32")
"""Types of x: in float64 functions are computed as they are written."""


@dataclass(frozen=True)
class Form:
    """An activation function as arithmetic around an inner function.

    inner: What the inner function is applied to, a polynomial in x.
    outer: What the function is, in x and the inner function.
    operator: Its name.
    """

    inner: Polynomial
    outer: Polynomial
    operator: str


_HALF: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}

FORMS: Mapping[str, Form] = {
    "tanh": Form(
        {(1, 0): math.sqrt(2 / math.pi), (3, 0): 0.044715 * math.sqrt(2 / math.pi)}, _HALF, "gelu_tanh"
    ),
    "erf": Form({(1, 0): math.sqrt(0.5)}, _HALF, "gelu"),
    "sigmoid": Form({(1, 0): 1.0}, {(1, 1): 1.0}, "silu"),
}
"""Inner function -> the activation function around it."""


def _matched(match: Match) -> str | None:
    """Replace what computes an activation function by its operator."""
    builder, root = match.builder, match.root
    if root.tile.ttype.name not in TYPES:
        return None
    for value in root.inputs:
        for inner in _within(builder, value):
            form = FORMS.get(builder.node(inner).operator)
            x = None if form is None else _argument(match, form, inner)
            if form is not None and x is not None:
                return builder.add(form.operator, x)
    return None


def _argument(match: Match, form: Form, inner: str) -> str | None:
    """Return x if the root of a match is a function of x around an inner one; else None."""
    builder, root = match.builder, match.root
    (argument,) = builder.node(inner).inputs
    for x in _within(builder, argument):
        tile = builder.tile(x)
        if tile.ttype != root.tile.ttype or tile.shape != root.tile.shape:
            continue
        variables = {x: (1, 0), inner: (0, 1)}
        operands = [_polynomial(builder, value, variables) for value in root.inputs]
        whole = _RULES[root.operator](*operands)
        if _equal(whole, form.outer) and _equal(_polynomial(builder, argument, {x: (1, 0)}), form.inner):
            return x
    return None


def _within(builder: GraphBuilder, start: str) -> Iterator[str]:
    """Yield values that arithmetic leads back to, nearest first."""
    level, seen = [start], {start}
    for _ in range(LONGEST_PATH):
        yield from level
        arithmetic = [node for node in map(builder.node, level) if node.operator in _RULES]
        level = [
            value for value in dict.fromkeys(v for n in arithmetic for v in n.inputs) if value not in seen
        ]
        seen.update(level)


def _equal(found: Polynomial | None, wanted: Polynomial) -> bool:
    if found is None or found.keys() != wanted.keys():
        return False
    return all(math.isclose(found[power], wanted[power], rel_tol=TOLERANCE) for power in wanted)


def _polynomial(
    builder: GraphBuilder, value: str, variables: Mapping[str, tuple[int, int]], reach: int = LONGEST_PATH
) -> Polynomial | None:
    """Return a value as a polynomial; None if it is none of them alone, or deeper than `reach`."""
    if value in variables:
        return {variables[value]: 1.0}
    node = builder.node(value)
    if node.operator == "constant":
        number = float(node_attributes(node)["value"])
        return {(0, 0): number} if number else {}
    rule = _RULES.get(node.operator)
    if rule is None or not reach or node.tile.ttype.name not in TYPES:
        return None
    return rule(*(_polynomial(builder, operand, variables, reach - 1) for operand in node.inputs))


def _sum(left: Polynomial | None, right: Polynomial | None, sign: float = 1.0) -> Polynomial | None:
    if left is None or right is None:
        return None
    total = {p: left.get(p, 0.0) + sign * right.get(p, 0.0) for p in {**left, **right}}
    return {power: factor for power, factor in total.items() if factor}


def _product(left: Polynomial | None, right: Polynomial | None) -> Polynomial | None:
    if left is None or right is None:
        return None
    found: Polynomial = {}
    for (i, j), factor in left.items():
        for (k, m), other in right.items():
            found[i + k, j + m] = found.get((i + k, j + m), 0.0) + factor * other
    return found if all(max(power) <= LARGEST_POWER for power in found) else None


def _quotient(left: Polynomial | None, right: Polynomial | None) -> Polynomial | None:
    number = _number(right)
    return _product(left, {(0, 0): 1.0 / number}) if number else None


def _power(base: Polynomial | None, exponent: Polynomial | None) -> Polynomial | None:
    square, number = _product(base, base), _number(exponent)
    return square if number == 2 else _product(base, square) if number == 3 else None


def _number(value: Polynomial | None) -> float | None:
    """Return the number that a polynomial is; None if it is 0 or has a variable."""
    return value.get((0, 0)) if value is not None and len(value) == 1 else None


_RULES: Mapping[str, Callable[..., Polynomial | None]] = {
    "add": _sum,
    "sub": lambda a, b: _sum(a, b, -1.0),
    "mul": _product,
    "div": _quotient,
    "pow": _power,
    "square": lambda a: _product(a, a),
    "neg": lambda a: _product(a, {(0, 0): -1.0}),
    "convert": lambda a: a,
}
"""Operator -> its result as a polynomial, of its operands as polynomials."""

FUNCTION_PATTERNS: Rules = (Rule("match activation functions", pattern("add|mul|div"), _matched),)
"""Functions of one number that kernels compute as one operator."""
