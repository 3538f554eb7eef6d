"""Arbitrary types of up to four bits: byte lookups in registers (prmt).

The codes of eight elements are brought into the nibbles of one word: four registers
of a 16-bit core, or two of an 8-bit core. Four nibbles at a time select bytes of the table.

Arbitrary types of up to eight bits: look-ups in shared memory, of single codes or of pairs of them.

Each lane of a warp has a copy of the table in its own bank, so that no two lanes ever wait for each
other. A pair of codes up to five bits wide selects a whole register.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import permutations

import ml_dtypes
import numpy as np

from ladder.lower.gpu.machine import AND_XOR, TABLE_ROWS, Machine, Word, subtract_bytes
from ladder.lower.gpu.recipes import (
    FLOAT_CORES,
    Conversion,
    Field,
    Move,
    Recipe,
    fields,
    gather,
    moves,
    shifts,
)
from schedules.layouts import NIBBLE, code_fields
from tile_types import core_values
from tile_types.forms import MOST_BITS, is_arithmetic

NUMPY_TYPES = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}


@lru_cache(maxsize=1024)
def nibble_moves(
    bits: int, lane: int, group: int, order: str = "lanes"
) -> tuple[tuple[int, ...], tuple[Move, ...]]:
    """Return which nibble of its lane each register of a group takes, and the moves to get there.

    The order of registers is free, so the one with the fewest shifts is taken.
    """
    size = lane // 4

    def plan(nibbles: Sequence[int]) -> tuple[Move, ...]:
        found: list[Move] = []
        for index, nibble in enumerate(nibbles):
            found += moves(fields(bits, lane, group * size + index, order), 0, bits, 4 * nibble)
        return tuple(found)

    best = min(permutations(range(size)), key=lambda order: shifts(plan(order)))
    return best, plan(best)


@dataclass(frozen=True)
class ByteLookup(ABC):
    """Values that are looked up byte by byte; ``table`` holds the operand's bits of every code."""

    bits: int
    operand: str
    lane: int
    table: tuple[int, ...]
    order: str = "lanes"

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return two or four values."""
        value = self.values(m, words, index)
        if zero is None:
            return value
        return subtract_bytes(m, value, zero) if self.lane == 8 else m.float_sub(self.operand, value, zero)

    @abstractmethod
    def values(self, m: Machine, words: Sequence[Word], index: int) -> Word:
        """Return the values of a register, zero points included."""

    def pairs(self, m: Machine, words: Sequence[Word], index: int) -> Word:
        """Return the codes of four registers in order ``pairs``: each byte holds both of a register."""
        nibbles = moves(code_fields(self.bits, self.lane, index // 4 * 4, 0, "pairs"), 0, self.bits, 0)
        return gather(m, words, nibbles, NIBBLE)

    def entries(self, part: int, least: int) -> list[int]:
        """Return byte ``part`` of every value, followed by zeros up to a least number of entries."""
        found = [entry >> (8 * part) & 0xFF for entry in self.table]
        return found + [0] * (least - len(found))


def quad(entries: Sequence[int], first: int) -> int:
    """Return four bytes as a word."""
    return sum(entries[first + i] << (8 * i) for i in range(4))


@dataclass(frozen=True)
class Lookup(ByteLookup):
    """Table lookups by nibbles that select bytes."""

    def values(self, m: Machine, words: Sequence[Word], index: int) -> Word:
        if self.order == "pairs":
            return self._paired(m, self.pairs(m, words, index), index % 4)
        size = self.lane // 4
        order, wanted = nibble_moves(self.bits, self.lane, index // size, self.order)
        codes = gather(m, words, wanted, self.lane)
        return (self._wide if self.lane == 16 else self._narrow)(m, codes, order[index % size])

    def _wide(self, m: Machine, codes: Word, nibble: int) -> Word:
        # Bytes 0 2 1 3: each half of the word then holds both lanes of two registers.
        codes = m.permute(codes, codes, m.constant(0x3120))
        low, high = (self._bytes(m, codes, nibble // 2, part) for part in (0, 1))
        return self._join(m, low, high, nibble % 2, 2 + nibble % 2)

    def _paired(self, m: Machine, codes: Word, byte: int) -> Word:
        low, high = (self._bytes(m, codes, byte // 2, part) for part in (0, 1))
        return self._join(m, low, high, byte % 2 * 2, byte % 2 * 2 + 1)

    def _join(self, m: Machine, low: Word, high: Word, first: int, second: int) -> Word:
        """Return two lanes from bytes ``first`` and ``second`` of the lower and the upper bytes."""
        selector = first | (4 + first) << 4 | second << 8 | (4 + second) << 12
        return m.permute(low, high, m.constant(selector))

    def _narrow(self, m: Machine, codes: Word, nibble: int) -> Word:
        low, high = (self._bytes(m, codes, half, 0) for half in (0, 1))
        return m.permute(low, high, m.constant(0x6420 + 0x1111 * nibble))

    def _bytes(self, m: Machine, codes: Word, half: int, part: int) -> Word:
        """Look up byte ``part`` of the values of four codes: those in one half of ``codes``."""
        entries = self.entries(part, 16)
        quads = [quad(entries, first) for first in range(0, 16, 4)]
        if not any(quads):
            return m.constant(0)
        wide = len(self.table) > 8
        selector = m.mask(codes, 0x77777777) if wide else codes
        found = self._pick(m, quads[0], quads[1], m.shift(selector, -16 * half))
        if not wide:
            return found
        upper = self._pick(m, quads[2], quads[3], m.shift(selector, -16 * half))
        # Byte i comes from the upper table where bit 3 of nibble i is set.
        choice = m.lop3(m.shift(codes, -1), m.constant(0x44444444), m.constant(0x32103210), AND_XOR)
        return m.permute(found, upper, m.shift(choice, -16 * half))

    def _pick(self, m: Machine, low: int, high: int, selector: Word) -> Word:
        return m.permute(m.constant(low), m.constant(high), selector)


def operand_bits(conversion: Conversion) -> tuple[int, ...]:
    """Return the operand's bits of every code, of NaN and infinity too; 0 for codes that integers lack."""
    values = core_values(conversion.ttype, conversion.operand)
    if conversion.operand == "int8":
        valid = np.isin(np.arange(len(values)), conversion.ttype.valid_codes())
        values = np.where(valid, values, 0.0)
    kind = np.uint16 if conversion.lane == 16 else np.uint8
    return tuple(int(entry) for entry in values.astype(NUMPY_TYPES[conversion.operand]).view(kind))


def propose_lookup(conversion: Conversion) -> Iterator[Recipe]:
    """Propose lookups in registers for any type of up to four bits."""
    if conversion.bits <= NIBBLE:
        yield from byte_lookups(conversion, Lookup)


def byte_lookups(conversion: Conversion, kind: type[ByteLookup]) -> Iterator[Recipe]:
    """Propose lookups of a kind where they can take what zero points there are from the values."""
    operand = conversion.operand
    if conversion.zero == "none" or operand in (*FLOAT_CORES, "int8"):
        yield kind(conversion.bits, operand, conversion.lane, operand_bits(conversion), conversion.order)


LARGEST_TABLE = 128 * 1024
"""Bytes beside which a block still has room for activations."""

JOINED = {16: 0x5410, 8: 0x0040}
"""Selectors of `permute` that put the lowest lanes of two words side by side."""


@dataclass(frozen=True)
class Table:
    """Loads of values from shared memory.

    bits, operand, lane, order: Width of a code, operand type, bits of a lane, order of packed bits.
    values: The operand's bits of every code.
    together: Codes that select an entry: 1, or both of a register.
    row: Bytes from entry to entry.
    """

    bits: int
    operand: str
    lane: int
    order: str
    values: tuple[int, ...]
    together: int
    row: int

    @property
    def bytes(self) -> int:
        """Shared memory that the table takes."""
        return self.row * len(self.entries)

    @property
    def step(self) -> int:
        """Bits from the first to the second code of a pair; 0 where single codes select entries."""
        return max(self.bits, NIBBLE) if self.together == 2 else 0

    @cached_property
    def entries(self) -> tuple[int, ...]:
        """The word of each entry; none is read where a pair leaves bits between its codes."""
        if not self.step:
            return self.values
        lows = (*self.values, *([0] * ((1 << self.step) - len(self.values))))
        return tuple(low | high << self.lane for high in self.values for low in lows)

    def register(self, m: Machine, words: Sequence[Word], index: int, zero: Word | None) -> Word:
        """Return two or four values."""
        found = [self._load(m, words, index, at) for at in range(32 // self.lane // self.together)]
        if len(found) == 4:
            found = [m.permute(low, high, m.constant(JOINED[8])) for low, high in (found[:2], found[2:])]
        value = found[0] if len(found) == 1 else m.permute(found[0], found[1], m.constant(JOINED[16]))
        if zero is None:
            return value
        return subtract_bytes(m, value, zero) if self.lane == 8 else m.float_sub(self.operand, value, zero)

    def _load(self, m: Machine, words: Sequence[Word], index: int, element: int) -> Word:
        """Return the entry of a code, or of a pair of them."""
        where = self._where(index, element)
        if not self._in_bytes:
            return self._load_by_sum(m, words, where)
        byte = where[0].position // 8
        column = tuple(field._replace(position=field.position - 8 * byte) for field in where)
        codes = gather(m, words, moves(column, 0, 8, 0), 8)
        if self.together == 2 and self.order == "bytes":
            pair = m.dot(codes, (1 | 1 << (16 + self.step)) << 8 * byte, m.constant(0))
            address = m.multiply_add(pair, self.row, m.table_lane(absolute=True))
            return m.look_up(self.entries, self.row, address, absolute=True)
        if self.row == 256:  # bytes: of the lane, of the codes, and the lane's upper byte, which is 0
            offset = m.permute(codes, m.table_lane(), m.constant(0x5504 | byte << 4))
            return m.look_up(self.entries, self.row, offset)
        address = m.dot(codes, self.row << 8 * byte, m.table_lane(absolute=True))
        return m.look_up(self.entries, self.row, address, absolute=True)

    def _load_by_sum(self, m: Machine, words: Sequence[Word], where: Sequence[Field]) -> Word:
        """Return an entry whose code lies anywhere: moved bits beside those of the lane."""
        offset = m.table_lane()
        for word, source, target, width in moves(where, 0, 16, self.row.bit_length() - 1):
            mask = m.constant(((1 << width) - 1) << target)
            offset = m.lop3(m.shift(words[word], target - source), mask, offset, AND_XOR)
        return m.look_up(self.entries, self.row, offset)

    @property
    def _in_bytes(self) -> bool:
        """Whether each byte of a word holds parts of what selects one entry only."""
        if self.order == "pairs":
            return self.together == 2
        return self.order == "bytes" or self.bits == 8 or (self.lane == 8 and self.order == "dense")

    def _where(self, index: int, element: int) -> tuple[Field, ...]:
        """Return where what selects an entry lies, as if words had one lane."""
        if self.together == 1 or self.order == "bytes":
            return code_fields(self.bits, self.lane, index, element, self.order)
        codes = [code_fields(self.bits, self.lane, index, e, self.order) for e in (0, 1)]
        second = (field._replace(shift=field.shift + self.step) for field in codes[1])
        return (*codes[0], *second)


def propose_table(conversion: Conversion) -> Iterator[Recipe]:
    """Propose tables for types without an arithmetic form: of single codes, or of pairs of neighbours."""
    bits, operand, lane, order = conversion.bits, conversion.operand, conversion.lane, conversion.order
    if bits > MOST_BITS or (lane == 16 and is_arithmetic(conversion.ttype)):
        return
    if conversion.zero != "none" and operand not in (*FLOAT_CORES, "int8"):
        return
    pairs = order in ("pairs", "bytes")
    for together in (2,) * pairs + (1,) * (bits > 4):
        for row in TABLE_ROWS if together == 2 else TABLE_ROWS[-1:]:
            if row << max(bits, NIBBLE) * together <= LARGEST_TABLE:
                yield Table(bits, operand, lane, order, operand_bits(conversion), together, row)
