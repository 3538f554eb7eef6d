"""Types of any values on AMD GPUs: V_PERM picks a byte of the value for each of four codes.

A table of eight entries is two registers, and the low three bits of four codes, one in each byte, select
from it. Further bits choose between tables. Where the values of one table are those of another with the
other sign, as in most types, that bit goes to the sign.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ladder.lower.gpu.decode_codebook import ByteLookup, byte_lookups, quad
from ladder.lower.gpu.fields import Move, fields, gather, moves, shifts
from ladder.lower.gpu.machine import AND_XOR, SELECT, Machine, Word
from ladder.lower.gpu.recipes import Conversion, Recipe
from schedules.layouts import NIBBLE

ENTRIES = 8
"""Bytes among which V_PERM selects."""

INDEX_BITS = 3

SIGN = 0x80

ORDERS = ("lanes", "dense", "bytes", "pairs")
"""Orders of packed bits that are read."""


@lru_cache(maxsize=64)
def _pairs(bits: int, order: str) -> tuple[tuple[int, int], ...]:
    """Return pairs of the 16 registers of a thread's tile, those with the fewest moves first."""
    cost = {
        (first, second): shifts(_moves_of_pair(bits, order, first, second))
        for first in range(16)
        for second in range(first + 1, 16)
    }
    left, found = set(range(16)), []
    for first, second in sorted(cost, key=lambda pair: cost[pair]):
        if first in left and second in left:
            found.append((first, second))
            left -= {first, second}
    return tuple(found)


def _moves_of_pair(bits: int, order: str, first: int, second: int) -> list[Move]:
    """Return the moves of two registers' codes to the bottom of bytes, even ones and odd ones."""
    return [
        move
        for at, register in ((0, first), (8, second))
        for move in moves(fields(bits, 16, register, order), 0, bits, at)
    ]


@dataclass(frozen=True)
class ByteTable(ByteLookup):
    """Table look-ups by V_PERM."""

    def values(self, m: Machine, words: Sequence[Word], index: int) -> Word:
        """Return the values of a register."""
        if self.lane == 8:
            codes = gather(m, words, moves(fields(self.bits, 8, index, self.order), 0, self.bits, 0), 8)
            return self._bytes(m, codes, 0, 0)
        if self.order == "pairs":
            return self._of_pairs(m, words, index)
        pair = next(pair for pair in _pairs(self.bits, self.order) if index in pair)
        codes = gather(m, words, _moves_of_pair(self.bits, self.order, *pair), 16)
        low, high = (self._bytes(m, codes, 0, part) for part in (0, 1))
        return m.permute(low, high, m.constant(0x6240 + 0x1111 * pair.index(index)))

    def _of_pairs(self, m: Machine, words: Sequence[Word], index: int) -> Word:
        """Decode where the nibbles of a byte hold both codes of a register."""
        codes = self.pairs(m, words, index)
        half = index % 4 // 2

        def lane(element: int) -> Word:
            low, high = (self._bytes(m, codes, NIBBLE * element, part) for part in (0, 1))
            return m.permute(low, high, m.constant(0x7362 if half else 0x5140))

        return m.permute(lane(0), lane(1), m.constant(0x7632 if index % 2 else 0x5410))

    def _bytes(self, m: Machine, codes: Word, at: int, part: int) -> Word:
        """Return byte ``part`` of the values of four codes, which begin at bit ``at`` of each byte."""
        selector = m.shift(codes, -at)
        if self.bits > INDEX_BITS or self.order == "pairs":  # else nothing lies beside the codes
            selector = m.mask(selector, (min(len(self.table), ENTRIES) - 1) * 0x01010101)
        return self._choose(m, codes, at, self.entries(part, ENTRIES), selector)

    def _choose(self, m: Machine, codes: Word, at: int, entries: list[int], selector: Word) -> Word:
        if len(set(entries)) == 1:
            return m.constant(entries[0] * 0x01010101)
        if len(entries) == ENTRIES:
            return m.select_bytes(m.constant(quad(entries, 0)), m.constant(quad(entries, 4)), selector)
        half = len(entries) // 2
        lower, upper = entries[:half], entries[half:]
        below = self._choose(m, codes, at, lower, selector)
        if lower == upper:
            return below
        top = m.shift(codes, 7 - at - (half.bit_length() - 1))
        if all(x ^ y == SIGN for x, y in zip(lower, upper, strict=True)):
            return m.lop3(top, m.constant(SIGN * 0x01010101), below, AND_XOR)
        return m.lop3(self._signs(m, top), self._choose(m, codes, at, upper, selector), below, SELECT)

    def _signs(self, m: Machine, word: Word) -> Word:
        """Return 0xFF for each byte whose top bit is set: V_PERM repeats signs of odd bytes."""
        return m.permute(word, m.shift(word, 8), m.constant(0xBF9D))


def propose_byte_table(conversion: Conversion) -> Iterator[Recipe]:
    """Propose look-ups for any type of up to eight bits."""
    if conversion.order in ORDERS and conversion.bits <= 8:
        yield from byte_lookups(conversion, ByteTable)
