"""Types of a chain's elements, in memory and in registers."""

from __future__ import annotations

from ladder.partition.elements import ELEMENTS, FLOATS8
from tile_types.errors import DTypeError

COMPUTED = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32"}
"""Types that are computed with in another."""

HALVES = ("float16", "bfloat16")


def stored_type(name: str) -> str:
    """Return TIR's dtype of a type in memory, floats of 8 bits by their codes; raises DTypeError."""
    if name not in ELEMENTS:
        raise DTypeError(f"chains of memory-bound operators have no {name}")
    return "uint8" if name in FLOATS8 else name


def computed_type(name: str) -> str:
    """Return TIR's dtype of a type in registers."""
    stored = stored_type(name)
    return COMPUTED.get(stored, stored)
