"""Packed words whose bits are sums modulo two of bits of codes.

An order of bits that merely moves them cannot bring the signs and magnitudes of four e2m1 codes to
their places in float16 by one shift each: the places of one code, shifted, do not tile a lane. Sums
can: a register is the exclusive or of one or two shifted words, masked, and packing solves for the words.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product


@dataclass(frozen=True)
class XorPacking:
    """How registers come from words: the exclusive or of shifted words, masked.

    place, sign: Bits of a lane to which the lower three bits of a code and its top bit come.
    shifts: Of each of a word's four registers: the distances of one or two copies, shifted to the left or,
        where negative, rotated to the right.
    """

    place: int
    sign: int
    shifts: tuple[tuple[int, ...], ...]


XOR_PACKINGS = {
    "float16 crossed": XorPacking(9, 15, ((6,), (9,), (0, 2), (0, -3))),
    "bfloat16 crossed": XorPacking(6, 15, ((2,), (6,), (0, -4), (0, -6))),
}
"""Found by search: four shifts of a word and no fewer give all its bits to signs and e2m1 magnitudes."""


def sources(crossing: XorPacking, slot: int) -> list[tuple[int, int]]:
    """Return which bits of a word are summed to which bits of a register that holds codes."""
    found = []
    for element, bit, shift in product((0, 16), range(4), crossing.shifts[slot]):
        place = element + (crossing.sign if bit == 3 else crossing.place + bit) - shift
        if shift <= 0 or place >= 0:
            found.append((element + bit, place % 32))
    return found


@cache
def packed_words(crossing: XorPacking) -> tuple[dict[int, int], ...]:
    """Invert `_sources`: masks of each register's code bits by how far left they are added to the word."""
    rows: list[tuple[int, int]] = []  # bits of the word, and which code bits (32 slot + bit) they sum to
    for slot in range(4):
        sums: dict[int, int] = {}
        for bit, place in sources(crossing, slot):
            sums[bit] = sums.get(bit, 0) ^ 1 << place
        rows += [(places, 1 << (32 * slot + bit)) for bit, places in sums.items()]
    for place in range(32):
        pivot = next(index for index in range(place, 32) if rows[index][0] >> place & 1)
        rows[place], rows[pivot] = rows[pivot], rows[place]
        places, codes = rows[place]
        for index in range(32):
            if index != place and rows[index][0] >> place & 1:
                rows[index] = rows[index][0] ^ places, rows[index][1] ^ codes
    parts: tuple[dict[int, int], ...] = ({}, {}, {}, {})
    for place, (_, codes) in enumerate(rows):
        for slot, bit in product(range(4), range(32)):
            if codes >> (32 * slot + bit) & 1:
                parts[slot][place - bit] = parts[slot].get(place - bit, 0) | 1 << bit
    return parts
