"""Narrow floats that the device's own instructions convert, two codes at a time, with a power of two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ladder.lower.gpu.machine import Machine, Word
from ladder.lower.gpu.recipes import Conversion
from schedules.conversions import CONVERSIONS

ONE = 0x3F800000
"""Bits of the float32 1."""


@dataclass(frozen=True)
class Converted:
    """Conversion of the pair of codes that a register holds.

    bits: Of a code.
    operand: What the lanes become.
    codes: Type as whose codes the instruction reads them.
    """

    bits: int
    operand: str
    codes: str

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return a register of values."""
        return self.scaled(m, words, index, m.constant(ONE))

    def scaled(self, m: Machine, words: Sequence[Word], index: int, scale: Word) -> Word:
        """Return a register of values times a power of two, whose float32 bits ``scale`` holds."""
        word, place = divmod(index, 32 // (2 * self.bits))
        return m.convert(self.operand, self.codes, words[word], scale, place)


def propose_converted(conversion: Conversion, codes: str | None) -> Iterator[Converted]:
    """Propose the device's instructions for a type; ``codes``: `schedules.conversions.converted_as`."""
    if codes is None or conversion.zero != "none" or conversion.order != CONVERSIONS[codes].order:
        return
    yield Converted(conversion.bits, conversion.operand, codes)
