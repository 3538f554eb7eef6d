"""Scales and zero points as operands: one value repeated in every lane of a register."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, frexp, log2
from typing import Any

from tvm.script import tirx as T

from ladder.lower.cuda.machine import Machine, Word
from ladder.lower.cuda.recipes import FLOAT_CORES, Meaning
from schedules.layouts import OPERAND_EXPONENT, SCALE_EXPONENT

Expr = Any

FACTOR_EXPONENT = {"float16": 16, "bfloat16": 120}
"""Factors of raw operands stay below two to this."""

LARGEST_POWER = {"float16": 2.0**15, "bfloat16": 2.0**120}
"""Powers of two that scales are multiplied by at once."""


def pair16(value: Expr) -> Expr:
    """Return the bits of a float16 or bfloat16 value in both halves of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint16"))
    return bits * T.uint32(0x00010001)


def bytes4(value: Expr) -> Expr:
    """Return the bits of an int8 value in all four bytes of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint8"))
    return bits * T.uint32(0x01010101)


@dataclass(frozen=True)
class Fold:
    """One multiply-add that turns a raw operand into ``value * scale / 2**exponent``.

    ``raw * (scale * step) + scale * start``: rounded once, since both products of the scale are
    by powers of two. Results that are subnormal in float16 may be off by its smallest number.

    Parameters
    ----------
    operand
        float16 or bfloat16.
    steps, starts
        Factors of the scale for rows g and g+8.
    exponent
        Chosen so that the largest scale that packing leaves still has a finite product.
    """

    operand: str
    steps: tuple[float, float]
    starts: tuple[float, float]
    exponent: int

    def prepare(self, m: Machine, scale: Word, half: int) -> list[Word]:
        """Return the factor of row g (``half`` 0) or g+8, and the addend if either row has one."""
        factors = [self._times(m, scale, self.steps[half])]
        if any(self.starts):
            start = self.starts[half]
            factors.append(self._times(m, scale, start) if start else m.constant(0))
        return factors

    def _times(self, m: Machine, scale: Word, power: float) -> Word:
        """Multiply by a power of two, at once or by factors that the operand type holds."""
        largest = LARGEST_POWER[self.operand]
        while abs(power) > largest:
            scale = m.float_mul(self.operand, scale, self._constant(m, largest))
            power /= largest
        return scale if power == 1.0 else m.float_mul(self.operand, scale, self._constant(m, power))

    def _constant(self, m: Machine, value: float) -> Word:
        return m.constant(FLOAT_CORES[self.operand].bits(value))


def fold(operand: str, meaning: Meaning, reach: float) -> Fold | None:
    """Return how scales multiply raw operands, or None if that would round twice.

    Parameters
    ----------
    operand
        Operand type.
    meaning
        What the raw operands stand for.
    reach
        Largest magnitude of the weight type's values.
    """
    numbers = (*meaning.gains, *(offset for offset in meaning.offsets if offset))
    if operand not in FLOAT_CORES or any(abs(frexp(number)[0]) != 0.5 for number in numbers):
        return None
    scale = min(2.0**OPERAND_EXPONENT / reach, 2.0**SCALE_EXPONENT)
    largest = ceil(log2(max(map(abs, meaning.gains)) * scale))
    exponent = max(0, largest - FACTOR_EXPONENT[operand])
    low, high = (gain / 2.0**exponent for gain in meaning.gains)
    start_low, start_high = (offset / 2.0**exponent for offset in meaning.offsets)
    return Fold(operand, (low, high), (start_low, start_high), exponent)
