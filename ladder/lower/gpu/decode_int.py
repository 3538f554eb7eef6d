"""Integers (any type that is affine in its code) to float lanes and to bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

from ladder.lower.gpu.machine import AND, AND_XOR, PIPE_CLOCKS, XOR, Cost, Machine, Word, repeat
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


def propose_magic(conversion: Conversion) -> Iterator[tuple[str, LaneRecipe]]:
    """Propose magic numbers for affine types."""
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


def propose_split_magic(conversion: Conversion) -> Iterator[tuple[str, LaneRecipe]]:
    """Propose magic numbers for integers just too wide for the mantissa."""
    for core in FLOAT_CORES.values():
        if conversion.bits == core.mantissa_bits + 1:
            for signed in (True, False):
                yield core.name, SplitMagic(core, conversion.bits, signed)


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


MOST_SHIFTS = 2
"""Distances by which whole words are shifted, beside shifts of the narrower planes."""


@dataclass(frozen=True)
class Slot:
    """Where an operand type can hold an unsigned field, and what it is worth there.

    base: Bits of a lane around the field.
    places: Lowest bits at which the field may start.
    unit: What one step of the field is worth at bit 0.
    start: What the lane is worth where the field is 0.
    signed: Whether the field's top bit is a sign.
    """

    base: int
    places: tuple[int, ...]
    unit: float
    start: float = 0.0
    signed: bool = False


def slots(operand: str, bits: int) -> Iterator[Slot]:
    """Yield the ways in which an operand type holds a field of ``bits`` bits."""
    if operand == "float16":  # exponents 0 and 1 share their unit; one bit may stand anywhere
        yield Slot(0, tuple(range(12 - bits)), 2.0**-24)
    elif operand == "bfloat16":
        core = FLOAT_CORES[operand]
        yield Slot(core.magic, tuple(range(core.mantissa_bits + 1 - bits)), 1.0, 2.0**core.mantissa_bits)
    elif operand == "int8":
        yield Slot(0, (8 - bits,), 1.0, signed=True)
        yield Slot(0, tuple(range(8 - bits)), 1.0)
    elif operand == "fp8_e4m3":
        yield Slot(0, tuple(range(5 - bits)), 2.0**-9)
    elif operand == "fp8_e5m2":
        yield Slot(0, tuple(range(4 - bits)), 2.0**-16)


@dataclass(frozen=True)
class Placed:
    """Codes moved into a slot: raw operands, with gain and offset left to the accumulator.

    An integer u at bit p of a float16 whose other bits are 0 *is* the number ``u * 2**(p-24)``, a
    subnormal; bfloat16, whose subnormals lie below what float32 sums keep, takes u in the mantissa
    of 128; int8 takes it low (unsigned) or at the top (signed). One `lop3` per register, and the
    shifts that bring the fields of a word near enough.

    bits, operand, lane: Width of a code, operand type, bits of a lane.
    flip: Bits of the code to invert.
    slots: The slots of even and odd registers.
    at: Lowest bit of the field in each register.
    goal: Where even and odd registers must have it; others are multiplied by a power of two.
    """

    bits: int
    operand: str
    lane: int
    flip: int
    slots: tuple[Slot, Slot]
    at: tuple[int, ...]
    goal: tuple[int, int]
    order: str = "lanes"

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return raw operands; ``zero`` is left to the accumulator."""
        slot, at, goal = self.slots[index % 2], self.at[index], self.goal[index % 2]
        flip = self.flip ^ (1 << (self.bits - 1) if slot.signed else 0)
        wanted = moves(fields(self.bits, self.lane, index, self.order), 0, self.bits, at)
        held = gather(m, words, wanted, self.lane, repeat(slot.base ^ flip << at, self.lane))
        if at == goal:
            return held
        core, factor = FLOAT_CORES[self.operand], 2.0 ** (goal - at)
        rest = slot.start * (1.0 - factor)
        power = m.constant(core.bits(factor))
        if rest == 0.0:
            return m.float_mul(self.operand, held, power)
        return m.float_fma(self.operand, held, power, m.constant(core.bits(rest)))

    def meaning(self, form: Affine) -> Meaning:
        """Return gain and offset for a type of this form."""
        gains, offsets = [], []
        for slot, goal in zip(self.slots, self.goal, strict=True):
            gain = form.factor / slot.unit / 2.0**goal
            middle = 1 << (self.bits - 1) if slot.signed else 0
            gains.append(gain)
            offsets.append(form.offset + form.factor * middle - gain * slot.start)
        return Meaning((gains[0], gains[1]), (offsets[0], offsets[1]))


Places = tuple[tuple[int, ...], tuple[int, ...]]
"""Lowest bits that even and odd registers allow."""


@lru_cache(maxsize=1024)
def plan(
    bits: int, lane: int, order: str, places: Places, multiply: bool
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Return where each register holds its field, and where even and odd registers should, cheapest.

    All sets of up to `MOST_SHIFTS` distances are tried for the words of the widest plane.
    """
    found = []
    where = tuple(fields(bits, lane, index, order) for index in range(lane))
    choices = [d for d in range(1 - lane, lane if lane == 8 else 0) if d]
    for count in range(MOST_SHIFTS + 1):
        for distances in combinations(choices, count):
            even, odd = (_assign(where[h::2], places[h], (0, *distances), multiply) for h in (0, 1))
            if even is not None and odd is not None:
                goal = (even[1], odd[1])
                at = tuple(x for pair in zip(even[0], odd[0], strict=True) for x in pair)
                found.append((_weight(bits, where, at, goal), at, goal))
    if not found:  # every register is shifted to one place
        goal = (places[0][0], places[1][0])
        return tuple(goal[index % 2] for index in range(lane)), goal
    _, at, goal = min(found, key=lambda entry: entry[0])
    return at, goal


def _assign(
    where: Sequence[Sequence[Field]], places: tuple[int, ...], distances: tuple[int, ...], multiply: bool
) -> tuple[tuple[int, ...], int] | None:
    """Return the places of the even or odd registers and the goal that most of them reach."""
    first = [fields[0] for fields in where]
    reached = [[x for d in distances if (x := f.position - f.shift + d) in places] for f in first]
    if not all(reached):
        return None
    goal = max(places, key=lambda place: sum(place in some for some in reached))
    if not multiply and not all(goal in some for some in reached):
        return None
    return tuple(goal if goal in some else some[0] for some in reached), goal


def _weight(bits: int, where: Sequence[Sequence[Field]], at: tuple[int, ...], goal: tuple[int, ...]) -> float:
    """Return `Cost.weight` of a plan; every register of a plane costs a `lop3` beside."""
    moved, steps, scaled = set(), 0, 0
    for index, place in enumerate(at):
        wanted = moves(where[index], 0, bits, place)
        distances = {(move.word, move.target - move.source) for move in wanted}
        steps += len(distances)
        moved |= {distance for distance in distances if distance[1]}
        scaled += place != goal[index % 2]
    left = sum(distance > 0 for _, distance in moved)
    alu = PIPE_CLOCKS["lop3"][1] * steps + PIPE_CLOCKS["shift right"][1] * (len(moved) - left)
    fma = PIPE_CLOCKS["shift left"][1] * left + PIPE_CLOCKS["float_mul"][1] * scaled
    return Cost(steps + len(moved) + scaled, alu, fma).weight


def propose_placed(conversion: Conversion) -> Iterator[tuple[Recipe, Meaning]]:
    """Propose codes moved into place for affine types.

    fp8 tensor cores keep too few bits of a sum for offsets to be taken from it afterwards.
    """
    bits, lane, operand = conversion.bits, conversion.lane, conversion.operand
    usable = [slot for slot in slots(operand, bits) if slot.places]
    for form, even, odd in product(affine_forms(conversion.ttype), usable, usable):
        at, goal = plan(bits, lane, conversion.order, (even.places, odd.places), operand in FLOAT_CORES)
        recipe = Placed(bits, operand, lane, form.flip, (even, odd), at, goal, conversion.order)
        meaning = recipe.meaning(form)
        if lane == 16 or operand == "int8" or meaning.offsets == (0.0, 0.0):
            yield recipe, meaning
