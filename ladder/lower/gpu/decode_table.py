"""Arbitrary types of up to eight bits: look-ups in shared memory, of single codes or of pairs of them.

Each lane of a warp has a copy of the table in its own bank, so that no two lanes ever wait for each
other. A pair of codes up to five bits wide selects a whole register.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from ladder.lower.gpu.decode_codebook import operand_bits
from ladder.lower.gpu.fields import Field, gather, moves
from ladder.lower.gpu.machine import AND_XOR, TABLE_ROWS, Machine, Word, subtract_bytes
from ladder.lower.gpu.recipes import FLOAT_CORES, Conversion, Recipe
from schedules.layouts import NIBBLE, code_fields
from tile_types.forms import MOST_BITS, is_arithmetic

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
