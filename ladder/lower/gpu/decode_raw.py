"""Affine types as raw operands: codes moved into place, with gain and offset left to the accumulator.

An integer u at bit p of a float16 whose other bits are 0 *is* the number ``u * 2**(p-24)``, a
subnormal; bfloat16, whose subnormals lie below what float32 sums keep, takes u in the mantissa
of 128; int8 takes it low (unsigned) or at the top (signed). One `lop3` per register, and the
shifts that bring the fields of a word near enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product

from ladder.lower.gpu.machine import PIPE_CLOCKS, Cost, Machine, Word, repeat
from ladder.lower.gpu.recipes import FLOAT_CORES, Conversion, Field, Meaning, Recipe, fields, gather, moves
from tile_types.forms import Affine, affine_forms

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
    """Codes moved into a slot.

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
