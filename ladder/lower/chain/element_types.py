"""Types of a chain's elements, in memory and in registers."""

from __future__ import annotations

from ladder.partition.elements import ELEMENTS, FLOATS8
from tile_types.errors import DTypeError

HALVES = ("float16", "bfloat16")

INTEGERS8 = ("int8", "uint8")

INTEGERS16 = ("int16", "uint16")

NARROW = (*INTEGERS8, *INTEGERS16)

COMPUTED = {**dict.fromkeys(HALVES, "float32"), **dict.fromkeys(NARROW, "int32")}
"""Types that are computed with in another."""


def stored_type(name: str) -> str:
    """Return TIR's dtype of a type in memory, floats of 8 bits by their codes; raises DTypeError."""
    if name not in ELEMENTS:
        raise DTypeError(f"chains of memory-bound operators have no {name}")
    return "uint8" if name in FLOATS8 else name


def computed_type(name: str) -> str:
    """Return TIR's dtype of a type in registers."""
    stored = stored_type(name)
    return COMPUTED.get(stored, stored)
