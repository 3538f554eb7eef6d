"""Decode recipes: their type, and the pass-through and reference recipes.

Where the bits of packed codes lie in a thread's words, and moving them in few instructions.

The layout is `schedules.fragments.FragmentLayout`, `fields` says where it has the bits of a register.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import ml_dtypes
import numpy as np

from ladder.lower.gpu.machine import AND_OR, AND_XOR, Machine, Word, repeat, subtract_bytes
from schedules.layouts import Field, fields, lane_of
from tile_types import TType

__all__ = ["Field", "Move", "fields", "gather", "moves", "odd_bytes", "shifts"]


class Move(NamedTuple):
    """``width`` bits of a word's lanes to be moved from ``source`` to ``target``."""

    word: int
    source: int
    target: int
    width: int


def odd_bytes(where: Iterable[Field], odd: int) -> tuple[Field, ...]:
    """See the even (``odd`` = 0) or odd bytes of 8-bit lanes as 16-bit lanes."""
    return tuple(field._replace(position=field.position + 8 * odd) for field in where)


def moves(where: Iterable[Field], low: int, high: int, target: int) -> list[Move]:
    """Return the moves that bring code bits ``[low, high)`` to bit ``target`` of the lanes."""
    result = []
    for field in where:
        first, last = max(low, field.shift), min(high, field.shift + field.width)
        if first < last:
            source = field.position + first - field.shift
            result.append(Move(field.word, source, target + first - low, last - first))
    return result


def gather(m: Machine, words: Sequence[Word], wanted: Iterable[Move], lane: int, base: int = 0) -> Word:
    """Return ``base`` (a whole word) xor the moved bits.

    One shift and one lop3 per distance, or one product for all of a word where that is less.
    """
    masks: dict[int, dict[int, int]] = {}
    for move in wanted:
        of_word = masks.setdefault(move.word, {})
        distance, mask = move.target - move.source, ((1 << move.width) - 1) << move.target
        of_word[distance] = of_word.get(distance, 0) | mask
    result = None
    for shifted, mask in _moved(m, words, masks, lane):
        if result is None and not base and repeat(mask, lane) == 0xFFFFFFFF:
            result = shifted
            continue
        into = m.constant(base) if result is None else result
        result = m.lop3(shifted, m.constant(repeat(mask, lane)), into, AND_XOR)
    assert result is not None  # a code has at least one bit
    return result


def _moved(
    m: Machine, words: Sequence[Word], masks: Mapping[int, Mapping[int, int]], lane: int
) -> Iterator[tuple[Word, int]]:
    """Yield words with moved bits, and where the wanted ones are in a lane."""
    for word, places in masks.items():
        right = max(0, -min(places))
        shifted = sum(distance != 0 for distance in places)
        sources = sum(mask >> (distance + right) for distance, mask in places.items())
        if 3 + (right > 0) < len(places) + shifted and _copies_apart(places, right, sources, lane):
            kept = m.mask(m.shift(words[word], -right), repeat(sources, lane))
            yield m.multiply(kept, sum(1 << (distance + right) for distance in places)), sum(places.values())
            continue
        for distance, mask in places.items():
            yield m.shift(words[word], distance), mask


def _copies_apart(places: Mapping[int, int], right: int, sources: int, lane: int) -> bool:
    """Tell whether a sum of shifted copies of ``sources`` has each wanted bit as it is in one copy.

    No other copy may have a bit there, nor may a carry of the bits below arrive.
    """
    wanted, bits, carry = repeat(sum(places.values()), lane), repeat(sources, lane), 0
    for at in range(32):
        copies = sum(bits << (distance + right) >> at & 1 for distance in places) + carry
        if wanted >> at & 1 and copies != 1:
            return False
        carry = copies // 2
    return True


def shifts(wanted: Iterable[Move]) -> int:
    """Return how many (shift, lop3) pairs `gather` needs."""
    return len({(move.word, move.target - move.source) for move in wanted})


@dataclass(frozen=True)
class FloatCore:
    """A 16-bit float that two lanes of a register hold."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    numpy: type

    @property
    def bias(self) -> int:
        return (1 << (self.exponent_bits - 1)) - 1

    @property
    def magic(self) -> int:
        """Bits of 2**mantissa_bits: or-ing an integer into its mantissa adds the integer."""
        return (self.bias + self.mantissa_bits) << self.mantissa_bits

    def bits(self, value: float) -> int:
        """Return the bits of a number in both lanes, rounded (a proof rejects a wrong rounding)."""
        return repeat(int(np.asarray(value).astype(self.numpy).view(np.uint16)), 16)

    def holds(self, value: float) -> bool:
        """Tell whether a number survives rounding."""
        with np.errstate(over="ignore"):
            return float(np.asarray(value).astype(self.numpy)) == value


FLOAT_CORES = {
    "float16": FloatCore("float16", 5, 10, np.float16),
    "bfloat16": FloatCore("bfloat16", 8, 7, ml_dtypes.bfloat16),
}


@dataclass(frozen=True)
class Conversion:
    """Task of a decoder: codes of ``ttype`` to lanes of ``operand``.

    ttype: Element type of the weight.
    operand: Operand type of the tensor core.
    zero: ``"integer"`` if integer zero points are subtracted inside the recipe, else ``"none"``.
    raw: Whether registers may hold raw numbers, which `Meaning` turns into values.
    order: Order of the bits in packed words (`schedules.layouts.ORDERS`).
    """

    ttype: TType
    operand: str
    zero: str = "none"
    raw: bool = False
    order: str = "lanes"

    @property
    def lane(self) -> int:
        """Bits of one lane."""
        return lane_of(self.operand)

    @property
    def bits(self) -> int:
        """Bits of one code."""
        return self.ttype.elem_bits


@dataclass(frozen=True)
class Meaning:
    """``value = gain * raw + offset``, for rows g and g+8 (even and odd registers) each.

    Both are exact in float32, and so is the value.
    """

    gains: tuple[float, float] = (1.0, 1.0)
    offsets: tuple[float, float] = (0.0, 0.0)


PLAIN = Meaning()
"""Registers hold the values themselves."""


class Recipe(Protocol):
    """One way to decode: the steps for one register."""

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return operand register ``index`` of the thread's tile from its packed words."""
        ...


class LaneRecipe(Protocol):
    """The steps for two codes in 16-bit lanes, wherever their bits lie."""

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Return two values; ``zero`` holds the integer zero point in both lanes."""
        ...


@dataclass(frozen=True)
class Lanes16:
    """A lane recipe as a recipe of a 16-bit core."""

    bits: int
    inner: LaneRecipe
    order: str = "lanes"

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Convert the register's two codes."""
        return self.inner.convert(m, words, fields(self.bits, 16, index, self.order), zero)


@dataclass(frozen=True)
class Narrowed:
    """A float16 lane recipe, then fp8: even and odd bytes pass through float16 separately."""

    bits: int
    inner: LaneRecipe
    operand: str
    order: str = "lanes"

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Convert the register's four codes."""
        where = fields(self.bits, 8, index, self.order)
        offset = None if zero is None else self._half(m, zero)
        even, odd = (self.inner.convert(m, words, odd_bytes(where, i), offset) for i in (0, 1))
        if self.operand == "fp8_e5m2":  # float16's upper byte is e5m2
            return m.permute(even, odd, m.constant(0x7351))
        low, high = m.narrow(self.operand, even), m.narrow(self.operand, odd)
        return m.permute(low, high, m.constant(0x5140))

    def _half(self, m: Machine, zero: Word) -> Word:
        """Turn the replicated int8 zero point into float16 lanes: 1024 + (z + 128) - 1152."""
        core = FLOAT_CORES["float16"]
        biased = m.lop3(zero, m.constant(0x00FF00FF), m.constant(0x64806480), AND_XOR)
        return m.float_sub("float16", biased, m.constant(core.bits(1152.0)))


@dataclass(frozen=True)
class PassThrough:
    """Codes that are the operand's own bits."""

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        return words[index]


@dataclass(frozen=True)
class Reference:
    """The type's own decode expression, one element at a time: right by construction, slow."""

    ttype: TType
    core: str
    lane: int
    order: str = "lanes"

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Decode the register's codes to 8-bit lanes."""
        value = self._lanes(m, words, fields(self.ttype.elem_bits, self.lane, index, self.order))
        return value if zero is None else subtract_bytes(m, value, zero)

    def convert(self, m: Machine, words: Sequence[Word], where: Sequence[Field], zero: Word | None) -> Word:
        """Decode two codes to 16-bit lanes."""
        value = self._lanes(m, words, where)
        return value if zero is None else m.float_sub(self.core, value, zero)

    def _lanes(self, m: Machine, words: Sequence[Word], where: Sequence[Field]) -> Word:
        bits = self.ttype.elem_bits
        codes = gather(m, words, moves(where, 0, bits, 0), self.lane)
        result = m.constant(0)
        for at in range(0, 32, self.lane):
            code = m.mask(m.shift(codes, -at), (1 << bits) - 1)
            value = m.shift(m.reference(self.ttype, code, self.core), at)
            result = m.lop3(value, m.constant(((1 << self.lane) - 1) << at), result, AND_OR)
        return result


def propose_pass_through(conversion: Conversion) -> Iterator[Recipe]:
    """Propose to use the packed words as they are."""
    if conversion.bits == conversion.lane and conversion.zero == "none":
        yield PassThrough()


def propose_reference(conversion: Conversion) -> Iterator[Recipe]:
    """Propose the reference expression, which fits every type that the operand can hold."""
    ttype, operand = conversion.ttype, conversion.operand
    if operand in FLOAT_CORES:
        yield Lanes16(conversion.bits, Reference(ttype, operand, 16), conversion.order)
    elif operand == "int8":
        yield Reference(ttype, operand, 8, conversion.order)
    else:
        yield Narrowed(conversion.bits, Reference(ttype, "float16", 16), operand, conversion.order)


ProposeLanes = Callable[[Conversion], Iterator[tuple[str, LaneRecipe]]]
"""Yields lane recipes, each with the core that it is for."""


def lane_recipes(propose: ProposeLanes, conversion: Conversion) -> Iterator[Recipe]:
    """Turn lane recipes of float16 and bfloat16 into recipes of the conversion's operand."""
    core = conversion.operand if conversion.operand in FLOAT_CORES else "float16"
    for made_for, recipe in propose(conversion):
        if made_for != core or conversion.operand == "int8":
            continue
        if conversion.operand in FLOAT_CORES:
            yield Lanes16(conversion.bits, recipe, conversion.order)
        else:
            yield Narrowed(conversion.bits, recipe, conversion.operand, conversion.order)
