"""Instructions of the special function unit: approximate, within an error that rounding to 16 bits hides."""

from __future__ import annotations

from typing import Any

from ladder.lower import builder as b

Expr = Any

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
