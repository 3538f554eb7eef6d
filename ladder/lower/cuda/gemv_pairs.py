"""Raw operands without multiplications: registers with their fields at the same bits share a step.

Registers 2q and 2q+1 of a tile (rows g and g+8) meet the same operand register q of x, so they
are a *unit*, and a step of ``mma.m16n8k16`` may take any two units. Units whose fields lie at
the same bits have the same gains. A few *families* of gains, each with sums of its own, spare
the multiplications that would give all registers one gain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from ladder.lower.cuda.decode import Decoder, Proven
from ladder.lower.cuda.decode_int import affine_forms
from ladder.lower.cuda.decode_raw import Placed, slots
from ladder.lower.cuda.fields import fields
from ladder.lower.cuda.machine import Cost
from ladder.lower.cuda.proof import prove

UNITS = 8
"""Units of a tile of 16-bit operands."""

MOST_SHIFTS = 3
MOST_FAMILIES = 2

FAMILY_CLOCKS = 4.0
"""What the sums of another family cost a tile when they are flushed."""

Place = tuple[int, int]
"""Lowest bits of the fields of a unit's two registers."""


@dataclass(frozen=True)
class Step:
    """Two units that a step multiplies, and the family whose sums it adds to."""

    units: tuple[int, int]
    family: int


@dataclass(frozen=True)
class Pairing:
    """A tile's steps.

    Parameters
    ----------
    families
        One decoder per family; they differ in their gains.
    steps
        Steps that cover all units.
    """

    families: tuple[Decoder, ...]
    steps: tuple[Step, ...]

    @property
    def ratios(self) -> tuple[tuple[float, float], ...]:
        """Gains of rows g and g+8 of each family over those of the first."""
        first = self.families[0].gains
        return tuple((d.gains[0] / first[0], d.gains[1] / first[1]) for d in self.families)


@dataclass(frozen=True)
class Assignment:
    """Where the units have their fields, and how many words must be shifted for it."""

    places: tuple[Place, ...]
    shifts: int

    @property
    def families(self) -> tuple[Place, ...]:
        """The different places."""
        return tuple(sorted(set(self.places)))

    @property
    def clocks(self) -> float:
        """Clocks of shifts and further families."""
        return 2.0 * self.shifts + FAMILY_CLOCKS * (len(self.families) - 1)


def pair(decoder: Decoder) -> Pairing | None:
    """Return the cheapest pairing for a decoder of raw 16-bit operands, if it beats the decoder's recipe.

    Raises
    ------
    VerificationError
        If a family's recipe decodes wrongly.
    """
    recipe, conversion = decoder.choice.recipe, decoder.conversion
    if not isinstance(recipe, Placed) or conversion.operand != "float16" or decoder.fold is not None:
        return None
    found = [a for a in assignments(conversion.bits, conversion.order) if len(a.families) <= MOST_FAMILIES]
    if not found:
        return None
    best = min(found, key=lambda a: a.clocks)
    cost = Cost(2 * UNITS + best.shifts, alu=2.0 * (2 * UNITS + best.shifts))
    if cost.weight + FAMILY_CLOCKS * (len(best.families) - 1) >= decoder.choice.cost.weight:
        return None
    form = next(f for f in affine_forms(conversion.ttype) if recipe.meaning(f) == decoder.choice.meaning)
    at = tuple(bit for place in best.places for bit in place)
    families = []
    for goal in best.families:
        placed = replace(recipe, at=at, goal=goal)
        prove(placed, conversion, placed.meaning(form))
        choice = Proven(decoder.choice.strategy, placed, placed.meaning(form), cost)
        families.append(replace(decoder, choice=choice))
    return Pairing(tuple(families), tuple(_steps(best)))


def _steps(assignment: Assignment) -> Iterator[Step]:
    for family, place in enumerate(assignment.families):
        units = [q for q in range(UNITS) if assignment.places[q] == place]
        for first in range(0, len(units), 2):
            yield Step((units[first], units[first + 1]), family)


def assignments(bits: int, order: str) -> Iterator[Assignment]:
    """Yield ways to bring all units of a type with undivided codes to few places."""
    places = next(slots("float16", bits)).places
    where = [[fields(bits, 16, 2 * q + half, order) for half in (0, 1)] for q in range(UNITS)]
    if any(len(parts) > 1 for unit in where for parts in unit):
        return
    words = [(unit[0][0].word, unit[1][0].word) for unit in where]
    starts = [(unit[0][0].position, unit[1][0].position) for unit in where]
    for count in range(MOST_SHIFTS + 1):
        for distances in combinations(range(1, 16), count):
            reached = [_reached(start, (0, *distances), places) for start in starts]
            goals = sorted({place for options in reached for place in options})
            for size in range(1, MOST_FAMILIES + 1):
                for chosen in combinations(goals, size):
                    found = _assign(reached, chosen)
                    if found is not None:
                        yield Assignment(tuple(found), _shifts(words, starts, found))


def _reached(start: Place, distances: Sequence[int], places: Sequence[int]) -> list[Place]:
    moved = [(start[0] - d, start[1] - d) for d in distances]
    return [place for place in moved if place[0] in places and place[1] in places]


def _assign(reached: Sequence[Sequence[Place]], chosen: Sequence[Place]) -> list[Place] | None:
    """Give every unit one of the chosen places, an even number of units each."""
    options = [[place for place in chosen if place in some] for some in reached]
    if not all(options):
        return None
    found = [some[0] for some in options]
    for unit, some in enumerate(options):
        if found.count(chosen[0]) % 2 and len(some) > 1:
            found[unit] = some[1]
    return found if all(found.count(place) % 2 == 0 for place in chosen) else None


def _shifts(words: Sequence[tuple[int, int]], starts: Sequence[Place], found: Sequence[Place]) -> int:
    """Count words by the distances they are shifted."""
    return len(
        {
            (words[unit][half], starts[unit][half] - place[half])
            for unit, place in enumerate(found)
            for half in (0, 1)
            if starts[unit][half] != place[half]
        }
    )
