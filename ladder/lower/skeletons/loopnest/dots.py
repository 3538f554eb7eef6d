"""Nests whose sums stay in vector registers: weights are decoded next to the multiply.

A thread keeps the sums of one register tile, walks a group of K, and adds the scaled group to float32
totals; for the next rows of the turn it decodes the same weights again, now from cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.ir.program import AddGroup, Copy, Fill, Loop, Multiply, Store
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.skeletons.loopnest.decode import form_of, units_ahead
from ladder.lower.skeletons.loopnest.digits import ByteDigitActivations, DigitActivations
from ladder.lower.skeletons.loopnest.nest import At, Nest, offset_of
from schedules.cpu_layout import LANES, ROWS, UNIT
from schedules.instructions import steps_in_16_bits

CHAINS = 4
"""Sums that a register tile needs at least: a multiply takes as many cycles as it starts in."""

NUMBERS = "numbers"
"""Zero points and scales of each panel in a group."""

TAILS: Mapping[int, tuple[int, ...]] = {16: (4, 8, 12), 8: (2, 4, 6)}
"""Rows of a register tile -> rows, fewer, of tiles for what is left of x at its end."""

HALVES = 2 * LANES
"""Sums of 16 bits in a vector."""


class VectorNest(Nest):
    """A kernel on vector registers.

    starts_from_sums: Registers hold what the offset adds from the beginning of a group on.
    """

    starts_from_sums = True

    def inner_rows(self, loop: Loop, at: At) -> None:
        """Emit the loop over the blocks of the turn: a register tile has the rows of one, or of its end."""
        tile = self.kernel.rows
        with b.loop(at.here) as block:
            left = b.bind(self.args.m - (at.first + block) * tile)
            self._rows_left(loop, replace(at, block=block), left, (*TAILS.get(tile, ()), tile))

    def _rows_left(self, loop: Loop, at: At, left: Expr, sizes: tuple[int, ...]) -> None:
        """Emit the register tile of the fewest rows that holds those that are left, up to the largest."""
        *fewer, rows = sizes
        tile = partial(type(self)(replace(self.kernel, rows=rows)).body, loop.body, at)
        if fewer:
            b.either(left > fewer[-1], tile, lambda: self._rows_left(loop, at, left, tuple(fewer)))
        else:
            tile()

    def fill(self, fill: Fill, at: At) -> At:
        """Emit the beginning of the totals in memory, or of sums in registers."""
        if fill.target.tile.level == "cache":
            at = self.allocate(at)
            self.clear(fill, at)
            return at
        count = self.kernel.panels * self.width
        sums = v.scratch(self.partial * count * LANES, self.held)
        for index in range(count):
            b.store(sums, self.beginning(at, index % self.width), v.lanes(index * LANES))
        for index in range(count, self.partial * count):
            b.store(sums, v.constant(0, self.held), v.lanes(index * LANES))
        # Read here: what multiplies would move behind the branches on the type of scales, but not its loads.
        ((add, _),) = self.program.find(AddGroup)
        assert isinstance(add, AddGroup)
        numbers = [self.numbers(add, at, panel) for panel in range(self.kernel.panels)]
        return replace(at, tiles={**at.tiles, fill.target.name: sums, NUMBERS: numbers})

    def beginning(self, at: At, row: int) -> Expr:
        """Return what the sums of a row in a group begin with: what the offset of the codes adds, or 0."""
        if self._begins_with_offset:
            return v.splat(self.kernel.x.sum(at.block, at.x_group, row))
        return v.constant(0, self.held)

    @property
    def held(self) -> str:
        """Element type of sums in registers."""
        return self.kernel.accumulator

    @property
    def width(self) -> int:
        """Sums of a column: one of each row, or of each digit of a row."""
        return self.kernel.rows

    @property
    def partial(self) -> int:
        """Partial sums of each sum, which steps take in turn: integers add in any order."""
        count = self.kernel.panels * self.width
        return 1 if self.held != "int32" else -(-CHAINS // count)

    def place(self, panel: int, row: int, turn: int = 0) -> Expr:
        """Return where sums of a panel lie; ``row`` counts rows, or their digits, ``turn`` partial sums."""
        return v.lanes(((turn * self.kernel.panels + panel) * self.width + row) * LANES)

    @property
    def _begins_with_offset(self) -> bool:
        """Whether sums begin with it: integers add in any order."""
        exact = self.kernel.accumulator == "int32"
        return self.starts_from_sums and exact and offset_of(self.program) is not None

    def without_zero(self, add: AddGroup, value: Expr, source: tuple[Expr, Expr, Expr], zeros: Expr) -> Expr:
        return value if self._begins_with_offset else super().without_zero(add, value, source, zeros)

    def copy(self, copy: Copy, at: At) -> None:
        """Emit nothing: words are loaded and decoded step by step, where they are multiplied."""

    def groups(self, loop: Loop, at: At) -> None:
        """Emit the loop over groups, over units that hold two, or over these two."""
        padded = self.kernel.layout.padded_group
        if loop.over == "unrolled" and padded:
            for half in range(UNIT // padded):
                first, prepared = (unit * (UNIT // padded) + half for unit in (at.unit, at.x_unit))
                self.body(loop.body, replace(at, group=first, x_group=prepared, half=half))
        elif loop.over == "unrolled":
            self.body(loop.body, replace(at, extent=self.args.units))
        elif loop.step > 1:
            with self.spans(self.args.units, at) as (unit, visit):
                self.body(loop.body, replace(at, unit=unit, x_unit=visit))
        else:
            units = padded // UNIT if padded else self.args.units
            with self.spans(self.args.groups, at) as (group, visit):
                here = replace(at, group=group, unit=group * units, extent=units)
                self.body(loop.body, replace(here, x_group=visit, x_unit=visit * units))

    @contextmanager
    def spans(self, count: Expr, at: At) -> Iterator[tuple[Expr, Expr]]:
        """Emit the loop over groups, or units of several; yields which, and where it is prepared."""
        del at
        with b.loop(count) as span:
            yield span, span

    def depth(self, loop: Loop, at: At) -> None:
        """Emit the loop over the units of a group, if there are several."""
        if at.half >= 0 or (isinstance(at.extent, int) and at.extent == 1):
            self.body(loop.body, at)
            return
        with b.loop(at.extent) as unit:
            self.body(loop.body, replace(at, unit=at.unit + unit, x_unit=at.x_unit + unit))

    def multiply(self, product: Multiply, at: At) -> None:
        """Emit the steps of one unit, or of half of one."""
        steps = self.kernel.layout.steps
        self.steps(
            product,
            at,
            range(steps) if at.half < 0 else range(at.half * steps // 2, (at.half + 1) * steps // 2),
        )

    def steps(self, product: Multiply, at: At, some: range) -> None:
        """Emit some steps of a unit: decode each panel, multiply by every row of x."""
        kernel = self.kernel
        sources = [kernel.source(at.tile, panel, at.unit) for panel in range(kernel.panels)]
        words_per_unit, steps = UNIT // kernel.x.columns, kernel.layout.steps
        words_per_step = words_per_unit // steps
        for step in some:
            weights = [kernel.decode(source, step) for source in sources]
            for part in range(words_per_step):
                position = at.x_unit * words_per_unit + step * words_per_step + part
                for row in range(self.width):
                    word = kernel.x.word(at.block, position, row)
                    turn = (step * words_per_step + part) % self.partial
                    self.multiply_word(product, at, row, word, [panel[part] for panel in weights], turn)

    def multiply_word(
        self, product: Multiply, at: At, row: int, word: Expr, weights: list[Expr], turn: int
    ) -> None:
        """Emit the products of one word of x with every panel."""
        x, sums = v.splat(b.bind(word) if self.kernel.panels > 1 else word), at.tiles[product.total]
        for panel, weight in enumerate(weights):
            place = self.place(panel, row, turn)
            b.store(sums, INSTRUCTIONS[product.by](sums[place], weight, x), place)

    def add(self, add: AddGroup, at: At) -> None:
        """Emit the addition of a group for the whole register tile."""
        self._fold(at.tiles[add.value])
        if add.scale and self.kernel.panels == 1 and units_ahead(self.program):
            self._prefetch_scales(add.scale, at)
        for panel, numbers in enumerate(at.tiles[NUMBERS]):
            for row in range(self.kernel.rows):
                place = v.lanes((panel * self.kernel.x.rows + row) * LANES)
                value = self.sums_of(add, at, panel, row)
                self.add_group(add, at.tiles[add.total], value, place, (at.block, at.x_group, row), numbers)

    def _prefetch_scales(self, name: str, at: At) -> None:
        """Emit the prefetch of what the next tile scales the group by: so few bytes form no stream."""
        scales = self.args[name]
        _, columns, size = scales.shape
        place = (T.Cast("int64", at.group) * columns + (at.tile + 1) * ROWS) * size
        v.prefetch(T.address_of(scales.view(-1)[place]))

    def _fold(self, sums: Any) -> None:
        """Emit the additions of partial sums."""
        for turn in range(1, self.partial):
            for panel in range(self.kernel.panels):
                for row in range(self.width):
                    place = self.place(panel, row)
                    b.store(sums, sums[place] + sums[self.place(panel, row, turn)], place)

    def sums_of(self, add: AddGroup, at: At, panel: int, row: int) -> Expr:
        """Return the sums of a row and panel in a group."""
        return at.tiles[add.value][self.place(panel, row)]

    def store(self, store: Store, at: At) -> None:
        """Emit the output of a register tile."""
        with b.loop(self.kernel.rows) as row:
            self.store_row(store, at, row, (at.first + at.block) * self.kernel.x.rows + row)


class PairNest(VectorNest):
    """A kernel on vector registers whose products add in lanes of 16 bits, while that loses nothing."""

    starts_from_sums = False  # sixteen registers have no room for it
    partial = 1

    def steps(self, product: Multiply, at: At, some: range) -> None:
        """Emit runs of steps, each with sums of 16 bits that are then added in 32."""
        places, sums = range(self.kernel.rows * self.kernel.panels), at.tiles[product.total]
        run = steps_in_16_bits(self.kernel.layout.bits)
        for begin in range(some.start, some.stop, run):
            pairs = v.scratch(len(places) * HALVES, "int16")
            inside = replace(at, tiles={**at.tiles, product.total: pairs})
            self.fresh = set(places)
            super().steps(product, inside, range(begin, min(begin + run, some.stop)))
            for number in places:
                place, found = v.lanes(number * LANES), pairs[v.lanes(number * HALVES, HALVES)]
                b.store(sums, sums[place] + v.folded_pairs(found), place)

    def multiply_word(
        self, product: Multiply, at: At, row: int, word: Expr, weights: list[Expr], turn: int
    ) -> None:
        """Emit the sums of pairs of products of one word of x with every panel."""
        del turn
        x, pairs = b.bind(v.splat(word)), at.tiles[product.total]
        for panel, weight in enumerate(weights):
            number = panel * self.kernel.rows + row
            place, found = v.lanes(number * HALVES, HALVES), v.byte_pairs(weight, x)
            b.store(pairs, found if number in self.fresh else v.added_pairs(pairs[place], found), place)
            self.fresh.discard(number)


class DigitNest(VectorNest):
    """A kernel on vector registers whose sums are integers, one of each digit of a row and column."""

    @property
    def x(self) -> DigitActivations:
        """The prepared activations."""
        assert isinstance(self.kernel.x, DigitActivations)
        return self.kernel.x

    held = "int32"

    @property
    def width(self) -> int:
        """Sums of a column: one of each digit of a row."""
        return self.kernel.rows * self.sums_of_row

    @property
    def sums_of_row(self) -> int:
        """Sums of a row and column, each worth as much more as a digit than the next."""
        return self.x.digits

    @property
    def joined(self) -> int:
        """Digits whose sums in a group, joined in integers, do not exceed 32 bits."""
        return 1

    def sums_of(self, add: AddGroup, at: At, panel: int, row: int) -> Expr:
        """Return what the sums of all digits are worth."""
        x = self.x
        first, *rest = (
            at.tiles[add.value][self.place(panel, row * self.sums_of_row + number)]
            for number in range(self.sums_of_row)
        )
        for lower in rest[: self.joined - 1]:
            first = v.shifted(first, -x.width, "int32", LANES) + lower
        upper = T.Cast(f"float32x{LANES}", first)
        for lower in rest[self.joined - 1 :]:
            wide = T.Cast(f"float32x{LANES}", lower)
            upper = v.fma(upper, v.constant(float(1 << x.width), "float32"), wide)
        return upper * v.splat(x.unit[x.number(at.block, at.x_group, row)])


class ByteDigitNest(DigitNest):
    """A kernel on vector registers whose weights are bytes: sums begin with what these leave out."""

    @property
    def x(self) -> ByteDigitActivations:
        """The prepared activations."""
        assert isinstance(self.kernel.x, ByteDigitActivations)
        return self.kernel.x

    @contextmanager
    def spans(self, count: Expr, at: At) -> Iterator[tuple[Expr, Expr]]:
        """Emit the loop over visits.

        One over passes inside one over spans lets LLVM keep decoded weights, for which registers are few.
        """
        del count
        following = v.scratch(1, "int32")  # read one visit ahead: addresses of weights depend on it
        b.store(following, self.x.order[self.x.place(at.block, 0)], 0)
        with b.loop(self.x.visits[at.block]) as visit:
            span = v.kept(following[0], "int32", 1)
            b.store(following, self.x.order[self.x.place(at.block, visit + 1)], 0)
            yield span, visit

    @property
    def joined(self) -> int:
        """Digits whose sums in a group, joined in integers, do not exceed 32 bits."""
        columns, form = self.kernel.layout.padded_group, form_of(self.x.element)
        most = columns * max(form.largest + form.low, -form.low)
        return 1 + (most << 2 * self.x.width - 1 < 1 << 31)

    def beginning(self, at: At, row: int) -> Expr:
        """Return what the sums of a digit of a row in a group begin with."""
        if self.x.starts is None:
            return super().beginning(at, row)
        return v.splat(self.x.starts[self.x.number(at.block, at.x_group, 0) * self.sums_of_row + row])


class BytePairNest(ByteDigitNest):
    """A kernel on vector registers whose weights are two bytes: sums are of digits, upper and lower bytes."""

    joined = 1

    @property
    def sums_of_row(self) -> int:
        """Sums of a row and column: digits and bytes of one number in all share one."""
        return self.x.digits + 1

    def steps(self, product: Multiply, at: At, some: range) -> None:
        """Emit some steps of a unit: decode each panel, multiply both bytes by every digit of x."""
        kernel, digits = self.kernel, self.x.digits
        sources = [kernel.source(at.tile, panel, at.unit) for panel in range(kernel.panels)]
        for step in some:
            weights = [kernel.decode(source, step) for source in sources]
            position = at.x_unit * kernel.layout.steps + step
            for row, digit in itertools.product(range(kernel.rows), range(digits)):
                word = b.bind(kernel.x.word(at.block, position, row * digits + digit))
                for number in range(2):
                    parts = [panel[number] for panel in weights]
                    place = row * self.sums_of_row + digit + number
                    self.multiply_word(product, at, place, word, parts, step % self.partial)


def _fma(total: Expr, weights: Expr, x: Expr) -> Expr:
    return v.fma(weights, v.as_type(x, "float32x16"), total)


INSTRUCTIONS: Mapping[str, Callable[[Expr, Expr, Expr], Expr]] = {
    "avx512_bf16": v.dot_bf16,
    "avx512_vnni": v.dot_int8,
    "avx512_vnni16": v.dot_int16,
    "avx512_vnni8": v.dot_int8,
    "avx512_vnni8x2": v.dot_int8,
    "avx512_vnni8w2": v.dot_int8,
    "fma": _fma,
}
"""Instruction -> what emits ``total`` plus the products of one step."""
