"""Products of bytes: activations as digits of eight bits, weights as bytes, multiplied by ``vpdpbusd``.

Elements of x become integers as in `digits`, of 23 bits where x has 16 bits (three digits) and of 31 where it
has 32 (four). An element of 16 bits is exact if it is at least ``2**-11`` of the largest of its group
(``2**-14`` in bfloat16). Weights are bytes that count from the smallest value of their type, for which the
sums of a group's digits make up.

Packed codes of float products lie in halves of 32-bit lanes. Read as bytes, a step has four other columns
(`columns_of_step`), and x follows them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.decode import BYTE_LANE, form_of
from ladder.lower.skeletons.loopnest.digits import DigitActivations, DigitPlace
from tile_types import TType

HALF_LANE = 16
"""Bits of an element of a 32-bit lane as codes were packed."""


def columns_of_step(bits: int, step: int) -> tuple[int, ...]:
    """Return the columns of a unit whose codes are in the four bytes of each lane at a step."""
    packed, slots = HALF_LANE // bits, BYTE_LANE // bits
    line, slot = divmod(step, slots)
    return tuple(2 * (line * packed + half * slots + slot) + odd for odd in range(2) for half in range(2))


@dataclass(frozen=True)
class ByteDigitActivations(DigitActivations):
    """Activations as digits of eight bits: ``words[block][step][row][digit]``, the uppermost first.

    element: The weight's type.
    starts: int32 ``[block][group][row][digit]``: what sums begin with, None where bytes are values.
    """

    element: TType
    starts: Any

    @property
    def worth(self) -> float:
        """What products of integers are worth beside what those of elements and values are."""
        return 2.0 ** -form_of(self.element).exponent

    def begin_group(self) -> Any:
        """Allocate sums of every digit in 32 columns, 0 at first; None where nothing begins with them."""
        if self.starts is None:
            return None
        totals = v.scratch(self.digits * self.chunk, "int32")
        for digit in range(self.digits):
            b.store(totals, v.constant(0, "int32", self.chunk), v.lanes(digit * self.chunk, self.chunk))
        return totals

    def end_group(self, totals: Any, place: Expr) -> None:
        """Emit what the sums of a row begin with in a group: the smallest value times the sums of digits."""
        if totals is None:
            return
        low = T.int32(form_of(self.element).low)
        for digit in range(self.digits):
            total = v.reduced("add", totals[v.lanes(digit * self.chunk, self.chunk)])
            b.store(self.starts, total * low, place * self.digits + digit)

    def split(self, values: Any, factor: Expr, at: DigitPlace, totals: Any) -> None:
        """Emit the digits of a row and chunk."""
        count, numbers = self.chunk // self.columns, self.integers(values, factor, at.chunk)
        first = at.group * (self.layout.padded_group // self.columns) + at.chunk * count
        place = ((at.block * self.steps + first) * self.rows + at.local) * self.digits
        whole, pitch = v.lanes(0, self.chunk), self.rows * self.digits
        columns = [c for step in range(count) for c in columns_of_step(self.layout.bits, step)]
        for digit in reversed(range(self.digits)):
            rest = b.bind(numbers[whole])
            found = b.bind(T.Cast(f"int8x{self.chunk}", rest))
            wide = b.bind(T.Cast(f"int32x{self.chunk}", found))
            ordered = v.as_type(tirx.Shuffle([found], columns), f"uint32x{count}")
            b.store(self.words, ordered, T.ramp(place + digit, pitch, count))
            if totals is not None:
                own = v.lanes(digit * self.chunk, self.chunk)
                b.store(totals, totals[own] + wide, own)
            if digit:
                b.store(numbers, v.shifted(rest - wide, self.width, "int32", self.chunk), whole)
