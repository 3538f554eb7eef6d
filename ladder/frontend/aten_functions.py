"""ATen's functions of one number that are made of a few of ours: so activations stay within a kernel.

Logarithms of ``1 + x`` and exponentials less 1 are to the precision of float32: in float64 they stay torch's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ladder.frontend.importer import Importer, Row, wide_of
from ladder.ir.extents import product

NEAR = 0.5
"""Magnitude up to which an exponential less 1 is a polynomial."""

EXPONENTIAL = [1 / math.factorial(power) for power in range(1, 10)]
"""Coefficients of ``(exp(x) - 1) / x``."""


def _polynomial(im: Importer, x: str, coefficients: Sequence[float], wide: str) -> str:
    found = im.operand(coefficients[-1], wide)
    for coefficient in coefficients[-2::-1]:
        found = im.apply("add", [im.apply("mul", [found, x], wide), coefficient], wide)
    return found


def single(function: Any) -> Row:
    """Return the row of a function that is computed in float32."""

    def row(im: Importer, out: str, x: Any) -> Any:
        wide = wide_of(out)
        return im.cast(function(im, im.operand(x, wide)), out) if wide == "float32" else None

    return row


VECTORS = 1 << 12
"""Elements from which on a call of torch, for functions that it computes by vectors on CPUs, pays."""


def trigonometric(name: str) -> Row:
    """Return the row of sine or cosine; of many elements on CPUs torch's own, which computes vectors."""

    def row(im: Importer, out: str, x: str) -> Any:
        count = product(im.shape(x))
        by_torch = im.on_cpu and isinstance(count, int) and count >= VECTORS
        return None if by_torch else im.floats(name, [x], out)

    return row


def exponential_less_one(im: Importer, x: str) -> str:
    """Return ``exp(x) - 1`` of a float32, near 0 too."""
    far = im.apply("sub", [im.apply("exp", [x], "float32"), 1.0], "float32")
    near = im.apply("mul", [_polynomial(im, x, EXPONENTIAL, "float32"), x], "float32")
    is_near = im.apply("less", [im.apply("abs", [x], "float32"), NEAR], "float32")
    return im.g.add("select", is_near, near, far)


def _logarithm_beyond_one(im: Importer, x: str) -> str:
    return im.g.add("log1p", x)


ARC_SINE = (0.16666752, 0.074952975, 0.045470376, 0.02417951, 0.042166308)
"""Coefficients of ``(asin(s) - s) / s ** 3`` in powers of ``s ** 2``, for s up to 1/2: within 5e-9."""

ARC_TANGENT = (
    *(-0.33333299, 0.19998549, -0.14264242, 0.10952186, -0.0840345, 0.057957593, -0.031177847),
    *(0.010914606, -0.0017936218),
)
"""Those of the arc tangent, for s up to 1: within 3e-9."""


def odd_series(im: Importer, s: str, square: str, coefficients: Sequence[float]) -> str:
    """Return ``s + s ** 3 p``, of a polynomial in ``s ** 2``; it has the sign of s, also of zeros."""
    inner = im.apply("mul", [_polynomial(im, square, coefficients, "float32"), square], "float32")
    return im.apply("mul", [im.apply("add", [inner, 1.0], "float32"), s], "float32")


def _arc_of_half(im: Importer, x: str) -> tuple[str, str]:
    """Return whether a magnitude is above 1/2, and the arc sine of x, or there of ``sqrt((1 - |x|) / 2)``."""
    size = im.apply("abs", [x], "float32")
    far = im.apply("less", [0.5, size], "float32")
    rest = im.apply("mul", [im.apply("sub", [1.0, size], "float32"), 0.5], "float32")
    square = im.g.add("select", far, rest, im.apply("square", [x], "float32"))
    return far, odd_series(im, im.g.add("select", far, im.g.add("sqrt", square), x), square, ARC_SINE)


def _signed(im: Importer, x: str, found: str) -> str:
    """Return a number that is not negative with the sign of x."""
    below = im.apply("less", [x, 0.0], "float32")
    return im.g.add("select", below, im.apply("neg", [found], "float32"), found)


def _arc_sine(im: Importer, x: str) -> str:
    far, arc = _arc_of_half(im, x)
    above = im.apply("sub", [math.pi / 2, im.apply("mul", [arc, 2.0], "float32")], "float32")
    return im.g.add("select", far, _signed(im, x, above), arc)


def _arc_cosine(im: Importer, x: str) -> str:
    far, arc = _arc_of_half(im, x)
    twice = im.apply("mul", [arc, 2.0], "float32")
    below = im.apply("less", [x, 0.0], "float32")
    twice = im.g.add("select", below, im.apply("sub", [math.pi, twice], "float32"), twice)
    return im.g.add("select", far, twice, im.apply("sub", [math.pi / 2, arc], "float32"))


def _arc_tangent(im: Importer, x: str) -> str:
    """Return the arc tangent of x, or from that of its inverse."""
    size = im.apply("abs", [x], "float32")
    far = im.apply("less", [1.0, size], "float32")
    s = im.g.add("select", far, im.apply("div", [1.0, size], "float32"), x)
    arc = odd_series(im, s, im.apply("square", [s], "float32"), ARC_TANGENT)
    return im.g.add("select", far, _signed(im, x, im.apply("sub", [math.pi / 2, arc], "float32")), arc)


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
    below = im.apply("mul", [exponential_less_one(im, inner), alpha * scale], "float32")
    return im.cast(_by_sign(im, x, im.apply("mul", [x, scale], "float32"), below, "float32"), out)


def _is_nan(im: Importer, out: str, x: str) -> Any:
    if not im.ttype(x).startswith(("float", "bfloat")):
        return None
    wide = wide_of(im.ttype(x))
    return im.g.add("negation", im.apply("less_equal", [im.operand(x, wide), math.inf], wide))


def _truncated(im: Importer, out: str, x: str) -> Any:
    if not out.startswith(("float", "bfloat")):
        return None
    wide = wide_of(out)
    x = im.operand(im.stepped(x), wide)
    ceiling = im.apply("neg", [im.apply("floor", [im.apply("neg", [x], wide)], wide)], wide)
    below = im.apply("less", [x, 0.0], wide)
    return im.cast(im.g.add("select", below, ceiling, im.apply("floor", [x], wide)), out)


def _fraction(im: Importer, out: str, x: str) -> Any:
    """Return what lies behind the point."""
    x = im.stepped(x)
    whole = _truncated(im, out, x)
    return None if whole is None else im.arithmetic("sub", [x, whole], out)


FUNCTIONS: dict[str, Row] = {
    "expm1.default": single(exponential_less_one),
    "log1p.default": single(_logarithm_beyond_one),
    "mish.default": single(_mish),
    "asin.default": single(_arc_sine),
    "acos.default": single(_arc_cosine),
    "atan.default": single(_arc_tangent),
    "elu.default": _exponential_linear,
    "leaky_relu.default": _leaky,
    "isnan.default": _is_nan,
    "trunc.default": _truncated,
    "frac.default": _fraction,
}
"""Name and overload -> row."""
