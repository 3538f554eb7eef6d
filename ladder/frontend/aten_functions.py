"""ATen's functions of one number that are made of a few of ours: so activations stay within a kernel.

Logarithms of ``1 + x`` and exponentials less 1 are to the precision of float32: in float64 they stay torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ladder.frontend.importer import Importer, Row, wide_of

NEAR = 0.5
"""Magnitude up to which an exponential less 1 is a polynomial."""

EXPONENTIAL = [1 / math.factorial(power) for power in range(1, 10)]
"""Coefficients of ``(exp(x) - 1) / x``."""


def _polynomial(im: Importer, x: str, coefficients: Sequence[float], wide: str) -> str:
    found = im.operand(coefficients[-1], wide)
    for coefficient in coefficients[-2::-1]:
        found = im.apply("add", [im.apply("mul", [found, x], wide), coefficient], wide)
    return found


def _single(function: Any) -> Row:
    """Return the row of a function that is computed in float32."""

    def row(im: Importer, out: str, x: Any) -> Any:
        wide = wide_of(out)
        return im.cast(function(im, im.operand(x, wide)), out) if wide == "float32" else None

    return row


def _exponential_less_one(im: Importer, x: str) -> str:
    far = im.apply("sub", [im.apply("exp", [x], "float32"), 1.0], "float32")
    near = im.apply("mul", [_polynomial(im, x, EXPONENTIAL, "float32"), x], "float32")
    is_near = im.apply("less", [im.apply("abs", [x], "float32"), NEAR], "float32")
    return im.g.add("select", is_near, near, far)


def _logarithm_beyond_one(im: Importer, x: str) -> str:
    """Return ``log(1 + x)`` of ``u = 1 + x`` as it is rounded, and what that lost of x over u."""

    def apply(operator: str, *operands: Any) -> str:
        return im.apply(operator, operands, "float32")

    u = apply("add", x, 1.0)
    lost = apply("sub", x, apply("sub", u, 1.0))
    inside = im.g.add("both", apply("less", 0.0, u), apply("less", u, math.inf))
    rest = im.g.add("select", inside, apply("div", lost, u), im.operand(0.0, "float32"))
    found = apply("add", apply("log", u), rest)
    return im.g.add("select", apply("equal", u, 1.0), x, found)


SATURATED = 20.0
"""From here on the hyperbolic tangent of ``log(1 + exp(x))`` is 1 in float32."""


def _mish(im: Importer, x: str) -> str:
    """Return ``x tanh(log(1 + e))``, ``e = exp(x)``; the tangent is ``n / (n + 2)`` of ``n = e (e + 2)``."""
    e = im.apply("exp", [im.apply("minimum", [x, SATURATED], "float32")], "float32")
    n = im.apply("mul", [e, im.apply("add", [e, 2.0], "float32")], "float32")
    tangent = im.apply("div", [n, im.apply("add", [n, 2.0], "float32")], "float32")
    return im.apply("mul", [x, tangent], "float32")


def _by_sign(im: Importer, x: str, above: str, below: str, wide: str) -> str:
    """Return one of two values; that for numbers below 0 where x is not a number."""
    return im.g.add("select", im.apply("less", [0.0, x], wide), above, below)


def _leaky(im: Importer, out: str, x: Any, slope: float = 0.01) -> Any:
    wide = wide_of(out)
    x = im.operand(x, wide)
    return im.cast(_by_sign(im, x, x, im.apply("mul", [x, slope], wide), wide), out)


def _exponential_linear(
    im: Importer, out: str, x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1
) -> Any:
    if wide_of(out) != "float32":
        return None
    x = im.operand(x, "float32")
    inner = x if input_scale == 1 else im.apply("mul", [x, input_scale], "float32")
    below = im.apply("mul", [_exponential_less_one(im, inner), alpha * scale], "float32")
    return im.cast(_by_sign(im, x, im.apply("mul", [x, scale], "float32"), below, "float32"), out)


def _is_nan(im: Importer, out: str, x: Any) -> Any:
    if not im.ttype(x).startswith(("float", "bfloat")):
        return None
    wide = wide_of(im.ttype(x))
    return im.g.add("negation", im.apply("less_equal", [im.operand(x, wide), math.inf], wide))


def _truncated(im: Importer, out: str, x: Any) -> Any:
    if not out.startswith(("float", "bfloat")):
        return None
    wide = wide_of(out)
    x = im.operand(x, wide)
    ceiling = im.apply("neg", [im.apply("floor", [im.apply("neg", [x], wide)], wide)], wide)
    below = im.apply("less", [x, 0.0], wide)
    return im.cast(im.g.add("select", below, ceiling, im.apply("floor", [x], wide)), out)


FUNCTIONS: dict[str, Row] = {
    "expm1.default": _single(_exponential_less_one),
    "log1p.default": _single(_logarithm_beyond_one),
    "mish.default": _single(_mish),
    "elu.default": _exponential_linear,
    "leaky_relu.default": _leaky,
    "isnan.default": _is_nan,
    "trunc.default": _truncated,
}
"""Name and overload -> row."""
