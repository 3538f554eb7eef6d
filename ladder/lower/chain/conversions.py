"""Conversions of a chain's elements in registers; floats of 8 bits by operations that every device has.

Source: OCP 8-bit Floating Point Specification (OFP8), section 5: e4m3 has no infinities.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.scalars import opaque, reinterpreted
from ladder.lower import Expr
from ladder.lower.chain.element_types import HALVES, NARROW, computed_type

MANTISSA, BIAS = 23, 127
"""Of float32."""


@dataclass(frozen=True)
class Float8:
    """A format.

    mantissa: Its bits.
    bias: Of the exponent.
    overflow: The code beyond the largest number.
    beyond: The least float32 that is rounded to it.
    nan: The code of what is no number.
    """

    mantissa: int
    bias: int
    overflow: int
    beyond: float
    nan: int = 0x7F


FORMATS = {"fp8_e4m3": Float8(3, 7, 0x7F, 464 + 2.0**-15), "fp8_e5m2": Float8(2, 15, 0x7C, 61440.0)}


def converted(
    source: Expr,
    read: str,
    kind: str,
    named: Callable[[Expr], Expr],
    rounded: Callable[[Expr, str], Expr] | None,
    encode: Callable[[Expr, str], Expr],
    decode: Callable[[Expr, str], Expr],
) -> Expr:
    """Return an element of type ``read`` as one of type ``kind``, both in the types they are computed in.

    Integers of 8 and 16 bits wrap around, as do floats on their way to them.

    named: Puts what is used several times into a register.
    rounded: Rounds to a 16-bit type what is to be exact; None: it is rounded where it is stored.
    encode, decode: As `encoded` and `decoded`.
    """
    wanted = computed_type(kind)
    if read in FORMATS and read != kind:
        source = decode(named(source), read)
    if kind in FORMATS and read != kind:
        wide = source if str(source.ty.dtype) == "float32" else T.Cast("float32", source)
        return encode(named(wide), kind)
    if kind in NARROW and str(source.ty.dtype) != "bool":
        return T.Cast(wanted, opaque(T.Cast(kind, opaque(T.Cast(wanted, source)))))
    found = source if str(source.ty.dtype) == wanted else T.Cast(wanted, source)
    return rounded(found, kind) if kind in HALVES and rounded else found


def round_through(value: Expr, kind: str) -> Expr:
    """Return a float32 rounded to a type that the device converts to and from."""
    return T.Cast("float32", opaque(T.Cast(kind, value)))


def encoded(value: Expr, name: str, within: bool = False) -> Expr:
    """Return the code of a float32, an int32: rounded to nearest even; beyond the largest infinity or NaN.

    within: Whether it is known to be NaN or no larger than the largest number of the type.
    """
    form = FORMATS[name]
    dropped = MANTISSA - form.mantissa
    bits = reinterpreted("uint32", value)
    size = bits & T.uint32(0x7FFFFFFF)
    # Below the least normal number, adding a power of two rounds to the place of the last bit.
    magic = T.float32(2.0 ** (MANTISSA + 1 - form.bias - form.mantissa))
    small = reinterpreted("uint32", T.reinterpret("float32", size) + magic) - reinterpreted("uint32", magic)
    rebias, half = (BIAS - form.bias) << MANTISSA, (1 << (dropped - 1)) - 1
    odd = (size >> T.uint32(dropped)) & T.uint32(1)
    normal = (size - T.uint32(rebias) + T.uint32(half) + odd) >> T.uint32(dropped)
    code = T.Select(size < T.uint32((BIAS + 1 - form.bias) << MANTISSA), small, normal)
    code = tirx.min(code, T.uint32(form.overflow))
    code = T.Select(size > T.uint32(0x7F800000), T.uint32(form.nan), code)
    return T.Cast("int32", code | ((bits >> T.uint32(24)) & T.uint32(0x80)))


def decoded(code: Expr, name: str) -> Expr:
    """Return the float32 that an int32 code stands for: exponents of float16 hold those of both formats."""
    form = FORMATS[name]
    bits = T.Cast("uint32", code)
    size = bits & T.uint32(0x7F)
    half = ((bits & T.uint32(0x80)) << T.uint32(8)) | (size << T.uint32(10 - form.mantissa))
    wide = T.Cast("float32", T.reinterpret("float16", T.Cast("uint16", half)))
    if form.overflow != form.nan:  # infinities and NaN are those of float16
        return wide
    scaled = wide * T.float32(2.0 ** (15 - form.bias))
    return T.Select(size == T.uint32(form.nan), T.reinterpret("float32", T.uint32(0x7FC00000)), scaled)
