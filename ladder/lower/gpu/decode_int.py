"""Integers (any type that is affine in its code) to float lanes and to bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ladder.lower.gpu.machine import AND, AND_XOR, XOR, Machine, Word, repeat
from ladder.lower.gpu.recipes import (
    FLOAT_CORES,
    Conversion,
    Field,
    FloatCore,
    LaneRecipe,
    Meaning,
    Recipe,
    fields,
    gather,
    lane_recipes,
    moves,
)
from tile_types.forms import Affine, affine_forms


@dataclass(frozen=True)
class Magic:
    """Or the code into the mantissa of a power of two, then subtract the power and the offset.

    The subtraction is exact, so the scale multiplies the value itself: folding ``1024 * scale``
    into one constant would lose up to half a scale.
    """

    core: FloatCore
    bits: int
    form: Affine

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Return ``value - zero`` in both lanes."""
        at, distance = self._place(where)
        base = repeat(self.core.magic ^ (self.form.flip << at), 16)
        wanted = moves(where, 0, self.bits, at)
        held = gather(m, words, wanted, 16, base)
        factor = self.form.factor / (1 << at)
        constant = distance
        name = self.core.name
        if factor == 1.0:
            if zero is None:
                return m.float_sub(name, held, m.constant(self.core.bits(-constant)))
            return m.float_sub(name, held, m.float_sub(name, zero, m.constant(self.core.bits(constant))))
        addend = m.constant(self.core.bits(constant))
        if zero is not None:
            addend = m.float_sub(name, addend, zero)
        return m.float_fma(name, held, m.constant(self.core.bits(factor)), addend)

    def _place(self, where: Sequence[Field]) -> tuple[int, float]:
        """Return the lowest mantissa bit to use, and what must be added afterwards.

        A place that needs no shift, or the shift by 8 that other registers share, is preferred.
        """
        widest = where[0]
        for shift in (0, 8, widest.position):
            at = widest.position - shift - widest.shift
            constant = self._constant(max(at, 0))
            if at >= 0 and at + self.bits <= self.core.mantissa_bits and self.core.holds(constant):
                return at, constant
        at = next(self.places(), 0)
        return at, self._constant(at)

    def places(self) -> Iterator[int]:
        """Yield the lowest mantissa bits at which a code may begin so that one constant is added."""
        room = self.core.mantissa_bits - self.bits
        yield from (at for at in range(room + 1) if self.core.holds(self._constant(at)))

    def _constant(self, at: int) -> float:
        return self.form.offset - self.form.factor * float(1 << self.core.mantissa_bits) / (1 << at)


@dataclass(frozen=True)
class SplitMagic:
    """Integers one bit wider than the mantissa: low bits by magic, the top bit by the exponent.

    With P = 2**mantissa_bits, ``x = P + low`` and ``y = P * (1 + top)``, so that
    two's complement is ``x - y`` and unsigned is ``x - (2P - y)``; both exact.
    """

    core: FloatCore
    bits: int
    signed: bool

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Return ``value - zero`` in both lanes."""
        name, base = self.core.name, repeat(self.core.magic, 16)
        top = self.bits - 1
        low = gather(m, words, moves(where, 0, top, 0), 16, base)
        high = gather(m, words, moves(where, top, self.bits, top), 16, base)
        if not self.signed:
            twice = self.core.bits(float(2 << self.core.mantissa_bits))
            high = m.float_sub(name, m.constant(twice), high)
        value = m.float_sub(name, low, high)
        return value if zero is None else m.float_sub(name, value, zero)


@dataclass(frozen=True)
class Stepped:
    """Codes as floats, times the step of an affine type whose offset is too odd for `Magic`'s constant."""

    core: FloatCore
    codes: LaneRecipe
    form: Affine

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Return ``value - zero`` in both lanes."""
        step, offset = (m.constant(self.core.bits(x)) for x in (self.form.factor, self.form.offset))
        value = m.float_fma(self.core.name, self.codes.convert(m, words, where, None), step, offset)
        return value if zero is None else m.float_sub(self.core.name, value, zero)


@dataclass(frozen=True)
class ByteOffset:
    """Integers to int8: one subtraction of offset and zero point in all bytes, without borrows.

    Bytes are held as ``128 + (code ^ flip)``, at least as large as what is subtracted; flipping
    the top bit at the end takes the 128 away.
    """

    bits: int
    form: Affine
    order: str = "lanes"

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        offset = -int(self.form.offset)
        wanted = moves(fields(self.bits, 8, index, self.order), 0, self.bits, 0)
        if zero is None and offset == 0:
            return gather(m, words, wanted, 8, repeat(self.form.flip, 8))
        held = gather(m, words, wanted, 8, repeat(0x80 ^ self.form.flip, 8))
        high, none = m.constant(0x80808080), m.constant(0)
        taken = m.constant(repeat(offset, 8))
        if zero is not None:  # zero >= -offset, so zero + 128 covers 128 - offset
            taken = m.subtract(m.lop3(zero, high, none, XOR), m.constant(repeat(128 - offset, 8)))
        return m.lop3(m.subtract(held, taken), high, none, XOR)


def _magic(conversion: Conversion) -> Iterator[tuple[str, LaneRecipe]]:
    for form in affine_forms(conversion.ttype):
        for core in FLOAT_CORES.values():
            magic = Magic(core, conversion.bits, form)
            if conversion.bits <= core.mantissa_bits:
                yield core.name, magic
            if next(magic.places(), None) is None and not form.flip:
                for codes in _codes(core, conversion.bits):
                    yield core.name, Stepped(core, codes, form)


def _codes(core: FloatCore, bits: int) -> Iterator[LaneRecipe]:
    """Yield what turns codes into whole numbers."""
    if bits <= core.mantissa_bits:
        yield Magic(core, bits, Affine(0, 1.0, 0.0))
    elif bits == core.mantissa_bits + 1:
        yield SplitMagic(core, bits, signed=False)


def _split(conversion: Conversion) -> Iterator[tuple[str, LaneRecipe]]:
    for core in FLOAT_CORES.values():
        if conversion.bits == core.mantissa_bits + 1:
            for signed in (True, False):
                yield core.name, SplitMagic(core, conversion.bits, signed)


def propose_magic(conversion: Conversion) -> Iterator[Recipe]:
    """Propose magic numbers for affine types."""
    yield from lane_recipes(conversion, _magic(conversion))


def propose_split_magic(conversion: Conversion) -> Iterator[Recipe]:
    """Propose magic numbers for integers just too wide for the mantissa."""
    yield from lane_recipes(conversion, _split(conversion))


def propose_bytes(conversion: Conversion) -> Iterator[Recipe]:
    """Propose byte arithmetic for affine types on the int8 core."""
    if conversion.operand != "int8" or conversion.bits > 7:
        return
    for form in affine_forms(conversion.ttype):
        if form.factor == 1.0 and -128 <= form.offset <= 0:
            yield ByteOffset(conversion.bits, form, conversion.order)


UNITS = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}
"""Smallest subnormals."""

SIGNS = 0xBA98
"""Selector of prmt that fills each byte with its top bit."""


@dataclass(frozen=True)
class SignMagnitude:
    """Two's complement of ``bits`` bits as raw fp8: a sign in bit 7, a magnitude in the low bits of a byte.

    The fp8 codes 0, 1, 2, ... are as many times the smallest subnormal, up to 15 in e4m3 and 8 in e5m2.
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
