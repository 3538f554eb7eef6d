"""Products of integers: activations as digits of 16 bits, for ``vpdpwssd``, or of 8, for ``vpdpbusd``.

The elements of a row in a group of K become integers of 31 bits of one power of two, which is what the sum
of their products is worth. Each is written as two signed digits of 16 bits, whose products with weights add
up apart: nothing is rounded until a group ends. An element is off by at most ``2**-30`` of the power of two
above the largest of its group (`DigitActivations.scaled_bits`); below ``2**-87`` that no longer shrinks. A
group with an infinite element, or with NaN, has that as its unit; finite elements are nothing beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.activations import Activations, column_sum
from ladder.lower.skeletons.loopnest.decode import form_of
from ladder.lower.skeletons.loopnest.units import BYTE_LANE
from schedules.cpu_layout import LANES, UNIT
from schedules.instructions import DIGIT_BITS, pieces_of
from tile_types import TType
from tile_types.forms import BytePairs

HALF = DIGIT_BITS["digits"]
"""Bits of a digit."""

EXPONENT_BITS, SPECIAL = 23, 255
"""Where the exponent of a float32 begins, and that of infinity and NaN."""

LEAST_EXPONENT = 40
"""Biased exponent below which units do not shrink."""


@dataclass(frozen=True)
class DigitPlace:
    """Where a row in a group is prepared: block of rows, row of the block, group."""

    block: Expr
    local: Expr
    group: Expr


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
        with b.loop(self.present(first)) as local, b.loop(self.groups) as group:
            values = self.read(first + local, group)
            self.prepare_group(values, DigitPlace(block, local, group))
            if self.sums is not None:
                total = column_sum(values, self.layout.padded_group)
                b.store(self.sums, total, self.number(block, group, local))

    def read(self, row: Expr, group: Expr) -> Any:
        """Emit the elements of a row in a group as float32."""
        chunks, values = self.chunks_of_a_group, v.scratch(self.layout.padded_group, "float32")
        with b.loop(chunks) as chunk:
            self.widen(values, row, group * chunks + chunk, chunk * self.chunk)
        return values

    def prepare_group(self, values: Any, at: DigitPlace) -> Expr:
        """Emit the digits of a row in a group and their worth; returns whether they leave out too much."""
        place = self.number(at.block, at.group, at.local)
        largest = self._largest(values)
        finite = b.bind(largest < T.uint32(SPECIAL << EXPONENT_BITS))
        carried = T.shift_right(largest + T.uint32(self.beyond), T.uint32(EXPONENT_BITS))
        exponent = b.bind(tirx.max(carried, T.uint32(LEAST_EXPONENT)))
        unit = _float(T.shift_left(exponent - T.uint32(self.scaled_bits - 1), T.uint32(EXPONENT_BITS)))
        b.store(self.unit, tirx.Select(finite, unit, _float(largest)) * T.float32(self.worth), place)
        shift = tirx.Select(finite, T.uint32(253 + self.scaled_bits) - exponent, T.uint32(1))
        factor = b.bind(_float(T.shift_left(shift, T.uint32(EXPONENT_BITS))))
        totals = self.begin_group()
        with b.loop(self.chunks_of_a_group) as chunk:
            self.split(values, factor, at, chunk, totals)
        return self.end_group(totals, place, finite)

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

    def end_group(self, totals: Any, place: Expr, finite: Expr) -> Expr:
        """Emit what becomes of it; returns whether digits leave out too much: never."""
        return False

    def split(self, values: Any, factor: Expr, at: DigitPlace, chunk: Expr, totals: Any) -> None:
        """Emit the digits of a row and chunk."""
        del totals
        count, numbers = self.chunk // self.columns, self.integers(values, factor, chunk)
        first = at.group * (self.layout.padded_group // self.columns) + chunk * count
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
        numbers = v.scratch(self.chunk, "int32")
        with b.vector(self.chunk) as lane:
            scaled = values[chunk * self.chunk + lane] * factor
            b.store(numbers, T.Cast("int32", self.whole(self._bounded(scaled))), lane)
        return numbers

    def _bounded(self, scaled: Expr) -> Expr:
        """Return a scaled element within the largest magnitude; NaN too becomes that."""
        largest = T.float32(self.largest)
        return tirx.max(tirx.min(scaled, largest), -largest)


def _pair(even: Expr, odd: Expr) -> Expr:
    """Return the upper halves of two integers side by side."""
    low = T.bitwise_and(T.shift_right(even, T.int32(HALF)), T.int32(0xFFFF))
    return T.reinterpret("uint32", T.bitwise_or(low, T.bitwise_and(odd, T.int32(-1 << HALF))))


def _float(bits: Expr) -> Expr:
    return T.reinterpret("float32", bits)


PASSES = 2
"""Passes over a group whose elements differ too much in size for one."""

LEFT, HELD = 0, 1
"""Sums of sizes in a group: what rounding left out, and elements up to `OUTLIER_BITS` below the largest."""

OUTLIER_BITS = 4
"""An element counts as at most this power of two less than the largest: outliers do not hide the others."""

MOST_LEFT_OUT: Mapping[str, float] = {"float16": 2.0**-11, "bfloat16": 2.0**-11, "float32": 2.0**-19.5}
"""Type of results -> what rounding may leave out of a group's elements in one pass, beside `HELD`.

An outlier of 16 times the others in every group, by weights of 0, then adds as much to the error as rounding
the result to float16 does, and 4 times that of float32 sums. Of normal, Laplace and gated activations at most
one group in a hundred takes two passes.
"""

HALF_LANE = 16
"""Bits of an element of a 32-bit lane as codes were packed."""


def columns_of_step(bits: int, step: int) -> tuple[int, ...]:
    """Return the columns of a unit whose codes are in the four bytes of each lane at a step.

    bits: Those of a code in its widest plane.
    """
    packed, slots = HALF_LANE // bits, BYTE_LANE // bits
    line, slot = divmod(step, slots)
    return tuple(2 * (line * packed + half * slots + slot) + odd for odd in range(2) for half in range(2))


@dataclass(frozen=True)
class ByteDigitActivations(DigitActivations):
    """Activations as digits of eight bits: ``words[block][step][row][digit]``, the uppermost first.

    Elements become integers, rounded, of 24 bits with their sign (three digits): one is off by at most
    ``2**-24`` of the power of two above the largest of its group. One of 16 bits is exact if it is at least
    ``2**-11`` of the largest (``2**-14`` in bfloat16). Where results are rounded to 16 bits as well, two
    digits do: elements are off by at most ``2**-16`` of that power. Where an outlier makes this too much for
    the other elements of a group, what rounding left of all rows of the block is multiplied in a second pass,
    with a unit of its own. What is prepared lies in the order of these visits.

    Weights are bytes that count from the smallest value of their type, for which the sums of a group's digits
    make up. Packed codes of float products lie in halves of 32-bit lanes; read as bytes, a step has four
    other columns (`columns_of_step`), and x follows them.

    element: The weight's type.
    starts: int32 ``[block][group][row][sum]``: what sums begin with, None where bytes are values.
    visits, order: int32 ``[block]`` and ``[block][visit]``: how many spans of K products walk, and which.
    most_left_out: What rounding may leave out, beside the elements (`MOST_LEFT_OUT`).
    """

    element: TType
    starts: Any
    visits: Any
    order: Any
    most_left_out: float

    @property
    def steps(self) -> Expr:
        """Steps that a block has room for: those of every visit."""
        return PASSES * super().steps

    @property
    def capacity(self) -> Expr:
        """Groups that a block has room for: those of every visit."""
        return PASSES * self.groups

    @property
    def span(self) -> int:
        """Groups that have as many passes: those of a unit."""
        return max(1, UNIT // self.layout.padded_group)

    def place(self, block: Expr, visit: Expr) -> Expr:
        """Return where the span of a visit is named; after the last one there is another."""
        return block * (self.capacity // self.span + 1) + visit

    def prepare(self, block: Expr, first: Expr) -> None:
        """Emit the preparation of one block: a second pass over spans of which one leaves out too much."""
        b.store(self.visits, T.int32(0), block)
        with b.loop(self.groups // self.span) as span:
            passes = v.scratch(1, "int32")
            b.store(passes, T.int32(1), 0)
            with b.loop(PASSES) as turn, b.when(turn < passes[0]):
                visit = v.kept(self.visits[block], "int32", 1)
                b.store(self.order, span, self.place(block, visit))
                b.store(self.visits, visit + 1, block)
                with b.loop(self.present(first)) as local, b.loop(self.span) as part:
                    at = DigitPlace(block, local, visit * self.span + part)
                    exceeded = self._prepare_pass(first + local, span * self.span + part, at, turn)
                    with b.when(tirx.And(turn == 0, exceeded)):
                        b.store(passes, T.int32(PASSES), 0)

    def _prepare_pass(self, row: Expr, group: Expr, at: DigitPlace, turn: Expr) -> Expr:
        """Emit what a pass multiplies of a row in a group; returns whether that leaves out too much."""
        values = self.read(row, group)
        if self.sums is not None:
            total = tirx.Select(turn == 0, column_sum(values, self.layout.padded_group), T.float32(0))
            b.store(self.sums, total, self.number(at.block, at.group, at.local))
        with b.when(turn > 0):
            self._leave(values, self.number(at.block, at.group - self.span, at.local))
        return self.prepare_group(values, at)

    def _leave(self, values: Any, place: Expr) -> None:
        """Emit what the first pass left of a row in a group: nothing beside what is infinite."""
        unit = b.bind(self.unit[place] / T.float32(self.worth))
        finite = b.bind(unit < T.float32("inf"))
        factor = b.bind(T.float32(1) / unit)
        with b.loop(self.layout.padded_group // LANES) as part, b.vector(LANES) as lane:
            value = values[part * LANES + lane]
            rest = value - self.whole(self._bounded(value * factor)) * unit
            b.store(values, tirx.Select(finite, rest, T.float32(0)), part * LANES + lane)

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
        return form_of(self.element).unit

    def begin_group(self) -> Any:
        """Allocate sums in 32 columns: of every digit, if sums begin with them, and of `LEFT` and `HELD`."""
        of_digits = None if self.starts is None else self._zeros(self.digits, "int32")
        return of_digits, self._zeros(2, "float32")

    def _zeros(self, count: int, dtype: str) -> Any:
        totals = v.scratch(count * self.chunk, dtype)
        for part in range(count):
            b.store(totals, v.constant(0, dtype, self.chunk), v.lanes(part * self.chunk, self.chunk))
        return totals

    def end_group(self, totals: Any, place: Expr, finite: Expr) -> Expr:
        """Emit what sums of a row in a group begin with: the smallest value times those of digits."""
        of_digits, of_sizes = totals
        if of_digits is not None:
            starts = (digit * self.chunk for digit in range(self.digits))
            self._begin_sums([of_digits[v.lanes(start, self.chunk)] for start in starts], place)
        left, held = (column_sum(of_sizes, self.chunk, part * self.chunk) for part in (LEFT, HELD))
        return tirx.And(finite, left > held * T.float32(self.most_left_out))

    def _begin_sums(self, digits: list[Expr], place: Expr) -> None:
        """Emit what sums begin with: those of digits times what bytes of weights count from."""
        form = form_of(self.element)
        totals = [v.kept(v.reduced("add", each) * T.int32(form.low), "int32", 1) for each in digits]
        if isinstance(
            form, BytePairs
        ):  # a digit and the lower byte are worth what the next and the upper are
            totals = [a + c for a, c in zip((*totals, T.int32(0)), (T.int32(0), *totals), strict=True)]
        for number, total in enumerate(totals):
            b.store(self.starts, total, place * len(totals) + number)

    def split(self, values: Any, factor: Expr, at: DigitPlace, chunk: Expr, totals: Any) -> None:
        """Emit the digits of a row and chunk."""
        count, numbers = self.chunk // self.columns, self.integers(values, factor, chunk)
        of_digits, of_sizes = totals
        self._add_sizes(of_sizes, values, factor, numbers, chunk)
        first = at.group * (self.layout.padded_group // self.columns) + chunk * count
        place = ((at.block * self.steps + first) * self.rows + at.local) * self.digits
        whole, pitch = v.lanes(0, self.chunk), self.rows * self.digits
        columns = [c for step in range(count) for c in columns_of_step(self.layout.planes[0].width, step)]
        for digit in reversed(range(self.digits)):
            rest = b.bind(numbers[whole])
            found = b.bind(T.Cast(f"int8x{self.chunk}", rest))
            wide = b.bind(T.Cast(f"int32x{self.chunk}", found))
            ordered = v.as_type(tirx.Shuffle([found], columns), f"uint32x{count}")
            b.store(self.words, ordered, T.ramp(place + digit, pitch, count))
            if of_digits is not None:
                own = v.lanes(digit * self.chunk, self.chunk)
                b.store(of_digits, of_digits[own] + wide, own)
            if digit:
                b.store(numbers, v.shifted(rest - wide, self.width, "int32", self.chunk), whole)

    def _add_sizes(self, sizes: Any, values: Any, factor: Expr, numbers: Any, chunk: Expr) -> None:
        """Emit sums of what rounding left out of scaled elements, and of their sizes up to a bound."""
        bound = T.float32(1 << (self.scaled_bits - OUTLIER_BITS))
        with b.vector(self.chunk) as lane:
            whole = T.Cast("float32", numbers[lane])
            left = T.fabs(values[chunk * self.chunk + lane] * factor - whole)
            b.store(sizes, sizes[LEFT * self.chunk + lane] + left, LEFT * self.chunk + lane)
            held = sizes[HELD * self.chunk + lane] + tirx.min(T.fabs(whole), bound)
            b.store(sizes, held, HELD * self.chunk + lane)
