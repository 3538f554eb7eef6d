"""Products of integers: activations of 16 bits as two digits each, multiplied by ``vpdpwssd``.

The elements of a row in a group of K become integers of 31 bits of one power of two, which is what the sum
of their products is worth. Each is written as two signed digits of 16 bits, whose products with weights add
up apart: nothing is rounded until a group ends. An element is off by at most ``2**-30`` of the power of two
above the largest of its group; below ``2**-87`` that no longer shrinks. A group with an infinite element, or
with NaN, has that as its unit; finite elements are nothing beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.activations import Activations, column_sum
from schedules.cpu_layout import LANES
from schedules.instructions import DIGITS_OF_X

HALF = 16
"""Bits of a digit."""

BASE = float(1 << HALF)
"""What the upper digit counts."""

LARGEST = float(1 << 30)
"""What scaled elements are at most."""

EXPONENT_BITS, SPECIAL = 23, 255
"""Where the exponent of a float32 begins, and that of infinity and NaN."""

LEAST_EXPONENT = 40
"""Biased exponent below which units do not shrink."""


@dataclass(frozen=True)
class DigitActivations(Activations):
    """Activations as digits: ``words[block][step][row][digit]`` hold those of a pair of columns.

    unit: float32 ``[block][group][row]``: what an integer of the row is worth in the group.
    """

    unit: Any

    digits = DIGITS_OF_X

    def prepare(self, block: Expr, first: Expr) -> None:
        """Emit the preparation of one block, whose first row is ``first``."""
        chunks = self.chunks_of_a_group
        with b.loop(self.rows) as local, b.loop(self.groups) as group:
            values = v.scratch(self.layout.padded_group, "float32")
            with b.loop(chunks) as chunk:
                self.widen(values, first + local, group * chunks + chunk, chunk * self.chunk)
            place = (block * self.groups + group) * self.rows + local
            largest = self._largest(values)
            exponent = b.bind(
                tirx.max(T.shift_right(largest, T.uint32(EXPONENT_BITS)), T.uint32(LEAST_EXPONENT))
            )
            finite = exponent < T.uint32(SPECIAL)
            unit = _float(T.shift_left(exponent - T.uint32(29), T.uint32(EXPONENT_BITS)))
            b.store(self.unit, tirx.Select(finite, unit, _float(largest)), place)
            shift = tirx.Select(finite, T.uint32(283) - exponent, T.uint32(1))
            factor = b.bind(_float(T.shift_left(shift, T.uint32(EXPONENT_BITS))))
            with b.loop(chunks) as chunk:
                self._split(values, factor, block, local, group, chunk)
            if self.sums is not None:
                b.store(self.sums, column_sum(values, self.layout.padded_group), place)

    def _largest(self, values: Any) -> Expr:
        """Emit the bits of the largest magnitude of a group; NaN is larger than infinity."""
        most = v.scratch(LANES, "uint32")
        b.store(most, v.constant(0, "uint32"), v.lanes(0))
        with b.loop(self.layout.padded_group // LANES) as part:
            bits = v.as_type(values[v.lanes(part * LANES)], f"uint32x{LANES}")
            magnitude = v.masked(bits, 0x7FFFFFFF, "uint32", LANES)
            b.store(most, tirx.max(most[v.lanes(0)], magnitude), v.lanes(0))
        largest = most[0]
        for lane in range(1, LANES):
            largest = tirx.max(largest, most[lane])
        return b.bind(largest)

    def _split(self, values: Any, factor: Expr, block: Expr, local: Expr, group: Expr, chunk: Expr) -> None:
        """Emit the digits of a row and chunk."""
        count = self.chunk // self.columns
        first = group * (self.layout.padded_group // self.columns) + chunk * count
        numbers = v.scratch(self.chunk, "int32")
        with b.vector(self.chunk) as lane:
            scaled = values[chunk * self.chunk + lane] * factor
            bounded = tirx.max(tirx.min(scaled, T.float32(LARGEST)), T.float32(-LARGEST))  # of NaN as well
            b.store(numbers, T.Cast("int32", bounded), lane)
        with b.loop(count) as step:
            even, odd = (b.bind(numbers[step * self.columns + i]) for i in range(2))
            place = ((block * self.steps + first + step) * self.rows + local) * DIGITS_OF_X
            low = T.bitwise_or(T.bitwise_and(even, T.int32(0xFFFF)), T.shift_left(odd, T.int32(HALF)))
            b.store(self.words, _pair(*(number + T.int32(1 << (HALF - 1)) for number in (even, odd))), place)
            b.store(self.words, T.reinterpret("uint32", low), place + 1)


def _pair(even: Expr, odd: Expr) -> Expr:
    """Return the upper halves of two integers side by side."""
    low = T.bitwise_and(T.shift_right(even, T.int32(HALF)), T.int32(0xFFFF))
    return T.reinterpret("uint32", T.bitwise_or(low, T.bitwise_and(odd, T.int32(-1 << HALF))))


def _float(bits: Expr) -> Expr:
    return T.reinterpret("float32", bits)
