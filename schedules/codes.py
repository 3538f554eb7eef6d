"""Ways to decode a weight type: arithmetic on codes, or a table of values in shared memory.

Conversions of narrow floats for which AMD GPUs have an instruction, and the order of bits that it reads.

Semantics: AMD Instinct CDNA4 ISA, "VOP3 Instructions" (V_CVT_SCALEF32_PK_F16_FP4 and others): two codes that
lie side by side become two lanes, times the power of two that is the exponent of a float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

from ladder.ir.gemm import Gemm
from schedules.layouts import NIBBLE, lane_of
from targets import TileDevice
from tile_types import TType, get_type
from tile_types.forms import MOST_BITS, affine_forms, is_arithmetic, wirings
from tile_types.held import held

CONVERTED_TO = ("float16", "bfloat16")
"""Types that the instructions make."""


@dataclass(frozen=True)
class PairConversion:
    """Instructions that convert two codes of a type.

    feature: What the device must have.
    order: Order of packed bits in which both codes of a register lie side by side (`schedules.layouts`).
    """

    feature: str
    order: str


CONVERSIONS: Mapping[str, PairConversion] = {
    "fp4_e2m1": PairConversion("cvt.scalef32", "pairs"),
    "fp8_e4m3": PairConversion("cvt.scalef32", "halves"),
    "fp8_e5m2": PairConversion("cvt.scalef32", "halves"),
}
"""Type whose codes are read -> the instructions; types of other names with the same values are read too."""

CONVERT_OPERATIONS = 0.5
"""Vector instructions per weight."""

EXPONENT_OPERATIONS = 0.25
"""The same that make float32 scales of exponents: two for each four registers."""


def converted_as(ttype: TType, core: str, device: TileDevice) -> str | None:
    """Return the type as whose codes a device converts a type's to ``core``; None if it cannot."""
    if core not in CONVERTED_TO:
        return None
    known = (name for name, row in CONVERSIONS.items() if row.feature in device.features)
    return next((name for name in known if _same(ttype, name)), None)


def _same(ttype: TType, name: str) -> bool:
    """Tell whether the codes of two types have the same values."""
    return ttype.elem_bits == get_type(name).elem_bits and _values(ttype) == _known_values(name)


def _values(ttype: TType) -> bytes:
    return ttype.valid_codes().tobytes() + ttype.probe_values().tobytes()


@lru_cache(maxsize=len(CONVERSIONS))
def _known_values(name: str) -> bytes:
    return _values(get_type(name))


def order_read(ttype: TType, core: str, device: TileDevice) -> str:
    """Return the order of packed bits that a device's own conversions read; empty if there are none."""
    name = converted_as(ttype, core, device)
    return CONVERSIONS[name].order if name is not None else ""


TABLE_ROW = 128
"""Bytes of an entry of a decode table: a word for each lane of a warp."""

FLOAT_OPERANDS = ("float16", "bfloat16", "fp8_e4m3", "fp8_e5m2")

EMULATED = ((9, 0),)
"""Compute capabilities whose fp8 ``mma`` ptxas composes of float16 ones (seen in its machine code)."""

TIMED_TO_FP8 = ("int4",)
"""Weights whose products by fp8 were timed in tiles of other than powers of two activation rows."""

FP8_SLAB = 128
"""Elements of K of a slab of fp8 operands: groups of whole slabs were timed, scaled once a slab."""

LARGEST_GAIN = 2.0**24
"""Raw operands must not be so small that products with x leave float32's normal numbers."""


@cache
def held_type(weight: str) -> TType:
    """Return the element type as whose codes kernels of GPUs hold a weight's values."""
    return held(get_type(weight).element_type).ttype


@cache
def is_renumbered(weight: str) -> bool:
    """Whether packing for GPUs replaces the codes of a weight (`tile_types.held`)."""
    return held(get_type(weight).element_type).table is not None


@cache
def _bits(weight: str) -> int:
    return get_type(weight).elem_bits


def weight_bits(gemm: Gemm) -> int:
    """Return the bits of one weight code."""
    return _bits(gemm.weight)


def decodes_to_floats(gemm: Gemm) -> bool:
    """Whether weight codes are decoded to 16-bit floats or to fp8: narrower than what is multiplied."""
    return gemm.activation in FLOAT_OPERANDS and weight_bits(gemm) < lane_of(gemm.activation)


def is_timed_by_sixteens(gemm: Gemm) -> bool:
    """Whether wgmma was timed in tiles of any multiple of sixteen activation rows for codes of this kind."""
    to_fp8 = gemm.weight in TIMED_TO_FP8 and gemm.group_size % FP8_SLAB == 0
    return decodes_to_floats(gemm) and (lane_of(gemm.activation) == 16 or to_fp8)


def takes_sixteens(gemm: Gemm) -> bool:
    """Whether wgmma's tiles of any multiple of sixteen activation rows compete: also plain fp8's."""
    plain = gemm.weight in FLOAT_OPERANDS and lane_of(gemm.activation) == 8 and gemm.group_size >= gemm.k
    return is_timed_by_sixteens(gemm) or (plain and gemm.activation != "int8" and not gemm.token_group)


@cache
def evenly_spaced(weight: str) -> bool:
    """Whether values are whole multiples of a step, ascending with codes whose top bit may be flipped."""
    element = held_type(weight)
    if not element.exact or element.elem_bits > 8:
        return False
    return any((form.offset / form.factor).is_integer() for form in affine_forms(element))


@cache
def looked_up(weight: str, activation: str) -> bool:
    """Whether codes become operands through a table in shared memory: neither by arithmetic nor by bytes.

    Up to two bits, or four where operands are bytes, have values enough in a register to select from.
    """
    element = held_type(weight)
    arithmetic = any(True for _ in affine_forms(element)) if activation == "int8" else is_arithmetic(element)
    few = 2 if lane_of(activation) == 16 else NIBBLE
    return few < element.elem_bits <= MOST_BITS and not arithmetic


@cache
def raw_needs_gain(weight: str, activation: str) -> bool:
    """Whether codes in the places of a 16-bit float are too small to be multiplied with x as they are.

    Then a kernel whose scales multiply sums must multiply every operand all the same.
    """
    found = wirings(held_type(weight), activation)
    return bool(found) and min(abs(wiring.gain) for wiring in found) > LARGEST_GAIN


def table_bytes(gemm: Gemm) -> int:
    """Return the bytes of the smallest decode table: all values, of 3 or 4 bits all pairs of them."""
    if not looked_up(gemm.weight, gemm.activation):
        return 0
    bits = weight_bits(gemm)
    return TABLE_ROW << (bits + NIBBLE if bits <= NIBBLE else bits)
