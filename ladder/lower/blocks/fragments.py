"""Registers of accumulator fragments: packing, reciprocals, and the faster forms of functions."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.functions import LOG2_E, exponential, special

Expr = Any
Shape = tuple[int, int]

FRAGMENT_ROWS, FRAGMENT_COLUMNS, DEPTH = 16, 8, 16
"""Rows and columns of an accumulator fragment, and elements along K of one matrix instruction."""

PACK = """
static __device__ __forceinline__ unsigned int ladder_pack_{name}(float low, float high) {{
  unsigned int packed;
  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}}
"""
PACKED = {"float16": "f16x2", "bfloat16": "bf16x2"}


def sigmoid(x: Expr) -> Expr:
    """Return ``1 / (1 + exp(-x))``; an overflowing exponential gives the correct 0."""
    return special("reciprocal", T.float32(1) + special("power_of_two", x * T.float32(-LOG2_E)))


def silu(x: Expr) -> Expr:
    """Return ``x / (1 + exp(-x))``."""
    return x * sigmoid(x)


FAST = {"exp": exponential, "sigmoid": sigmoid, "silu": silu}
"""Operators that are computed otherwise than the operator table says, within 2^-21."""


def hold(value: Expr) -> Expr:
    """Compute a float32 once, into a register."""
    return b.Variable("float32", value).value


def pack(low: Expr, high: Expr, dtype: str) -> Expr:
    """Return two floats rounded to 16 bits in one uint32 register."""
    source = PACK.format(name=dtype, ptx=PACKED[dtype])
    return b.Variable("uint32", b.call_inline(f"ladder_pack_{dtype}", source, "uint32", low, high)).value


def unpack(word: Expr, dtype: str) -> list[Expr]:
    """Return the two halves of a register as float32."""
    halves = (T.Cast("uint16", word & T.uint32(0xFFFF)), T.Cast("uint16", word >> T.uint32(16)))
    return [T.Cast("float32", T.reinterpret(half, dtype=dtype)) for half in halves]


def inverse(x: Expr) -> Expr:
    """Return the reciprocal, in a register."""
    return hold(special("reciprocal", x))


def inverse_pairs(elements: list[Expr], shape: Shape) -> list[Expr]:
    """Return the reciprocals of a fragment; of one row, its halves are the same."""
    if shape[0] == 1 and len(elements) == 4:
        return [inverse(x) for x in elements[:2]] * 2
    return [inverse(x) for x in elements]


def zeros(count: int, value: float = 0.0) -> Any:
    """Return float32 registers that all hold a number."""
    registers = b.local(count, "float32")
    for i in range(count):
        b.store(registers, T.float32(value), i)
    return registers
