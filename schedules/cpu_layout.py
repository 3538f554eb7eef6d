"""Packed weights for CPUs: how codes lie in memory, as a value.

Sixteen rows of B are one row block: a 512-bit register holds one 32-bit lane per row. A unit is
sixteen rows by 32 columns. A lane holds E consecutive columns, each in an element of L = 32/E
bits: L = 16 for float cores (a bfloat16 pair, the operand of ``vdpbf16ps`` and of an AMX tile
row), L = 8 for integer cores (four bytes, the operand of ``vpdpbusd``). Codes are split into
planes of power-of-two width p; an element of a plane's word holds L/p codes of successive steps,
so that one shift by ``p * slot`` brings a step's codes to the bottom of every element at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from ladder.ir.gemm import Gemm
from ladder.ir.program import TileProgram, operand_type, summed_columns
from schedules.layouts import planes
from tile_types import get_type
from tile_types.packing import is_dense

ROWS = 16
"""Rows of B in one row block."""

UNIT = 32
"""Columns of B in one unit."""

PAD_ROWS = 128
"""N is padded to this many rows, so that every schedule's row blocks divide it."""

SUPER_BLOCK = 256
"""Columns whose groups have scales that are multiples of one number, in GGUF's K-quants."""

LANES = 16
"""32-bit lanes of the vectors in which kernels think (narrower machines split them)."""


@dataclass(frozen=True)
class Plane:
    """Bits ``[shift, shift + width)`` of every code, stored together.

    width, shift: Which bits of the code.
    slots: Codes per element of a word.
    start: First word of the plane within a unit, in 16-word vectors.
    """

    width: int
    shift: int
    slots: int
    start: int


@dataclass(frozen=True)
class CpuLayout:
    """Where each code of B[N,K] lies.

    bits: Bits of a code.
    lane: Bits L of one element: 16 or 8.
    group: Columns that are summed at a time: those that share a scale, or some; 0 if all of a row.
    """

    bits: int
    lane: int
    group: int

    @property
    def elements(self) -> int:
        """Columns per 32-bit lane (E)."""
        return 32 // self.lane

    @property
    def steps(self) -> int:
        """Steps of E columns in one unit."""
        return UNIT // self.elements

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The planes of a code, lowest bits first; a plane never is wider than an element."""
        result, start = [], 0
        for width, shift in self._widths():
            result.append(Plane(width, shift, self.lane // width, start))
            start += width
        return tuple(result)

    def _widths(self) -> tuple[tuple[int, int], ...]:
        if self.bits == 32:
            return ((16, 0), (16, 16))
        return planes(self.bits)

    @property
    def padded_group(self) -> int:
        """Columns that a group takes when packed: whole units, or half a unit for small groups."""
        if self.group == 0:
            return 0
        return UNIT // 2 if self.group <= UNIT // 2 else -(-self.group // UNIT) * UNIT

    @property
    def padding(self) -> dict[str, int]:
        """The axes of a weight that packing rounds up, each with the multiple."""
        if self.group == 0:
            # An AMX multiply of bytes takes two units.
            return {"n": PAD_ROWS, "k": 2 * UNIT if self.lane == 8 else UNIT}
        small = self.padded_group < UNIT
        columns = {} if self.group == self.padded_group else {"k": UNIT // 2 if small else UNIT}
        return {"n": PAD_ROWS, **({"g": UNIT // self.padded_group} if small else {}), **columns}

    @property
    def factored(self) -> int:
        """Groups of a super-block whose scales may be stored as factors, 0 if none are: 256 columns."""
        fits = self.group == self.padded_group and self.group in (UNIT // 2, UNIT)
        return SUPER_BLOCK // self.group if fits else 0

    def groups(self, k: int) -> int:
        """Return the number of groups of packed scales (even where a unit holds two)."""
        if self.group == 0:
            return 1
        count = -(-k // self.group)
        return count + count % 2 if self.padded_group < UNIT else count

    def padded_k(self, k: int) -> int:
        """Return the packed columns: a multiple of 32."""
        if self.group == 0:
            return -(-k // self.padding["k"]) * self.padding["k"]
        return self.groups(k) * self.padded_group

    def padded_n(self, n: int) -> int:
        """Return the packed rows."""
        return -(-n // PAD_ROWS) * PAD_ROWS

    def shape(self, n: int, k: int) -> tuple[int, int, int]:
        """Return the shape of the packed words: row blocks, units, 32-bit words of a unit."""
        return self.padded_n(n) // ROWS, self.padded_k(k) // UNIT, LANES * self.bits


def bytes_group(bits: int) -> int:
    """Return the least columns of a packed group whose words may be read as bytes."""
    return max(UNIT // 2, UNIT // planes(bits)[0][0])


WIDEST = 8
"""Bits of the widest codes that kernels pack."""


@dataclass(frozen=True)
class PackForm:
    """Where codes are read and where they go.

    stored: Bits of a code in canonical storage: those of the layout, or 8 where codes come as bytes.
    bits, lane: Of the layout.
    """

    stored: int
    bits: int
    lane: int

    @property
    def layout(self) -> CpuLayout:
        """The layout, without groups: columns are as they are packed."""
        return CpuLayout(self.bits, self.lane, 0)

    @property
    def is_permuted(self) -> bool:
        """Whether a packed word holds the codes of one stored word."""
        return self.stored == self.bits and 8 % self.bits == 0

    @property
    def per(self) -> int:
        """Codes of a stored byte, or of a stored word where they do not fill bytes."""
        return (8 if is_dense(self.stored) else 32) // self.stored

    @property
    def units(self) -> int:
        """Units of a row that are packed at a time: whole stored words, and eight packed ones."""
        return 8 if is_dense(self.stored) else lcm(8, self.per)

    @property
    def columns(self) -> int:
        """Codes of a row that are packed at a time."""
        return self.units * UNIT


def cpu_layout(gemm: Gemm) -> CpuLayout:
    """Return the layout that every CPU kernel of this problem reads."""
    lane = 8 if operand_type(gemm) == "int8" else 16
    return CpuLayout(get_type(gemm.weight).elem_bits, lane, summed_columns(gemm))


def stored_layout(program: TileProgram) -> CpuLayout:
    """Return the layout in which the weight of a block graph is packed: all its schedules share that."""
    group = program.operand("x").extent("k")
    lane = 8 if program.operand("acc").ttype == "int32" else 16
    bits = program.operand("w").tile.ttype.elem_bits
    return CpuLayout(bits, lane, group if isinstance(group, int) else 0)
