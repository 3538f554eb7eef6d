"""Conversions of narrow floats for which AMD GPUs have an instruction, and the order of bits that it reads.

Semantics: AMD Instinct CDNA4 ISA, "VOP3 Instructions" (V_CVT_SCALEF32_PK_F16_FP4 and others): two codes that
lie side by side become two lanes, times the power of two that is the exponent of a float32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from targets import TileDevice
from tile_types import TType, get_type

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
