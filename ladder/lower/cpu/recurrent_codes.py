"""LSTM on CPUs whose weights are codes of 8 bits; its state is rounded to such codes before each product.

All sequences of a batch share the range of their states, so they go forward together: the states lie in the
last two results. A step finds the range, rounds a row to codes, four to a word, and multiplies words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.recurrent import LANES, Recurrent
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.recurrent import Layer
from schedules.row_panels import Registers

Expr = Any

FOUR = 4
"""Codes in a word."""

LEVELS = 255


class CodedWeights(NamedTuple):
    """Signed codes of weights, and by column: sums less zero points, zero points, scales."""

    r: Any
    sums: Any
    less: Any
    factor: Any


class CodedScratch(NamedTuple):
    """What a step works in: its state, sums of gates, words of codes, their scale, zero point and sum."""

    state: list[Any]
    sums: Any
    codes: Any
    scale: Any
    zero: Any
    total: Any


class CodedLayer(Layer):
    """A layer being emitted: ``(gates, r, sums, less, factor, lengths, h, c, y, last h, last c)``.

    ``r[directions, words, 4 * gates * padded]`` has signed codes, four of a column side by side; ``sums`` are
    those of its columns less zero points, ``less`` the zero points, ``factor`` the scales.
    """

    def __init__(self, form: Recurrent, registers: Registers, has_dots: bool) -> None:
        self.dot = v.dot_int8 if has_dots else v.dot_bytes
        super().__init__(form, registers)

    @property
    def words(self) -> int:
        """Words of codes of a state."""
        return -(-self.form.hidden // FOUR)

    @property
    def blocks(self) -> int:
        """Vectors of such words."""
        return -(-self.words // LANES)

    @property
    def space(self) -> int:
        """Elements of a state whose codes fill whole vectors."""
        return self.blocks * LANES * FOUR

    def declare_weights(self) -> Any:
        count = len(self.form.backward)
        r = b.tensor("r", [count, self.words, FOUR * self.wide], "int8")
        columns = (("sums", "int32"), ("less", "int32"), ("factor", "float32"))
        return CodedWeights(r, *(b.tensor(name, [count, self.wide], dtype) for name, dtype in columns))

    def allocate(self) -> Any:
        state = [v.scratch(self.space, "float32"), v.scratch(self.size, "float32")]
        sums, codes = v.scratch(self.wide, "float32"), v.scratch(self.blocks * LANES, "int32")
        single = [v.scratch(1, dtype) for dtype in ("float32", "float32", "int32")]
        return CodedScratch(state, sums, codes, *single)

    def emit(self) -> None:
        for state, extent in zip(self.scratch.state, (self.space, self.size), strict=True):
            with b.loop(extent) as at:
                b.store(state, T.float32(0), at)
        for direction, backward in enumerate(self.form.backward):
            for first, last in zip(self.first, self.last, strict=True):
                with b.loop(self.batch) as row, b.loop(self.form.hidden) as at:
                    b.store(last, first[direction, row, at], direction, row, at)
            with b.loop(self.steps) as step:
                self.all_rows(direction, step, backward)

    def all_rows(self, direction: int, step: Expr, backward: bool) -> None:
        """Emit a step of all sequences that have it."""
        self.range_of_states(direction, step)
        with b.loop(self.batch) as row:

            def inside() -> None:
                place = v.scratch(1, "int32")
                length = tirx.min(self.lengths[row], self.steps)
                b.store(place, length - 1 - step if backward else step, 0)
                for state, last in zip(self.scratch.state, self.last, strict=True):
                    self.taken(state, last, direction, row)
                self.rounded()
                self.step(direction, row, place[0])
                for state, last in zip(self.scratch.state, self.last, strict=True):
                    with b.loop(self.form.hidden) as at:
                        b.store(last, state[at], direction, row, at)

            def behind() -> None:
                with b.loop(self.form.hidden) as at:
                    b.store(self.y, T.float32(0), step, direction, row, at)

            b.either(step < self.lengths[row], inside, behind)

    def taken(self, state: Any, last: Any, direction: int, row: Expr) -> None:
        """Emit the copy of a row to where a step works; zeros beyond it stay."""
        with b.loop(self.form.hidden) as at:
            b.store(state, last[direction, row, at], at)

    def range_of_states(self, direction: int, step: Expr) -> None:
        """Emit scale and zero point of states of sequences that go on, or ended one step before.

        Numbers that are lost make the scale lost.
        """
        ends = [v.scratch(LANES, "float32") for _ in range(3)]
        low, high, lost = ends
        for end in ends:
            b.store(end, v.constant(0, "float32"), v.lanes(0))
        with b.loop(self.batch) as row, b.when(step <= self.lengths[row]):
            self.taken(self.scratch.state[0], self.last[0], direction, row)
            with b.loop(self.space // LANES) as chunk:
                x = b.bind(self.scratch.state[0][v.lanes(chunk * LANES)])
                b.store(low, tirx.min(low[v.lanes(0)], x), v.lanes(0))
                b.store(high, tirx.max(high[v.lanes(0)], x), v.lanes(0))
                b.store(lost, lost[v.lanes(0)] + x * v.constant(0, "float32"), v.lanes(0))
        least, most, nothing = low[0], high[0], lost[0]
        for lane in range(1, LANES):
            least, most = tirx.min(least, low[lane]), tirx.max(most, high[lane])
            nothing = nothing + lost[lane]
        least = b.bind(least)
        span = b.bind((most - least) / T.float32(LEVELS))
        scale = b.bind(tirx.Select(span == T.float32(0), T.float32(1), span))
        b.store(self.scratch.scale, scale + nothing, 0)
        place = (T.float32(0) - least) / scale
        b.store(self.scratch.zero, T.nearbyint(tirx.max(tirx.min(place, T.float32(LEVELS)), T.float32(0))), 0)

    def rounded(self) -> None:
        """Emit the codes of a row's state, as words, and their sum."""
        scale, zero, sums = self.scratch.scale[0], self.scratch.zero[0], v.scratch(LANES, "int32")
        b.store(sums, v.constant(0, "int32"), v.lanes(0))
        with b.loop(self.blocks) as block, b.vector(LANES) as lane:
            word, total = T.int32(0), sums[lane]
            for at in range(FOUR):
                x = self.scratch.state[0][(block * LANES + lane) * FOUR + at]
                code = T.nearbyint(x / scale) + zero
                code = tirx.max(tirx.min(code, T.float32(LEVELS)), T.float32(0))
                whole = T.Cast("int32", code)
                word, total = word + whole * T.int32(1 << (8 * at)), total + whole
            b.store(self.scratch.codes, word, block * LANES + lane)
            b.store(sums, total, lane)
        found = sums[0]
        for lane in range(1, LANES):
            found = found + sums[lane]
        beyond = self.space - self.form.hidden
        b.store(self.scratch.total, found - T.Cast("int32", zero) * beyond, 0)

    def columns(self, direction: int, x: Any, begin: Expr, count: int, start: Callable[[Expr], Expr]) -> None:
        found = v.scratch(count * LANES, "int32")
        for at in range(count):
            b.store(found, v.constant(0, "int32"), v.lanes(at * LANES))
        with b.loop(self.words) as k:
            word = b.bind(v.splat(self.scratch.codes[k]))
            for at in range(count):
                place, first = v.lanes(at * LANES), (begin + at * LANES) * FOUR
                weights = self.weights.r[direction, k, v.lanes(first, LANES * FOUR)]
                b.store(found, self.dot(found[place], word, weights), place)
        zero = b.bind(v.splat(T.Cast("int32", self.scratch.zero[0])))
        total, scale = b.bind(v.splat(self.scratch.total[0])), b.bind(v.splat(self.scratch.scale[0]))
        for at in range(count):
            column = v.lanes(begin + at * LANES)
            whole = found[v.lanes(at * LANES)] - zero * self.weights.sums[direction, column]
            whole = whole - total * self.weights.less[direction, column]
            factor = scale * self.weights.factor[direction, column]
            value = v.fma(T.Cast("float32x16", whole), factor, start(begin + at * LANES))
            b.store(self.scratch.sums, value, column)
