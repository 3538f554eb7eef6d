"""Vectorizable forms of float32 functions on CPUs: the C library would be called lane by lane."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.lower.chain.llvm_functions import power_of_two

Expr = Any

LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts: products of the first with small whole numbers are exact (Cephes, expf.c)."""

COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""Of ``(exp(r) - 1 - r) / r**2`` for |r| <= ln 2 / 2, highest first (Cephes, expf.c)."""

LEAST, MOST = -104.0, 88.72283
"""Where the exponential of a float32 is 0, and where it overflows."""


def exp(x: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Return the exponential within 2^-22: a polynomial, and a power of two made of its bits in two steps.

    bind: Names what is used more than once.
    """
    if not str(x.ty.dtype).startswith("float32"):
        return scalars.exp(x)
    x = bind(x)
    bounded = bind(tirx.max(tirx.min(x, T.float32(MOST)), T.float32(LEAST)))
    whole = bind(T.floor(bounded * T.float32(LOG2_E) + T.float32(0.5)))
    rest = bind(bounded - whole * T.float32(LN2_HIGH) - whole * T.float32(LN2_LOW))
    series: Expr = T.float32(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        series = series * rest + T.float32(coefficient)
    near = series * rest * rest + rest + T.float32(1)
    power = bind(T.Cast("int32", whole))
    half = bind(power >> T.int32(1))
    # Masked scores are far below: processors take long over a product that underflows, and none over 0.
    least = tirx.Select(scalars.less(x, T.float32(LEAST)), T.float32(0), power_of_two(power - half))
    found = bind(near * power_of_two(half) * least)
    overflown = tirx.Select(scalars.less(T.float32(MOST), x), T.float32(float("inf")), found)
    return tirx.Select(scalars.equal(x, x), overflown, x)
