"""Floating-point arithmetic of vector instructions, on arrays of lanes.

Semantics: AMD Instinct MI300 ISA, section 16.6 to 16.9. Subnormal float32 and float16 numbers are kept, as
kernels are compiled; V_EXP, V_RCP, V_RSQ and V_SQRT read and write them as zeros. Those four are rounded
here once, on hardware to one unit in the last place.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ladder.simulate.amd.arithmetic import flush, fma
from ladder.simulate.values import Array

Function = Callable[..., Array]


def flushed_sum(a: Array, b: Array, c: Array) -> Array:
    """V_MAD_F32 and V_MAC_F32: a product and a sum, each rounded, of no subnormal numbers."""
    return flush(flush(flush(a) * flush(b)) + flush(c))


def exponent(x: Array) -> Array:
    """Return the biased exponent of float32."""
    return (np.asarray(x).view(np.uint32) >> np.uint32(23) & np.uint32(0xFF)).astype(np.int64)


def subnormal(x: Array) -> Array:
    """Tell which float32 are subnormal."""
    found: Array = (exponent(x) == 0) & (x != 0)
    return found


def div_scale(scaled: Array, denominator: Array, numerator: Array) -> tuple[Array, Array]:
    """V_DIV_SCALE_F32: scale an operand of a division so that few steps leave float32's range.

    The manual's case of an inverse that is subnormal in float64 is that of no float32.

    Returns: The operand, and whether V_DIV_FMAS is to scale back.
    """
    up, down = np.ldexp(scaled, 64), np.ldexp(scaled, -64)
    is_denominator = scaled.view(np.uint32) == denominator.view(np.uint32)
    ahead = exponent(numerator) - exponent(denominator)
    inverse, quotient = (np.float32(1) / denominator, numerator / denominator)
    none = np.zeros(np.broadcast_shapes(scaled.shape, ahead.shape), np.bool_)
    cases: list[tuple[Array, Array, Array]] = [
        ((numerator == 0) | (denominator == 0), np.asarray(np.nan, np.float32), none),
        (ahead >= 96, np.where(is_denominator, up, scaled), ~none),
        (subnormal(denominator), up, none),
        (subnormal(inverse), down, none),
        (subnormal(quotient), np.where(is_denominator, scaled, up), ~none),
        (exponent(numerator) <= 23, up, none),
    ]
    where = [np.broadcast_to(case, none.shape) for case, _, _ in cases]
    value = np.select(where, [np.broadcast_to(case, none.shape) for _, case, _ in cases], scaled)
    return value.astype(np.float32), np.select(where, [flag for _, _, flag in cases], none)


def div_fmas(a: Array, b: Array, c: Array, scaled: Array) -> Array:
    """V_DIV_FMAS_F32: a multiply-add, scaled back where V_DIV_SCALE said so."""
    plain = fma(a, b, c)
    back = np.where(exponent(c) > 127, np.ldexp(plain, 64), np.ldexp(plain, -64))
    found: Array = np.where(scaled, back, plain).astype(np.float32)
    return found


def div_fixup(quotient: Array, denominator: Array, numerator: Array) -> Array:
    """V_DIV_FIXUP_F32, _F16: the quotient with its sign, and the special cases of division.

    Steps of a quotient beyond the type give NaN, which hardware makes infinite (the manual does not say so).
    """
    ordinary = np.isfinite(denominator) & np.isfinite(numerator) & (denominator != 0) & (numerator != 0)
    sign = np.copysign(np.float32(1), numerator) * np.copysign(np.float32(1), denominator)
    whole = np.where(np.isnan(quotient), np.float32(np.inf), quotient)
    found: Array = np.where(ordinary, np.copysign(whole, sign), numerator / denominator)
    return found.astype(quotient.dtype)


def to_integer(dtype: type[np.signedinteger | np.unsignedinteger]) -> Function:
    """Return the conversion of float32 to integers: towards zero, saturating, NaN to 0."""
    limits = np.iinfo(dtype)

    def convert(x: Array) -> Array:
        wide = np.nan_to_num(np.trunc(x.astype(np.float64)), nan=0.0, posinf=2.0**40, neginf=-(2.0**40))
        found: Array = np.clip(wide, limits.min, limits.max).astype(np.int64).astype(dtype)
        return found

    return convert


def product_or_zero(a: Array, b: Array) -> Array:
    """V_MUL_LEGACY_F32: a product that is 0 where a factor is, whatever the other."""
    found: Array = np.where((a == 0) | (b == 0), np.float32(0), a * b)
    return found


def larger(a: Array, b: Array) -> Array:
    """V_MAX: the number where one operand is NaN."""
    return np.fmax(a, b)


def smaller(a: Array, b: Array) -> Array:
    """V_MIN: the number where one operand is NaN."""
    return np.fmin(a, b)


def median(a: Array, b: Array, c: Array) -> Array:
    """V_MED3."""
    return larger(smaller(a, b), smaller(larger(a, b), c))


def _is_quiet(x: Array) -> Array:
    """Tell whether the first bit of the mantissa is set, which makes a NaN quiet."""
    kind = np.finfo(x.dtype)
    found: Array = (x.view(f"u{x.dtype.itemsize}") >> (kind.nmant - 1) & 1) == 1
    return found


def _is_normal(x: Array) -> Array:
    found: Array = np.isfinite(x) & (np.abs(x) >= np.finfo(x.dtype).smallest_normal)
    return found


CLASSES: tuple[Callable[[Array], Array], ...] = (
    lambda x: np.isnan(x) & ~_is_quiet(x),
    lambda x: np.isnan(x) & _is_quiet(x),
    np.isneginf,
    lambda x: _is_normal(x) & (x < 0),
    lambda x: np.isfinite(x) & ~_is_normal(x) & (x < 0),
    lambda x: (x == 0) & np.signbit(x),
    lambda x: (x == 0) & ~np.signbit(x),
    lambda x: np.isfinite(x) & ~_is_normal(x) & (x > 0),
    lambda x: _is_normal(x) & (x > 0),
    np.isposinf,
)
"""Tests of V_CMP_CLASS, one for each bit of its mask."""


def is_class(x: Array, mask: Array) -> Array:
    """V_CMP_CLASS_F32 and _F16."""
    found = np.zeros(np.broadcast_shapes(x.shape, mask.shape), np.bool_)
    for bit, test in enumerate(CLASSES):
        found |= test(x) & (mask >> np.uint32(bit) & np.uint32(1)).astype(np.bool_)
    return found
