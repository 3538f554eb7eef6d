"""Registers of accumulator fragments."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b

Expr = Any
Shape = tuple[int, int]

DEPTH = 16
"""Elements along K of one matrix instruction."""


def hold(value: Expr) -> Expr:
    """Compute a float32 once, into a register."""
    return b.Variable("float32", value).value


def zeros(count: int, value: float = 0.0) -> Any:
    """Return float32 registers that all hold a number."""
    registers = b.local(count, "float32")
    for i in range(count):
        b.store(registers, T.float32(value), i)
    return registers
