"""Signed integers of two or four bits as raw fp8: the magnitude is the code of a small multiple of a unit.

The fp8 codes 0, 1, 2, ... are as many times the smallest subnormal (up to 15 in e4m3, 8 in e5m2),
and the top bit is a sign. So two's complement needs to become sign and magnitude, no more.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ladder.lower.gpu.machine import AND, AND_XOR, Machine, Word, repeat
from ladder.lower.gpu.recipes import Conversion, Meaning, Recipe, fields
from tile_types.forms import affine_forms

UNITS = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}
"""Smallest subnormals."""

SIGNS = 0xBA98
"""Selector of prmt that fills each byte with its top bit."""


@dataclass(frozen=True)
class SignMagnitude:
    """Two's complement of ``bits`` bits to a sign in bit 7 and a magnitude in the low bits of a byte.

    For a negative code t the inverted byte is ``255 - t``; less ``127 - 2**bits`` it is
    ``128 + (2**bits - t)``: sign and magnitude. No byte borrows from another.
    """

    bits: int
    order: str

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return four raw operands."""
        (field,) = fields(self.bits, 8, index, self.order)
        raised = m.shift(words[field.word], 8 - self.bits - field.position)
        negative = m.permute(raised, raised, m.constant(SIGNS))
        lowered = m.shift(words[field.word], -field.position)
        code = m.constant(repeat((1 << self.bits) - 1, 8))
        excess = m.constant(repeat(127 - (1 << self.bits), 8))
        inverted = m.lop3(lowered, code, negative, AND_XOR)
        return m.subtract(inverted, m.lop3(negative, excess, m.constant(0), AND))


def propose_signed(conversion: Conversion) -> Iterator[tuple[Recipe, Meaning]]:
    """Propose sign and magnitude for types whose values are multiples of their two's complement codes."""
    bits, top = conversion.bits, 1 << (conversion.bits - 1)
    if conversion.operand not in UNITS or bits not in (2, 4):  # a code of three bits lies in two words
        return
    for form in affine_forms(conversion.ttype):
        if form.flip == top and form.offset == -form.factor * top:
            gain = form.factor / UNITS[conversion.operand]
            yield SignMagnitude(bits, conversion.order), Meaning((gain, gain))
