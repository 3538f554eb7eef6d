"""Functions as instructions of the special function unit, where results are rounded to 16 bits anyway.

And those in which chains keep to what torch computes: products that are rounded, extremes that keep NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import partial

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.lower import Expr
from ladder.lower import builder as b

LOG2_E = 1.4426950408889634

FAR = 2.0**100
"""Within which, and its inverse, numbers have reciprocals that are normal float32."""

HELPER = """
__forceinline__ __device__ float ladder_{name}(float x) {{
  float result;
  asm("{instruction} %0, %1;" : "=f"(result) : "f"(x));
  return result;
}}
"""
INSTRUCTIONS = {
    "reciprocal": "rcp.approx.ftz.f32",
    "whole_reciprocal": "rcp.approx.f32",
    "power_of_two": "ex2.approx.ftz.f32",
    "whole_power_of_two": "ex2.approx.f32",
    "logarithm_of_two": "lg2.approx.f32",
}
"""Helper -> its one instruction; with ``ftz``, what is too small for a normal float32 becomes 0."""

PAIR = """
__forceinline__ __device__ float ladder_{name}(float x, float y) {{
  float result;
  asm("{instruction} %0, %1, %2;" : "=f"(result) : "f"(x), "f"(y));
  return result;
}}
"""
PAIRS = {"quotient": "div.full.f32", "maximum": "max.NaN.f32", "minimum": "min.NaN.f32"}
"""Helper of two float32 -> its instruction."""

PRODUCT = """
__forceinline__ __device__ float ladder_product(float x, float y) { return __fmul_rn(x, y); }
"""


BY_INVERSE = """
__forceinline__ __device__ float ladder_by_inverse(float x, float divisor, float inverse) {
  float near = __fmul_rn(x, inverse);
  float found = __fmaf_rn(__fmaf_rn(-near, divisor, x), inverse, near);
  return found != found ? near : found;
}
"""
"""What is left of infinities and zeros is no number."""


LOG_OF_SUM = """
__noinline__ __device__ float ladder_log_of_sum(float x, float y) {
  float apart = x == y ? 0.0f : fabsf(x - y);
  return fmaxf(x, y) + log1pf(expf(-apart));
}
"""
"""A function of its own: scans unroll dozens of them, and code that long is slower to fetch than to run."""


LARGEST = {
    "int32": """
__forceinline__ __device__ int ladder_largest_int32(int x) {
  int result;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(x));
  return result;
}
""",
    "float32": """
__forceinline__ __device__ float ladder_largest_float32(float x) {
  int key = __float_as_int(x), result;
  key ^= key >> 31 & 0x7fffffff;
  asm volatile("redux.sync.max.s32 %0, %1, 0xffffffff;" : "=r"(result) : "r"(key));
  return __int_as_float(result ^ (result >> 31 & 0x7fffffff));
}
""",
}
"""Type -> the largest of a warp's numbers: floats as integers in the same order. A NaN has to be that of
``max.NaN``, which is above all numbers there (PTX ISA, redux.sync)."""

PACK = """
static __device__ __forceinline__ unsigned int ladder_pack_{name}(float low, float high) {{
  unsigned int packed;
  asm("cvt.rn.{ptx}.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}}
"""
PACKED = {"float16": "f16x2", "bfloat16": "bf16x2"}
"""Type -> PTX's name of two of them in a register."""


def special(name: str, x: Expr) -> Expr:
    """Return one of `INSTRUCTIONS` of a float32."""
    source = HELPER.format(name=name, instruction=INSTRUCTIONS[name])
    return b.call_inline(f"ladder_{name}", source, "float32", x)


def largest(value: Expr, dtype: str) -> Expr | None:
    """Return the largest of the 32 values of a warp, on all of its lanes; None if no instruction finds it."""
    source = LARGEST.get(dtype)
    return None if source is None else b.call_inline(f"ladder_largest_{dtype}", source, dtype, value)


def exponential(x: Expr) -> Expr:
    """Return a power of two: one instruction of the special function unit and one product.

    Results that are subnormal are 0: for terms of sums in which others are 1.
    """
    return special("power_of_two", x * T.float32(LOG2_E)) if str(x.ty.dtype) == "float32" else T.exp(x)


def rounded_pair(low: Expr, high: Expr, dtype: str) -> Expr:
    """Return two floats rounded to 16 bits in one word."""
    source = PACK.format(name=dtype, ptx=PACKED[dtype])
    return b.call_inline(f"ladder_pack_{dtype}", source, "uint32", low, high)


def pack(low: Expr, high: Expr, dtype: str) -> Expr:
    """Return the same in a register."""
    return b.Variable("uint32", rounded_pair(low, high, dtype)).value


def pair(name: str, x: Expr, y: Expr) -> Expr:
    """Return one of `PAIRS` of two float32."""
    source = PAIR.format(name=name, instruction=PAIRS[name])
    return b.call_inline(f"ladder_{name}", source, "float32", x, y)


def _of_singles(name: str, otherwise: Callable[[Expr, Expr], Expr]) -> Callable[[Expr, Expr], Expr]:
    return lambda x, y: pair(name, x, y) if str(x.ty.dtype) == "float32" else otherwise(x, y)


def _whole_exponential(x: Expr) -> Expr:
    if str(x.ty.dtype) != "float32":
        return T.exp(x)
    return special("whole_power_of_two", x * T.float32(LOG2_E))


def _quotient(x: Expr, y: Expr) -> Expr:
    """Return a quotient; of a divisor that is known and far from the ends of the range, a product."""
    if str(x.ty.dtype) != "float32":
        return tirx.div(x, y)
    divisor = scalars.known(y)
    if divisor is not None and 1 / FAR <= abs(divisor) <= FAR:
        return product(x, T.float32(1 / divisor))
    return pair("quotient", x, y)


def _quotient_ftz(x: Expr, y: Expr) -> Expr:
    if str(x.ty.dtype) != "float32":
        return tirx.div(x, y)
    inverse = special("reciprocal", y)
    return inverse if scalars.known(x) == 1.0 else product(x, inverse)


NEAR_ONE = 2.0**-5
"""Distance from 1 below which a logarithm is a series: beyond, the instruction's error is 2^-18 of it."""


def _log_beyond_one(x: Expr) -> Expr:
    """Return ``log(1 + x)``."""
    if str(x.ty.dtype) != "float32":
        return T.log(T.float64(1) + x)
    return _logarithm_of(x, scalars.opaque(x + T.float32(1)))


def _logarithm(x: Expr) -> Expr:
    return _logarithm_of(scalars.opaque(x - T.float32(1)), x) if str(x.ty.dtype) == "float32" else T.log(x)


def _logarithm_of(less_one: Expr, x: Expr) -> Expr:
    """Return the logarithm of a number, which is also given without the 1 in it."""
    less_one = scalars.kept(less_one)
    series = T.float32(-1 / 4)
    for coefficient in (1 / 3, -1 / 2, 1.0):
        series = scalars.fused(series, less_one, T.float32(coefficient))
    far = special("logarithm_of_two", x) * T.float32(math.log(2))
    near = scalars.less(scalars.absolute(less_one), T.float32(NEAR_ONE))
    return scalars.chosen(near, less_one * series, far)


CHEAP: Mapping[str, Callable[..., Expr]] = {
    "exp": _whole_exponential,
    "exp_ftz": exponential,
    "div": _quotient,
    "div_ftz": _quotient_ftz,
    "rsqrt": T.rsqrt,
    "log": _logarithm,
    "log1p": _log_beyond_one,
}
"""Approximations of operators whose every result is rounded to 16 bits: within 2^-22 on the whole range,
logarithms within 2^-17."""


def product(x: Expr, y: Expr) -> Expr:
    """Return a product that is rounded before anything is added to it."""
    if str(x.ty.dtype) != "float32":
        return MULTIPLY(x, y)
    return b.call_inline("ladder_product", PRODUCT, "float32", x, y)


ADD, SUBTRACT, MULTIPLY = map(scalars.unsigned, (operator.add, operator.sub, operator.mul))
"""Of integers, which wrap around; of floats as the operator table has them."""


def by_inverse(x: Expr, divisor: Expr, inverse: Expr) -> Expr:
    """Return ``x / divisor`` of float32, given the reciprocal of the divisor, rounded to nearest even."""
    return b.call_inline("ladder_by_inverse", BY_INVERSE, "float32", x, divisor, inverse)


def by_near_inverse(x: Expr, divisor: Expr) -> Expr:
    """Return ``x / divisor`` of float32, of a divisor from 1 on, by an approximate reciprocal."""
    divisor = scalars.kept(divisor)
    return by_inverse(x, divisor, special("whole_reciprocal", divisor))


def _log_of_sum(x: Expr, y: Expr) -> Expr:
    return b.call_inline("ladder_log_of_sum", LOG_OF_SUM, "float32", x, y)


def _negative(x: Expr) -> Expr:
    return scalars.negate(x) if scalars.is_float(x) else SUBTRACT(tirx.const(0, str(x.ty.dtype)), x)


def _magnitude(x: Expr) -> Expr:
    if scalars.is_float(x):
        return scalars.absolute(x)
    return scalars.chosen(scalars.less(x, tirx.const(0, str(x.ty.dtype))), _negative(x), x)


FUNCTIONS: Mapping[str, Callable[..., Expr]] = {
    "add": ADD,
    "sub": SUBTRACT,
    "neg": _negative,
    "abs": _magnitude,
    "mul": product,
    "square": partial(scalars.square, product=product),
    "erf": T.erf,
    "rsqrt": T.rsqrt,
    "maximum": _of_singles("maximum", scalars.maximum),
    "minimum": _of_singles("minimum", scalars.minimum),
    "logaddexp": _log_of_sum,
    "fmod": tirx.fmod,
}
"""Operators in which chains keep to what torch computes."""
