"""Small floating-point formats to 16-bit floats: move the fields, then multiply by a power of two."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain
from operator import or_

from ladder.lower.gpu.machine import AND, AND_XOR, XOR_AND, Machine, Word, repeat
from ladder.lower.gpu.recipes import (
    FLOAT_CORES,
    Conversion,
    Field,
    FloatCore,
    LaneRecipe,
    Lanes16,
    Meaning,
    Recipe,
    gather,
    moves,
)
from schedules.layouts import SPREAD
from schedules.spread import SIGN, XOR_PACKINGS, spread
from tile_types.forms import Wiring, wirings


@dataclass(frozen=True)
class Wired:
    """Bits of the code go to their places in the core, others are constant; a multiply corrects the bias.

    A subnormal of the small format lands on a subnormal of the core, and the multiply
    normalises it: no case distinction.
    """

    core: FloatCore
    wiring: Wiring

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Return ``value - zero`` in both lanes."""
        name, gain = self.core.name, self.wiring.gain
        wanted = [move for run in runs(self.wiring) for move in moves(where, *run)]
        value = gather(m, words, wanted, 16, repeat(self.wiring.base, 16))
        if gain != 1.0:
            value = m.float_mul(name, value, m.constant(self.core.bits(gain)))
        return value if zero is None else m.float_sub(name, value, zero)

    def unscaled(self) -> Wired:
        """Return the recipe without its multiply."""
        return replace(self, wiring=replace(self.wiring, gain=1.0))


def runs(wiring: Wiring) -> list[tuple[int, int, int]]:
    """Return ``(first, end, target)``: code bits that go to neighbouring bits from ``target`` on."""
    found: list[tuple[int, int, int]] = []
    for bit, source in wiring.wires:
        first, end, target = found[-1] if found else (0, 0, -1)
        if source == end and bit == target + end - first and found:
            found[-1] = (first, end + 1, target)
        else:
            found.append((source, source + 1, bit))
    return found


@dataclass(frozen=True)
class XorPacked:
    """As `Wired`, of XOR-packed codes: one instruction on one or two shifted words."""

    core: FloatCore
    order: str
    wiring: Wiring

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return two values, less ``zero``."""
        packing = XOR_PACKINGS[self.order]
        word = words[index // 4]
        moved = [
            m.shift(word, left) if left >= 0 else m.rotate(word, -left) for left in packing.shifts[index % 4]
        ]
        bits = m.constant(repeat(1 << packing.sign | 7 << packing.place, 16))
        value = (
            m.lop3(moved[0], moved[1], bits, XOR_AND)
            if len(moved) > 1
            else m.lop3(moved[0], bits, m.constant(0), AND)
        )
        if self.wiring.gain != 1.0:
            value = m.float_mul(self.core.name, value, m.constant(self.core.bits(self.wiring.gain)))
        return value if zero is None else m.float_sub(self.core.name, value, zero)


@dataclass(frozen=True)
class Spread:
    """As `Wired`, of codes in an order that was made for it: rotated words, masked."""

    core: FloatCore
    order: str
    wiring: Wiring
    bits: int

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return two values, less ``zero``."""
        value = m.constant(repeat(self.wiring.base, 16))
        for word, turn, mask in spread(self.bits, SPREAD[self.order])[index]:
            turned = _turned(m, words[word], turn, self._wanted(word, turn))
            value = m.lop3(turned, m.constant(repeat(mask, 16)), value, AND_XOR)
        if self.wiring.gain != 1.0:
            value = m.float_mul(self.core.name, value, m.constant(self.core.bits(self.wiring.gain)))
        return value if zero is None else m.float_sub(self.core.name, value, zero)

    def _wanted(self, word: int, turn: int) -> int:
        """Return all bits that registers take from one rotation of a word."""
        parts = chain.from_iterable(spread(self.bits, SPREAD[self.order]))
        return repeat(reduce(or_, (part.mask for part in parts if part[:2] == (word, turn))), 16)


def _turned(m: Machine, word: Word, turn: int, wanted: int) -> Word:
    """Rotate a word to the left; where no wanted bit crosses its ends, a shift does."""
    if wanted & ((1 << turn) - 1) == 0:
        return m.shift(word, turn)
    return m.shift(word, turn - 32) if wanted < 1 << turn else m.rotate(word, 32 - turn)


@dataclass(frozen=True)
class ThroughBfloat:
    """A bfloat16 recipe, then float32 and float16: for formats whose exponent float16 lacks.

    bfloat16 is the upper half of float32, so widening is a shift or a mask.
    """

    inner: LaneRecipe

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Return ``value - zero`` in two float16 lanes."""
        wide = self.inner.convert(m, words, where, None)
        value = m.halves(m.shift(wide, 16), m.mask(wide, 0xFFFF0000))
        return value if zero is None else m.float_sub("float16", value, zero)


def propose_wired(conversion: Conversion) -> Iterator[tuple[str, Wired]]:
    """Propose moved bits for floating-point formats and their like."""
    for core in FLOAT_CORES.values():
        for wiring in wirings(conversion.ttype, core.name):
            yield core.name, Wired(core, wiring)


def propose_through_bfloat(conversion: Conversion) -> Iterator[tuple[str, LaneRecipe]]:
    """Propose the detour through bfloat16 for float16 and fp8 operands."""
    for core, inner in propose_wired(conversion):
        if core == "bfloat16":
            yield "float16", ThroughBfloat(inner)


def propose_xor(conversion: Conversion) -> Iterator[XorPacked]:
    """Propose masked sums of shifted words for small floats that are XOR-packed."""
    packing = XOR_PACKINGS[conversion.order]
    placed = (*((packing.place + bit, bit) for bit in range(3)), (packing.sign, 3))
    for core, recipe in propose_wired(conversion):
        fits = core == conversion.operand
        if fits and recipe.wiring.wires == placed and not recipe.wiring.base:
            yield XorPacked(recipe.core, conversion.order, recipe.wiring)


def propose_spread(conversion: Conversion) -> Iterator[Spread]:
    """Propose masked rotations of words for floats whose magnitude begins where the order has it."""
    bits, place = conversion.bits, SPREAD[conversion.order]
    placed = (*((place + bit, bit) for bit in range(bits - 1)), (SIGN, bits - 1))
    for core, recipe in propose_wired(conversion):
        if core == conversion.operand and recipe.wiring.wires == placed:
            yield Spread(recipe.core, conversion.order, recipe.wiring, bits)


def unscaled(
    propose: Callable[[Conversion], Iterator[XorPacked | Spread]], conversion: Conversion
) -> Iterator[tuple[Recipe, Meaning]]:
    """Propose the same whose power of two is left to scales or to the accumulator."""
    for recipe in propose(conversion):
        gain = recipe.wiring.gain
        yield replace(recipe, wiring=replace(recipe.wiring, gain=1.0)), Meaning(gains=(gain, gain))


def propose_raw_wired(conversion: Conversion) -> Iterator[tuple[Recipe, Meaning]]:
    """Propose moved bits whose power of two is left to scales or to the accumulator."""
    for core, recipe in propose_wired(conversion):
        if core == conversion.operand:
            raw = Lanes16(conversion.bits, recipe.unscaled(), conversion.order)
            yield raw, Meaning(gains=(recipe.wiring.gain, recipe.wiring.gain))
