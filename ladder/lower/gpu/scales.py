"""Scales and zero points as operands: one value repeated in every lane of a register."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, frexp, log2
from typing import Any

from tvm.script import tirx as T

from ladder.lower.gpu.machine import Machine, Word
from ladder.lower.gpu.recipes import FLOAT_CORES, Meaning
from schedules.layouts import EXPONENT_FORMS, EXPONENTS, OPERAND_EXPONENT, SCALE_EXPONENT

Expr = Any

FACTOR_EXPONENT = {"float16": 16, "bfloat16": 120}
"""Factors of raw operands stay below two to this."""

LARGEST_POWER = {"float16": 2.0**15, "bfloat16": 2.0**120}
"""Powers of two that scales are multiplied by at once."""

FLOAT32_BIAS, FLOAT32_MANTISSA = 127, 23
"""Bias of a float32's exponent, and the bits below it."""


def pair16(value: Expr) -> Expr:
    """Return the bits of a float16 or bfloat16 value in both halves of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint16"))
    return bits * T.uint32(0x00010001)


def bytes4(value: Expr) -> Expr:
    """Return the bits of an int8 value in all four bytes of a uint32 register."""
    bits = T.Cast("uint32", T.reinterpret(value, dtype="uint8"))
    return bits * T.uint32(0x01010101)


def exponent_byte(m: Machine, word: Word, at: int) -> Word:
    """Return one of the four exponents of a word."""
    moved = m.shift(word, -8 * at)
    return moved if at == EXPONENTS - 1 else m.mask(moved, 0xFF)


def power_of(m: Machine, core: str, byte: Word, power: float) -> Word:
    """Return ``power`` times a scale of which ``byte`` is the exponent, in both lanes of a register.

    One multiply-add where ``power`` is a power of two and no such product leaves the normal numbers.
    """
    form, lanes = EXPONENT_FORMS[core], 0x00010001
    step, most = lanes << form.mantissa_bits, 2 * form.bias
    fraction, exponent = frexp(abs(power))
    added = exponent - 1 - form.raised
    if fraction == 0.5 and form.lowest + added >= 1 and form.highest + added <= most:
        return m.multiply(byte, step, added * step + (0x80008000 if power < 0 else 0))
    return times(m, core, m.multiply(byte, step), power / 2.0**form.raised)


def float_of_exponent(word: Expr, at: int, core: str) -> Expr:
    """Return the float32 scale whose exponent is byte ``at`` of a word."""
    form = EXPONENT_FORMS[core]
    moved = word >> T.uint32(8 * at) if at else word
    byte = moved if at == EXPONENTS - 1 else moved & T.uint32(0xFF)
    bits = byte * T.uint32(1 << FLOAT32_MANTISSA) + T.uint32(
        (FLOAT32_BIAS - form.bias - form.raised << FLOAT32_MANTISSA) % (1 << 32)
    )
    return T.reinterpret(bits, dtype="float32")


def times(m: Machine, core: str, word: Word, power: float) -> Word:
    """Multiply by a power of two, at once or by factors that the operand type holds."""
    largest = LARGEST_POWER[core]
    while abs(power) > largest:
        word = m.float_mul(core, word, m.constant(FLOAT_CORES[core].bits(largest)))
        power /= largest
    return word if power == 1.0 else m.float_mul(core, word, m.constant(FLOAT_CORES[core].bits(power)))


@dataclass(frozen=True)
class Fold:
    """One multiply-add that turns a raw operand into ``value * scale / 2**exponent``.

    ``raw * (scale * step) + scale * start``: rounded once, since both products of the scale are
    by powers of two. Results that are subnormal in float16 may be off by its smallest number.

    steps, starts: Factors of the scale for rows g and g+8.
    exponent: Chosen so that the largest scale that packing leaves still has a finite product.
    """

    steps: tuple[float, float]
    starts: tuple[float, float]
    exponent: int

    def powers(self, half: int) -> tuple[float, ...]:
        """Return which multiples of the scale multiply row g or g+8 and, where any is, are then added."""
        return (self.steps[half], self.starts[half]) if any(self.starts) else (self.steps[half],)


def fold(operand: str, meaning: Meaning, reach: float) -> Fold | None:
    """Return how scales multiply raw operands, or None if that would round twice.

    operand: Operand type.
    meaning: What the raw operands stand for.
    reach: Largest magnitude of the weight type's values.
    """
    numbers = (*meaning.gains, *(offset for offset in meaning.offsets if offset))
    if operand not in FLOAT_CORES or any(abs(frexp(number)[0]) != 0.5 for number in numbers):
        return None
    scale = min(2.0**OPERAND_EXPONENT / reach, 2.0**SCALE_EXPONENT)
    largest = ceil(log2(max(map(abs, meaning.gains)) * scale))
    exponent = max(0, largest - FACTOR_EXPONENT[operand])
    low, high = (gain / 2.0**exponent for gain in meaning.gains)
    start_low, start_high = (offset / 2.0**exponent for offset in meaning.offsets)
    return Fold((low, high), (start_low, start_high), exponent)
