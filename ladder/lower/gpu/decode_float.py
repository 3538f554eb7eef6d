"""Small floating-point formats to 16-bit floats: move the fields, then multiply by a power of two."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ladder.lower.gpu.fields import Field, gather, moves
from ladder.lower.gpu.machine import AND, XOR_AND, Machine, Word, repeat
from ladder.lower.gpu.recipes import (
    FLOAT_CORES,
    Conversion,
    FloatCore,
    LaneRecipe,
    Lanes16,
    Meaning,
    Recipe,
    lane_recipes,
)
from schedules.crossed import CROSSED
from tile_types import TType


@dataclass(frozen=True)
class Rebias:
    """Sign, exponent and mantissa go to the core's positions; a multiply corrects the bias.

    A subnormal of the small format lands on a subnormal of the core, and the multiply
    normalises it: no case distinction.
    """

    core: FloatCore
    bits: int
    signed: bool
    mantissa_bits: int
    factor: float

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Return ``value - zero`` in both lanes."""
        name, magnitude = self.core.name, self.bits - self.signed
        wanted = moves(where, 0, magnitude, self.core.mantissa_bits - self.mantissa_bits)
        if self.signed:
            wanted += moves(where, magnitude, self.bits, 15)
        value = gather(m, words, wanted, 16)
        if self.factor != 1.0:
            value = m.float_mul(name, value, m.constant(self.core.bits(self.factor)))
        return value if zero is None else m.float_sub(name, value, zero)


@dataclass(frozen=True)
class Crossed:
    """As `Rebias`, of codes in a crossed order: one instruction on one or two shifted words."""

    core: FloatCore
    order: str
    factor: float

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return two values, less ``zero``."""
        crossing = CROSSED[self.order]
        word = words[index // 4]
        moved = [
            m.shift(word, left) if left >= 0 else m.rotate(word, -left) for left in crossing.shifts[index % 4]
        ]
        bits = m.constant(repeat(1 << crossing.sign | 7 << crossing.place, 16))
        value = (
            m.lop3(moved[0], moved[1], bits, XOR_AND)
            if len(moved) > 1
            else m.lop3(moved[0], bits, m.constant(0), AND)
        )
        if self.factor != 1.0:
            value = m.float_mul(self.core.name, value, m.constant(self.core.bits(self.factor)))
        return value if zero is None else m.float_sub(self.core.name, value, zero)


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


def _placed(ttype: TType, core: FloatCore, signed: bool, mantissa: int) -> npt.NDArray[np.float64]:
    """Return what the moved fields of every valid code are worth before the multiply."""
    codes, magnitude = ttype.valid_codes(), ttype.elem_bits - signed
    bits = (codes & ((1 << magnitude) - 1)) << (core.mantissa_bits - mantissa)
    bits |= (codes >> magnitude) << 15
    return bits.astype(np.uint16).view(core.numpy).astype(np.float64)


def _rebias(conversion: Conversion) -> Iterator[tuple[str, Rebias]]:
    ttype = conversion.ttype
    if conversion.bits > 8:
        return
    values = ttype.probe_values()
    for core in FLOAT_CORES.values():
        for signed in (True, False):
            magnitude = conversion.bits - signed
            for mantissa in range(max(0, magnitude - core.exponent_bits), magnitude):
                placed = _placed(ttype, core, signed, mantissa)
                usable = np.flatnonzero(np.isfinite(placed) & (placed != 0) & (values != 0))
                if not len(usable):
                    continue
                factor = float(values[usable[0]] / placed[usable[0]])
                with np.errstate(invalid="ignore"):
                    fits = np.array_equal(placed * factor, values)
                if fits and core.holds(factor):
                    yield core.name, Rebias(core, conversion.bits, signed, mantissa, factor)


def _through_bfloat(conversion: Conversion) -> Iterator[tuple[str, LaneRecipe]]:
    for core, inner in _rebias(conversion):
        if core == "bfloat16":
            yield "float16", ThroughBfloat(inner)


def propose_rebias(conversion: Conversion) -> Iterator[Recipe]:
    """Propose field moves for types that are floating-point formats."""
    yield from lane_recipes(conversion, _rebias(conversion))


def _crossed(conversion: Conversion) -> Iterator[Crossed]:
    crossing = CROSSED[conversion.order]
    for core, recipe in _rebias(conversion):
        placed = recipe.signed and recipe.core.mantissa_bits - recipe.mantissa_bits == crossing.place
        if placed and core == conversion.operand and crossing.sign == 15:
            yield Crossed(recipe.core, conversion.order, recipe.factor)


def propose_crossed(conversion: Conversion) -> Iterator[Recipe]:
    """Propose masked sums of shifted words for small floats in a crossed order."""
    yield from _crossed(conversion)


def propose_raw_crossed(conversion: Conversion) -> Iterator[tuple[Recipe, Meaning]]:
    """Propose the same whose power of two is left to scales or to the accumulator."""
    for recipe in _crossed(conversion):
        yield replace(recipe, factor=1.0), Meaning(gains=(recipe.factor, recipe.factor))


def propose_through_bfloat(conversion: Conversion) -> Iterator[Recipe]:
    """Propose the detour through bfloat16 for float16 and fp8 operands."""
    yield from lane_recipes(conversion, _through_bfloat(conversion))


def propose_raw_rebias(conversion: Conversion) -> Iterator[tuple[Recipe, Meaning]]:
    """Propose field moves whose power of two is left to scales or to the accumulator."""
    for core, recipe in _rebias(conversion):
        if core == conversion.operand:
            raw = Lanes16(conversion.bits, replace(recipe, factor=1.0), conversion.order)
            yield raw, Meaning(gains=(recipe.factor, recipe.factor))
