"""Functions of float32 on AMD GPUs that LLVM makes too coarse.

V_SIN takes turns, whose rounding is an error of large angles, and LLVM's power is V_EXP of a product with
V_LOG: NaN of negative numbers, and far from right of large results.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.scalars import equal, kept, less, using
from ladder.lower import Expr
from ladder.lower.chain.llvm_functions import nearest, power_of_two
from ladder.lower.rocm import dialect as d

QUARTERS = 0.63661977236758134
"""Quarter turns of an angle of 1: 2 / pi."""

QUARTER = (1.57079637050628662109375, -4.37113900018624283e-8, -1.71512451e-15)
"""pi / 2 as the sum of three float32: enough digits to reduce angles that are not large."""

LARGE = 20
"""Exponent from which on an angle is large: `QUARTER` has too few digits to reduce it."""

TWO_OVER_PI = (0x028BE60D, 0xB9391054, 0xA7F09D5F, 0x47D4D377, 0x036D8A56, 0x64F10E41, 0x07F9458E)
"""2 / pi times 2^218 in words: 5 bits before the point, and those behind it that an angle may need."""

SINE = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
COSINE = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
"""Of ``(sin(r) - r) / r**3`` and ``(cos(r) - 1 + r**2 / 2) / r**4`` for |r| <= pi / 4 (Cephes, sinf.c)."""

ROOT_OF_HALF = 0x3F3504F3
"""Bits of the root of 1/2, the least mantissa that the logarithm's series is used for."""

LOGARITHM = (1 / 9, 1 / 7, 1 / 5, 1 / 3)
"""Of ``artanh(s) / s - 1`` in powers of s squared, for mantissas (1 + s) / (1 - s)."""

TWO_OVER_LN2 = (2.885390043258667, 3.851925481151738e-8)
"""2 / ln 2 in two float32."""

FAR = 200.0
"""A power of two beyond those of float32."""

INF = float("inf")

WHOLE = 2.0**24
"""From here on all float32 are even numbers."""


def _fma(a: Expr, b: Expr, c: Expr) -> Expr:
    return kept(d.intrinsic("float32", "llvm.fma", a, b, c))


def _if(condition: Expr, yes: Expr, no: Expr) -> Expr:
    yes, no = (T.float32(x) if isinstance(x, float) else x for x in (yes, no))
    return kept(tirx.Select(condition, yes, no))


def _series(coefficients: Sequence[float], x: Expr) -> Expr:
    found: Expr = T.float32(coefficients[0])
    for coefficient in coefficients[1:]:
        found = _fma(found, x, T.float32(coefficient))
    return found


def _turned(ahead: int, x: Expr) -> Expr:
    """Return the sine of an angle, so many quarter turns ahead, within 2^-22."""
    dtype = str(x.ty.dtype)
    x = kept(T.Cast("float32", x))
    quarters = kept(nearest(x * T.float32(QUARTERS)))
    rest = x
    for part in QUARTER:
        rest = _fma(quarters, T.float32(-part), rest)
    found = _sine(rest, _whole(quarters, T.fabs(quarters) < T.float32(WHOLE)) + T.int32(ahead))
    if dtype != "float16":  # whose numbers are all below
        size = kept(T.fabs(x))
        is_large = tirx.And(T.float32(2.0**LARGE) <= size, size < T.float32(INF))
        found = T.if_then_else(is_large, _large_sine(ahead, x), found)
    return T.Cast(dtype, found)


def _sine(rest: Expr, quadrant: Expr) -> Expr:
    """Return the sine of a reduced angle ``rest`` plus ``quadrant`` quarter turns."""
    square, quadrant = kept(rest * rest), kept(quadrant)
    sine = _fma(_series(SINE, square), square * rest, rest)
    cosine = _fma(_series(COSINE, square), square * square, _fma(square, T.float32(-0.5), T.float32(1)))
    found = _if((quadrant & T.int32(1)) != T.int32(0), cosine, sine)
    return _if((quadrant & T.int32(2)) != T.int32(0), -found, found)


def _large_sine(ahead: int, x: Expr) -> Expr:
    """Return the sine of a finite large angle, as one expression that other angles do not evaluate."""
    names: list[tuple[Any, Expr]] = []

    def name(value: Expr) -> Expr:
        names.append((tirx.Var(f"large_{len(names)}", str(value.ty.dtype)), value))
        return names[-1][0]

    with using({"keep": name}):
        bits = kept(T.reinterpret("uint32", x))
        high, low = _turns(bits)
        upper = T.Cast("float32", T.reinterpret("int32", high << T.uint32(2) | low >> T.uint32(30)))
        lower = T.Cast("float32", low << T.uint32(2))
        rest = _fma(lower, T.float32(QUARTER[0] * 2.0**-64), upper * T.float32(QUARTER[0] * 2.0**-32))
        quadrant = (high >> T.uint32(29)) + T.uint32(1) >> T.uint32(1)
        # sin(-x) = -sin(x), a half turn away; cos(-x) = cos(x)
        quadrant += T.uint32(ahead) if ahead else bits >> T.uint32(31) << T.uint32(1)
        found = _sine(rest, T.Cast("int32", quadrant))
    for variable, value in reversed(names):
        found = tirx.Let(variable, value, found)
    return found


def _turns(bits: Expr) -> tuple[Expr, Expr]:
    """Return the size of an angle in turns of 2^64, without whole ones, in two words (Payne and Hanek, 1983).

    Of 2 / pi only 96 bits matter: those before give whole turns, those behind less than the last bit. Nothing
    overflows: TVM promises LLVM that sums and products of unsigned numbers do not.
    """
    place = kept((bits >> T.uint32(23) & T.uint32(255)) - T.uint32(127 + LARGE))
    words = [T.uint32(word) for word in TWO_OVER_PI]
    for step in (2, 1):
        # A bit in all bits, not a condition: TVM takes seconds over choices nested in choices.
        sign = T.reinterpret("int32", place << T.uint32(27 - step)) >> T.int32(31)
        beyond = kept(T.reinterpret("uint32", sign))
        words = [kept(a ^ (a ^ b) & beyond) for a, b in zip(words, words[step:], strict=False)]
    turn = kept(place ^ T.uint32(31))
    window = (d.intrinsic("uint32", "llvm.fshr", a, b, turn) for a, b in pairwise(words))
    mantissa = kept(T.Cast("uint64", bits & T.uint32(0x7FFFFF) | T.uint32(1 << 23)))
    first, second, third = (T.Cast("uint64", word) * mantissa for word in window)
    low = kept(second + (third >> T.uint64(32)))
    return kept(T.Cast("uint32", first + (low >> T.uint64(32)))), kept(T.Cast("uint32", low))


sine, cosine = partial(_turned, 0), partial(_turned, 1)


def _whole(x: Expr, condition: Expr) -> Expr:
    """Return a whole number as int32 where the condition holds, else 0: LLVM has none of others."""
    return T.Cast("int32", _if(condition, x, 0.0))


def power(x: Expr, y: Expr) -> Expr:
    """Return ``x ** y`` within a few units in the last place, with C's results for special values."""
    dtype = str(x.ty.dtype)
    x, y = (kept(T.Cast("float32", value)) for value in (x, y))
    size, reach, inverse = kept(T.fabs(x)), kept(T.fabs(y)), less(y, T.float32(0))
    found = _exponential(y, *_logarithm(size))
    found = _if(size == T.float32(0), _if(inverse, INF, 0.0), found)
    found = _if(size == T.float32(INF), _if(inverse, 0.0, INF), found)
    found = _if(size == T.float32(1), 1.0, found)
    count = kept(_whole(y, reach < T.float32(WHOLE)))
    is_whole = tirx.Or(T.Cast("float32", count) == y, T.float32(WHOLE) <= reach)
    is_odd = tirx.And(is_whole, (count & T.int32(1)) != T.int32(0))
    found = _if(tirx.And(T.reinterpret("int32", x) < T.int32(0), is_odd), -found, found)
    is_real = tirx.Or(is_whole, tirx.Or(T.float32(0) <= x, size == T.float32(INF)))
    is_number = tirx.And(equal(x, x), equal(y, y))
    found = _if(tirx.And(is_number, is_real), found, float("nan"))
    is_one = tirx.Or(y == T.float32(0), x == T.float32(1))
    return T.Cast(dtype, _if(is_one, 1.0, found))


def _logarithm(size: Expr) -> tuple[Expr, Expr]:
    """Return the logarithm to base 2 of a positive number in two parts."""
    low = size < T.float32(2.0**-126)
    bits = kept(T.reinterpret("int32", size * _if(low, 2.0**24, 1.0)))
    exponent = kept((bits - T.int32(ROOT_OF_HALF)) >> T.int32(23))
    mantissa = kept(T.reinterpret("float32", bits - (exponent << T.int32(23))))
    above, both = kept(mantissa - T.float32(1)), kept(mantissa + T.float32(1))
    rest = kept(mantissa - kept(both - T.float32(1)))
    inverse = kept(d.intrinsic("float32", "llvm.amdgcn.rcp", both))
    ratio = kept(above * inverse)
    beyond = kept(_fma(-ratio, rest, _fma(-ratio, both, above)) * inverse)
    square = kept(ratio * ratio)
    beyond = _fma(ratio, kept(_series(LOGARITHM, square) * square), beyond)
    first, second = map(T.float32, TWO_OVER_LN2)
    high = kept(d.separate(ratio * first))
    low_part = _fma(beyond, first, _fma(ratio, second, _fma(ratio, first, -high)))
    whole = kept(T.Cast("float32", exponent) - _if(low, 24.0, 0.0))
    total = kept(whole + high)
    return total, kept(kept(high - kept(total - whole)) + low_part)


def _exponential(y: Expr, high: Expr, low: Expr) -> Expr:
    """Return 2 to the power of y times a number in two parts."""
    product = kept(d.separate(y * high))
    rest = _fma(y, low, _fma(y, high, -product))
    near = kept(T.fabs(product) < T.float32(FAR))
    bounded = _if(near, product, _if(product < T.float32(0), -FAR, FAR))
    whole = kept(nearest(bounded))
    part = kept(kept(bounded - whole) + _if(near, rest, 0.0))
    number = kept(T.Cast("int32", whole))
    half = kept(number >> T.int32(1))
    found = d.intrinsic("float32", "llvm.amdgcn.exp2", part)
    return kept(kept(found * power_of_two(half)) * power_of_two(number - half))
