"""Types of a chain's elements, in memory and in registers."""

from __future__ import annotations

from ladder.partition.chains import ELEMENTS
from tile_types.errors import DTypeError

COMPUTED = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32"}
"""Types that are computed with in another."""

HALVES = ("float16", "bfloat16")


def stored_type(name: str) -> str:
    """Return TIR's dtype of a type in memory; raises DTypeError."""
    if name not in ELEMENTS:
        raise DTypeError(f"chains of memory-bound operators have no {name}")
    return name


def computed_type(name: str) -> str:
    """Return TIR's dtype of a type in registers."""
    return COMPUTED.get(name, stored_type(name))
