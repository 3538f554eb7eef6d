"""Types of a chain's elements, in memory and in registers."""

from __future__ import annotations

from tile_types.errors import DTypeError

STORED = {
    **{
        name: name
        for name in ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
    },
    "bool": "bool",
}
"""Type -> TIR's dtype in memory."""

COMPUTED = {"float16": "float32", "bfloat16": "float32", "int8": "int32", "uint8": "int32"}
"""Types that are computed with in another."""

HALVES = ("float16", "bfloat16")


def stored_type(name: str) -> str:
    """Return TIR's dtype of a type in memory; raises DTypeError."""
    if name not in STORED:
        raise DTypeError(f"chains of memory-bound operators have no {name}")
    return STORED[name]


def computed_type(name: str) -> str:
    """Return TIR's dtype of a type in registers."""
    return COMPUTED.get(name, stored_type(name))
