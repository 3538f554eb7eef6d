"""Products of integers: activations as digits of 16 bits, for ``vpdpwssd``, or of 8, for ``vpdpbusd``.

The elements of a row in a group of K become integers of 31 bits of one power of two, which is what the sum
of their products is worth. Each is written as two signed digits of 16 bits, whose products with weights add
up apart: nothing is rounded until a group ends. An element is off by at most ``2**-30`` of the power of two
above the largest of its group (`DigitActivations.scaled_bits`); below ``2**-87`` that no longer shrinks. A
group with an infinite element, or with NaN, has that as its unit; finite elements are nothing beside it.
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
from ladder.lower.skeletons.loopnest.decode import BYTE_LANE, form_of
from schedules.cpu_layout import LANES
from schedules.instructions import DIGIT_BITS, pieces_of
from tile_types import TType

HALF = DIGIT_BITS["digits"]
"""Bits of a digit."""

EXPONENT_BITS, SPECIAL = 23, 255
"""Where the exponent of a float32 begins, and that of infinity and NaN."""

LEAST_EXPONENT = 40
"""Biased exponent below which units do not shrink."""


@dataclass(frozen=True)
class DigitPlace:
    """A chunk of a group of a row: block of rows, row of the block, group, chunk of the group."""

    block: Expr
    local: Expr
    group: Expr
    chunk: Expr


@dataclass(frozen=True)
class DigitActivations(Activations):
    """Activations as digits: ``words[block][step][row][digit]`` hold those of a pair of columns.

    unit: float32 ``[block][group][row]``: what an integer of the row is worth in the group.
    """

    unit: Any

    @property
    def digits(self) -> int:
        """Digits of an element."""
        return pieces_of(self.activation, self.operand)

    @property
    def width(self) -> int:
        """Bits of a digit."""
        return DIGIT_BITS[self.operand]

    @property
    def worth(self) -> float:
        """What products of integers are worth beside what those of elements and values are."""
        return 1.0

    @property
    def scaled_bits(self) -> int:
        """Bits of the largest magnitude of scaled elements: the top digit has one to spare, and its sign."""
        return self.width * self.digits - 2

    @property
    def largest(self) -> int:
        """The largest magnitude of scaled elements."""
        return 1 << self.scaled_bits

    @property
    def beyond(self) -> int:
        """What carries magnitudes above the largest, as fractions of a float32, to the next power of two."""
        return 0

    def prepare(self, block: Expr, first: Expr) -> None:
        """Emit the preparation of one block, whose first row is ``first``."""
        chunks = self.chunks_of_a_group
        with b.loop(self.rows) as local, b.loop(self.groups) as group:
            values = v.scratch(self.layout.padded_group, "float32")
            with b.loop(chunks) as chunk:
                self.widen(values, first + local, group * chunks + chunk, chunk * self.chunk)
            place = (block * self.groups + group) * self.rows + local
            largest = self._largest(values)
            finite = largest < T.uint32(SPECIAL << EXPONENT_BITS)
            carried = T.shift_right(largest + T.uint32(self.beyond), T.uint32(EXPONENT_BITS))
            exponent = b.bind(tirx.max(carried, T.uint32(LEAST_EXPONENT)))
            unit = _float(T.shift_left(exponent - T.uint32(self.scaled_bits - 1), T.uint32(EXPONENT_BITS)))
            b.store(self.unit, tirx.Select(finite, unit, _float(largest)) * T.float32(self.worth), place)
            shift = tirx.Select(finite, T.uint32(253 + self.scaled_bits) - exponent, T.uint32(1))
            factor = b.bind(_float(T.shift_left(shift, T.uint32(EXPONENT_BITS))))
            totals = self.begin_group()
            with b.loop(chunks) as chunk:
                self.split(values, factor, DigitPlace(block, local, group, chunk), totals)
            self.end_group(totals, place)
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
        return b.bind(v.reduced("umax", most[v.lanes(0)]))

    def begin_group(self) -> Any:
        """Allocate what `split` adds up in a group: nothing."""
        return None

    def end_group(self, totals: Any, place: Expr) -> None:
        """Emit what becomes of it."""

    def split(self, values: Any, factor: Expr, at: DigitPlace, totals: Any) -> None:
        """Emit the digits of a row and chunk."""
        del totals
        count, numbers = self.chunk // self.columns, self.integers(values, factor, at.chunk)
        first = at.group * (self.layout.padded_group // self.columns) + at.chunk * count
        with b.loop(count) as step:
            even, odd = (b.bind(numbers[step * self.columns + i]) for i in range(2))
            place = ((at.block * self.steps + first + step) * self.rows + at.local) * self.digits
            low = T.bitwise_or(T.bitwise_and(even, T.int32(0xFFFF)), T.shift_left(odd, T.int32(HALF)))
            b.store(self.words, _pair(*(number + T.int32(1 << (HALF - 1)) for number in (even, odd))), place)
            b.store(self.words, T.reinterpret("uint32", low), place + 1)

    def whole(self, scaled: Expr) -> Expr:
        """Return what of a scaled element becomes an integer, by cutting its fraction off."""
        return scaled

    def integers(self, values: Any, factor: Expr, chunk: Expr) -> Any:
        """Emit the scaled elements of a chunk, the largest of which has `scaled_bits`."""
        largest, numbers = float(self.largest), v.scratch(self.chunk, "int32")
        with b.vector(self.chunk) as lane:
            scaled = values[chunk * self.chunk + lane] * factor
            bounded = tirx.max(tirx.min(scaled, T.float32(largest)), T.float32(-largest))  # of NaN as well
            b.store(numbers, T.Cast("int32", self.whole(bounded)), lane)
        return numbers


def _pair(even: Expr, odd: Expr) -> Expr:
    """Return the upper halves of two integers side by side."""
    low = T.bitwise_and(T.shift_right(even, T.int32(HALF)), T.int32(0xFFFF))
    return T.reinterpret("uint32", T.bitwise_or(low, T.bitwise_and(odd, T.int32(-1 << HALF))))


def _float(bits: Expr) -> Expr:
    return T.reinterpret("float32", bits)


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

    Elements become integers, rounded, of 24 bits with their sign (three digits): one is off by at most
    ``2**-24`` of the power of two above the largest of its group. One of 16 bits is exact if it is at least
    ``2**-11`` of the largest (``2**-14`` in bfloat16). Where results are rounded to 16 bits as well, two
    digits do: elements are off by at most ``2**-16`` of that power, results of random weights in groups of
    128 by ``2**-13`` of their size. Weights are bytes that count from the smallest value of their type, for
    which the sums of a group's digits make up. Packed codes of float products lie in halves of 32-bit lanes;
    read as bytes, a step has four other columns (`columns_of_step`), and x follows them.

    element: The weight's type.
    starts: int32 ``[block][group][row][digit]``: what sums begin with, None where bytes are values.
    """

    element: TType
    starts: Any

    @property
    def scaled_bits(self) -> int:
        """Bits of the largest magnitude of scaled elements: all but the sign."""
        return self.width * self.digits - 1

    @property
    def largest(self) -> int:
        """The largest magnitude of scaled elements: every digit is the largest."""
        base: int = 1 << self.width
        return sum((base // 2 - 1) * base**digit for digit in range(self.digits))

    @property
    def beyond(self) -> int:
        """What carries magnitudes above the largest, as fractions of a float32, to the next power of two."""
        held = self.largest << (EXPONENT_BITS + 1 - self.scaled_bits)
        return (2 << EXPONENT_BITS) - held - 1

    def whole(self, scaled: Expr) -> Expr:
        """Return the integer next to a scaled element."""
        return T.nearbyint(scaled)

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
