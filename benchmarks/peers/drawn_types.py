"""Types of the kinds that users invent, drawn once: no recipe, schedule or test names them."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

from ladder import TType, register_type
from tile_types import type_names


def posit_values(bits: int) -> list[float]:
    """Return the values of posits without exponent bits, by code; that of "not a real" becomes 0."""
    values = []
    for code in range(1 << bits):
        magnitude = code if code < 1 << (bits - 1) else (1 << bits) - code
        text = format(magnitude, f"0{bits}b")[1:]
        run = len(text) - len(text.lstrip(text[0]))
        regime = run - 1 if text[0] == "1" else -run
        rest = text[run + 1 :]
        fraction = int(rest, 2) / (1 << len(rest)) if rest else 0.0
        real = magnitude not in (0, 1 << (bits - 1))
        value = 2.0**regime * (1 + fraction) if real else 0.0
        values.append(-value if code >= 1 << (bits - 1) else value)
    return values


def random_values(bits: int, seed: int) -> list[float]:
    """Return sorted multiples of 1/64 in -2 to 2, each once."""
    return sorted(x / 64 for x in random.Random(seed).sample(range(-128, 129), 1 << bits))


def logarithms(bits: int) -> list[float]:
    """Return 0 and powers of two of both signs, whose number codes hold: 4, 2, 1, 1/2 ..."""
    half = [2.0 ** (2 - exponent) for exponent in range((1 << (bits - 1)) - 1)]
    return [0.0, *half, 0.0, *(-value for value in half)]


VALUES: dict[str, list[float]] = {
    "drawn_log5": logarithms(5),
    "drawn_posit6": posit_values(6),
    "drawn_table4": random_values(4, 20261126),
    "drawn_table3": random_values(3, 20261127),
    "drawn_table5": random_values(5, 20261128),
    "drawn_table6": random_values(6, 20261129),
    "drawn_posit7": posit_values(7),
    "drawn_table8": random_values(8, 20261130),
}
"""Name of a type -> its values by code; the width is the last digit of the name."""

WITH_ZERO_POINTS = {"drawn_table4": "float", "drawn_table6": "float"}
"""Those that are multiplied with zero points, and of which kind."""


def register(*names: str) -> None:
    """Make those of the types that are named known to this process; other names are others' types."""
    for name in names:
        if name in VALUES and name not in type_names():
            register_type(TType(name, int(name[-1]), partial(_decoded, VALUES[name]), doc="drawn"))


def _decoded(values: list[float], code: Any, ops: Any) -> Any:
    return ops.lookup(values, code)
