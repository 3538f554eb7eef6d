"""Relative errors of products that rounding explains."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.ir.gemm import Gemm

BOUNDS: Mapping[str, float] = {
    "float16": 5e-4,
    "bfloat16": 3e-3,
    "float32": 1e-5,
    "fp8_e4m3": 2e-3,
    "fp8_e5m2": 2e-3,
    "fp8_e4m3fnuz": 2e-3,
    "fp8_e5m2fnuz": 2e-3,
    "int8": 1e-5,
}
"""Relative Frobenius error that rounding to this type explains, be it an operand's or the result's.

Unit roundoff is 2^-11 for float16 and 2^-8 for bfloat16, spread evenly below; products of int8 are
exact and only float32 sums of groups round; fp8 products round in the core's accumulator.
"""

ROUNDOFF: Mapping[str, float] = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Unit roundoff of the types in which weights are decoded, less their zero points, and scaled.

The root mean square of one rounding is at most ``roundoff / sqrt(3)``, where all numbers lie just above
powers of two. A weight less its zero point, that times its scale, and the result: three make up the roundoff.
"""


def largest_error(gemm: Gemm) -> float:
    """Return the largest relative Frobenius error, against float64, that a right kernel of a product has.

    Without zero points codes are exact in the activation's type, so that weights round once.
    """
    bound = max(BOUNDS[gemm.activation], BOUNDS[gemm.output])
    return bound if gemm.zero == "none" else max(bound, ROUNDOFF.get(gemm.activation, 0.0))
