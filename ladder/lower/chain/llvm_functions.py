"""Floats in LLVM, for CPUs and AMD GPUs: products are rounded, extremes keep NaN, bfloat16 is its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.lower import Expr


def product(a: Expr, b: Expr) -> Expr:
    """Return a product that no sum takes in: code generation would fuse them into one rounding."""
    found = scalars.multiply(a, b)
    return _intrinsic("llvm.arithmetic.fence", found) if scalars.is_float(a) else found


def _intrinsic(name: str, *operands: Expr) -> Expr:
    return T.call_llvm_pure_intrin(str(operands[0].ty.dtype), name, *operands)


def nearest(x: Expr) -> Expr:
    """Return the nearest whole number, the even one of two; TVM's own operator is none of vectors."""
    return _intrinsic("llvm.rint", x)


def power_of_two(whole: Expr) -> Expr:
    """Return a normal power of two, made of its bits."""
    return T.reinterpret("float32", (whole + T.int32(127)) << T.int32(23))


def _extreme(operator: str) -> Callable[[Expr, Expr], Expr]:
    """Return comparisons, which name operands several times; else an intrinsic, of which more code comes."""
    compared: Callable[[Expr, Expr], Expr] = getattr(scalars, operator)

    def extreme(a: Expr, b: Expr) -> Expr:
        short = scalars.names_values() or not scalars.is_float(a)
        return compared(a, b) if short else _intrinsic(f"llvm.{operator}", a, b)

    return extreme


LLVM_FUNCTIONS: Mapping[str, Callable[..., Expr]] = {
    "mul": product,
    "square": partial(scalars.square, product=product),
    "maximum": _extreme("maximum"),
    "minimum": _extreme("minimum"),
}
"""Operator -> how it is computed."""

QUIET = 0x00400000
"""The bit of a float32 that makes a NaN quiet."""


def bfloat16_bits(value: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Return float32 bits whose upper half is the nearest bfloat16, ties to even; NaN stays one.

    bind: Names what is used more than once.
    """
    value = bind(value)
    bits = T.reinterpret("uint32", value)
    odd = (bits >> T.uint32(16)) & T.uint32(1)
    nearest = bits + (odd + T.uint32(0x7FFF))
    return tirx.Select(scalars.equal(value, value), nearest, bits | T.uint32(QUIET))


def widened_bits(value: Expr) -> Expr | None:
    """Return the uint16 of which a float32 is the value, if it was a bfloat16 and nothing happened to it."""
    is_bits = getattr(getattr(value, "op", None), "name", "") == "tirx.reinterpret"
    shifted = value.args[0] if is_bits else None
    narrow = shifted.a if isinstance(shifted, tirx.LShift) else None
    if isinstance(narrow, tirx.Cast) and str(narrow.value.ty.dtype) == "uint16":
        return narrow.value
    return None


def bfloat16_of(value: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Return a float32 as the nearest bfloat16; one that was a bfloat16 keeps all of its bits."""
    bits = widened_bits(value)
    if bits is None:
        bits = T.Cast("uint16", bfloat16_bits(value, bind) >> T.uint32(16))
    return T.reinterpret("bfloat16", bits)


def through_bfloat16(value: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Return a float32 rounded to bfloat16."""
    return T.reinterpret("float32", bfloat16_bits(value, bind) & T.uint32(0xFFFF0000))


LOG2_E = 1.44269504088896341
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
"""ln 2 in two parts: products of the first with small whole numbers are exact (Cephes, expf.c)."""

COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""Of ``(exp(r) - 1 - r) / r**2`` for |r| <= ln 2 / 2, highest first (Cephes, expf.c)."""

EXP_ZERO, EXP_OVERFLOW = -104.0, 88.72283
"""Where the exponential of a float32 is 0, and where it overflows."""


def exp(x: Expr, bind: Callable[[Expr], Expr]) -> Expr:
    """Return the exponential within 2^-22: a polynomial, and a power of two made of its bits in two steps.

    bind: Names what is used more than once.
    """
    if not str(x.ty.dtype).startswith("float32"):
        return scalars.exp(x)
    x = bind(x)
    bounded = bind(tirx.max(tirx.min(x, T.float32(EXP_OVERFLOW)), T.float32(EXP_ZERO)))
    whole = bind(T.floor(bounded * T.float32(LOG2_E) + T.float32(0.5)))
    rest = bind(bounded - whole * T.float32(LN2_HIGH) - whole * T.float32(LN2_LOW))
    series: Expr = T.float32(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        series = series * rest + T.float32(coefficient)
    near = series * rest * rest + rest + T.float32(1)
    power = bind(T.Cast("int32", whole))
    half = bind(power >> T.int32(1))
    # Masked scores are far below: processors take long over a product that underflows, and none over 0.
    least = tirx.Select(scalars.less(x, T.float32(EXP_ZERO)), T.float32(0), power_of_two(power - half))
    found = bind(near * power_of_two(half) * least)
    overflown = tirx.Select(scalars.less(T.float32(EXP_OVERFLOW), x), T.float32(float("inf")), found)
    return tirx.Select(scalars.equal(x, x), overflown, x)
