"""Functions as instructions of the special function unit, where results are rounded to 16 bits anyway."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import builder as b

Expr = Any

LOG2_E = 1.4426950408889634

HELPER = """
__forceinline__ __device__ float ladder_{name}(float x) {{
  float result;
  asm("{instruction} %0, %1;" : "=f"(result) : "f"(x));
  return result;
}}
"""
INSTRUCTIONS = {"reciprocal": "rcp.approx.ftz.f32", "power_of_two": "ex2.approx.ftz.f32"}
"""Helper -> its one instruction; what is too small for a normal float32 becomes 0."""


def special(name: str, x: Expr) -> Expr:
    """Return one of `INSTRUCTIONS` of a float32."""
    source = HELPER.format(name=name, instruction=INSTRUCTIONS[name])
    return b.call_inline(f"ladder_{name}", source, "float32", x)


def exponential(x: Expr) -> Expr:
    """Return a power of two: one instruction of the special function unit and one product."""
    return special("power_of_two", x * T.float32(LOG2_E)) if str(x.ty.dtype) == "float32" else T.exp(x)


def quotient(x: Expr, y: Expr) -> Expr:
    """Return a product with a reciprocal, both within 2^-22."""
    return x * special("reciprocal", y) if str(y.ty.dtype) == "float32" else tirx.div(x, y)


CHEAP: Mapping[str, Callable[..., Expr]] = {"exp": exponential, "div": quotient, "rsqrt": T.rsqrt}
"""What operators become where every result is rounded to 16 bits: their errors vanish in that."""
