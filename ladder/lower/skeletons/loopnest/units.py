"""Packed words of a row block and unit, and the codes of a step as bytes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from schedules.cpu_layout import LANES, CpuLayout, Plane


@dataclass
class Unit:
    """The packed words of one row block and unit, loaded when first needed.

    words: The packed array.
    block, unit: Indices into it.
    ahead: Units by which prefetches run ahead; 0: none.
    units, skipped: Units of a row block, and row blocks from one tile to the next: there prefetches go on.
    loaded, decoded: Its vectors, and multiplicands of steps that were decoded with one before.
    """

    layout: CpuLayout
    words: Any
    block: Expr
    unit: Expr
    ahead: int = 0
    units: Expr = None
    skipped: int = 0
    loaded: dict[int, Expr] = field(default_factory=dict)
    decoded: dict[int, list[Expr]] = field(default_factory=dict)

    def vector(self, plane: Plane, step: int) -> Expr:
        """Return the uint32x16 that holds the plane's bits of ``step``."""
        index = plane.start + step // plane.slots
        if index not in self.loaded:
            if self.ahead:
                after = self.unit + self.ahead
                jump = tirx.Select(after >= self.units, (self.skipped - 1) * self.units, T.int32(0))
                line = self.words[self.block, after + jump, index * LANES]
                v.prefetch(T.address_of(line))
            self.loaded[index] = b.bind(self.words[self.block, self.unit, v.lanes(index * LANES)])
        return self.loaded[index]

    def lane(self, plane: Plane, step: int, lane: Expr) -> Expr:
        """Return one uint32 of that vector, for loops that TVM vectorises."""
        return self.words[self.block, self.unit, (plane.start + step // plane.slots) * LANES + lane]


BYTE_LANE = 8
"""Bits of an element of a lane that is read as bytes."""


def narrow_places(widest: int, width: int, step: int) -> tuple[int, list[int]]:
    """Return where a narrower plane has the bits of the codes that a step reads of the widest.

    widest, width: Bits of a code in each plane, whose codes lie in halves of 32-bit lanes.
    step: Of a unit that is read as bytes.
    Returns: The line of the plane within a unit, and the first bits of the codes of eight bytes there.
    """
    packed, slots, ratio = 2 * BYTE_LANE // widest, BYTE_LANE // widest, widest // width
    line, slot = divmod(step, slots)
    first = line % ratio * packed + slot
    return line // ratio, [
        16 * element + (first + half * slots) * width for element in range(4) for half in range(2)
    ]


def byte_codes(layout: CpuLayout, unit: Unit, step: int) -> Expr:
    """Return the codes of a step in the low bits of bytes; bits above are arbitrary.

    layout: Of words that were packed for halves of 32-bit lanes, read as bytes.
    """
    widest, *rest = layout.planes
    right = widest.width * (step % widest.slots)
    codes = v.shifted(unit.vector(widest, step), right, "uint32", LANES)
    for plane in rest:
        line, places = narrow_places(widest.width, plane.width, step)
        words = v.as_type(unit.vector(plane, line * plane.slots), "uint8x64")
        part = v.shifted_octets(words, [place - plane.shift for place in places])
        low = ((1 << plane.shift) - 1) * 0x01010101
        codes = T.bitwise_or(
            v.masked(codes, low, "uint32", LANES),
            v.masked(v.as_type(part, "uint32x16"), low ^ 0xFFFFFFFF, "uint32", LANES),
        )
    return codes
