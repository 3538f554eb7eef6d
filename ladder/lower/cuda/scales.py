"""Scales and zero points as operands: one value repeated in every lane of a register."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

Expr = Any


def pair16(value: Expr) -> Expr:
    """Return the bits of a float16 or bfloat16 value in both halves of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint16"))
    return bits * T.uint32(0x00010001)


def bytes4(value: Expr) -> Expr:
    """Return the bits of an int8 value in all four bytes of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint8"))
    return bits * T.uint32(0x01010101)
