"""Floats in LLVM, for CPUs and AMD GPUs: products are rounded, extremes keep NaN, bfloat16 is its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars

Expr = Any


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
    "square": lambda x: product(x, x),
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
