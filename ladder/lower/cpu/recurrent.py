"""Recurrent layers on CPUs: the steps of a sequence one after the other, gates in vector registers.

What gates take of the inputs of all steps is one product, computed before. A step multiplies the state with
the recurrent weight, whose rows lie as vectors of all gates, and makes the next state of the gates.

LSTM on CPUs whose weights are codes of 8 bits; its state is rounded to such codes before each product.

All sequences of a batch share the range of their states, so they go forward together: the states lie in the
last two results. A step finds the range, rounds a row to codes, four to a word, and multiplies words.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.recurrent import FOUR, LANES, Recurrent
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.llvm_functions import exp
from ladder.lower.cpu import vectors as v
from schedules.row_panels import Registers

NEAR = 0.05
"""Magnitude below which tanh is a polynomial."""


def emit_recurrent(form: Recurrent, registers: Registers, has_dots: bool, name: str) -> Any:
    """Emit the PrimFunc ``(gates, r, bias, lengths, h, [c,] y, last h[, last c])`` of a layer.

    ``gates[steps * batch, directions * gates * padded]`` is what the inputs give, with their biases;
    ``r`` is ``[directions, hidden, gates * padded]``; ``bias[directions, padded]`` is added to the state's
    product of a GRU's last gate; the others are as the standard has them, ``lengths`` int32. Where weights
    are codes, `CodedLayer` says what they are.
    """
    with b.function(name) as result:
        if form.codes:
            coded = CodedLayer(form, registers, has_dots)
            with v.helpers(v.BYTE_HELPERS):
                coded.emit()
        else:
            Layer(form, registers).emit()
    return result.func


class Weights(NamedTuple):
    """What multiplies the state, and what is added to that for the last gate of a GRU."""

    r: Any
    bias: Any


class Scratch(NamedTuple):
    """What a step works in: its state, the sums of all gates, the state that a GRU's gate resets."""

    state: list[Any]
    sums: Any
    reset: Any


class Layer:
    """A layer being emitted."""

    def __init__(self, form: Recurrent, registers: Registers) -> None:
        self.form, self.size = form, form.padded
        self.vectors = registers.sums * registers.lanes // LANES
        self.wide = form.gates * self.size
        self.steps, self.batch, rows = b.symbol("steps"), b.symbol("batch"), b.symbol("rows")
        count, hidden = len(form.backward), form.hidden
        self.gates = b.tensor("gates", [rows, count * self.wide], "float32")
        self.weights = self.declare_weights()
        self.lengths = b.tensor("lengths", [self.batch], "int32")
        states = ("h", "c") if form.cell == "LSTM" else ("h",)
        self.first = [b.tensor(s, [count, self.batch, hidden], "float32") for s in states]
        self.y = b.tensor("y", [self.steps, count, self.batch, hidden], "float32")
        self.last = [b.tensor(f"last_{s}", [count, self.batch, hidden], "float32") for s in states]
        self.scratch = self.allocate()

    def declare_weights(self) -> Any:
        """Declare the parameters that multiply the state, and what is added to that."""
        count = len(self.form.backward)
        r = b.tensor("r", [count, self.form.hidden, self.wide], "float32")
        return Weights(r, b.tensor("bias", [count, self.size], "float32"))

    def allocate(self) -> Any:
        """Allocate what a step works in."""
        state = [v.scratch(self.size, "float32") for _ in self.first]
        return Scratch(state, v.scratch(self.wide, "float32"), v.scratch(self.size, "float32"))

    def emit(self) -> None:
        """Emit every sequence, direction by direction."""
        for direction, backward in enumerate(self.form.backward):
            with b.loop(self.batch) as row:
                self.sequence(direction, row, backward)

    def sequence(self, direction: int, row: Expr, backward: bool) -> None:
        for state, first in zip(self.scratch.state, self.first, strict=True):
            with b.loop(self.form.hidden) as at:
                b.store(state, first[direction, row, at], at)
        length = v.scratch(1, "int32")
        b.store(length, tirx.min(self.lengths[row], self.steps), 0)
        with b.loop(self.steps) as step:

            def inside() -> None:
                place = v.scratch(1, "int32")
                b.store(place, length[0] - 1 - step if backward else step, 0)
                self.step(direction, row, place[0])

            b.either(step < length[0], inside, lambda: self.store_zeros(step, direction, row))
        for state, last in zip(self.scratch.state, self.last, strict=True):
            with b.loop(self.form.hidden) as at:
                b.store(last, self.unless_empty(row, state[at]), direction, row, at)

    def unless_empty(self, row: Expr, state: Expr) -> Expr:
        """Return an element of a last state; 0 of a sequence of no elements, as onnxruntime has it."""
        return tirx.Select(self.lengths[row] > 0, state, T.float32(0))

    def store_zeros(self, step: Expr, direction: int, row: Expr) -> None:
        """Emit the results of a step that a sequence does not have."""
        with b.loop(self.form.hidden) as at:
            b.store(self.y, T.float32(0), step, direction, row, at)

    def step(self, direction: int, row: Expr, place: Expr) -> None:
        given = place * self.batch + row
        (self.lstm if self.form.cell == "LSTM" else self.gru)(direction, given)
        with b.loop(self.form.hidden) as at:
            b.store(self.y, self.scratch.state[0][at], place, direction, row, at)

    def given(self, direction: int, row: Expr) -> Callable[[Expr], Expr]:
        """Return what the input gives to vectors of gates from a column on."""
        return lambda column: self.gates[row, v.lanes(direction * self.wide + column)]

    def added(self, direction: int) -> Callable[[Expr], Expr]:
        """Return what is added to the state's product for the last gate, from a column on."""
        return lambda column: self.weights.bias[direction, v.lanes(column - 2 * self.size)]

    def product(self, direction: int, x: Any, begin: int, end: int, start: Callable[[Expr], Expr]) -> None:
        """Emit the gates from one column to another: ``start + x r``."""
        whole, rest = divmod((end - begin) // LANES, self.vectors)
        if whole:
            with b.loop(whole) as block:
                self.columns(direction, x, begin + block * (self.vectors * LANES), self.vectors, start)
        if rest:
            self.columns(direction, x, begin + whole * self.vectors * LANES, rest, start)

    def columns(self, direction: int, x: Any, begin: Expr, count: int, start: Callable[[Expr], Expr]) -> None:
        sums = v.scratch(count * LANES, "float32")
        for at in range(count):
            b.store(sums, start(begin + at * LANES), v.lanes(at * LANES))
        with b.loop(self.form.hidden) as k:
            element = b.bind(v.splat(x[k]))
            for at in range(count):
                place = v.lanes(at * LANES)
                b.store(
                    sums,
                    v.fma(element, self.weights.r[direction, k, v.lanes(begin + at * LANES)], sums[place]),
                    place,
                )
        for at in range(count):
            b.store(self.scratch.sums, sums[v.lanes(at * LANES)], v.lanes(begin + at * LANES))

    def each(self, emit: Callable[[Expr, Callable[[Expr], Expr]], None]) -> None:
        """Emit something for every element of the state, in vectors."""
        with b.loop(self.size // LANES) as chunk, b.vector(LANES) as lane:
            emit(chunk * LANES + lane, v.kept_in(lane))

    def gate(self, number: int, at: Expr) -> Expr:
        return self.scratch.sums[number * self.size + at]

    def lstm(self, direction: int, row: Expr) -> None:
        """Gates are in the order input, output, forget, cell."""
        h, c = self.scratch.state
        self.product(direction, h, 0, self.wide, self.given(direction, row))

        def cell(at: Expr, kept: Callable[[Expr], Expr]) -> None:
            taken, shown, left = (sigmoid(self.gate(number, at), kept) for number in range(3))
            new = kept(left * c[at] + taken * tanh(self.gate(3, at), kept))
            b.store(c, new, at)
            b.store(h, shown * tanh(new, kept), at)

        self.each(cell)

    def gru(self, direction: int, row: Expr) -> None:
        """Gates are in the order update, reset, hidden."""
        (h,), size, given = self.scratch.state, self.size, self.given(direction, row)
        self.product(direction, h, 0, 2 * size, given)
        if self.form.inside:
            self.product(direction, h, 2 * size, self.wide, self.added(direction))
        else:
            self.each(
                lambda at, kept: b.store(self.scratch.reset, sigmoid(self.gate(1, at), kept) * h[at], at)
            )
            self.product(direction, self.scratch.reset, 2 * size, self.wide, given)

        def cell(at: Expr, kept: Callable[[Expr], Expr]) -> None:
            inner = self.gate(2, at)
            if self.form.inside:
                column = direction * self.wide + 2 * size + at
                inner = self.gates[row, column] + sigmoid(self.gate(1, at), kept) * inner
            new, update = tanh(kept(inner), kept), sigmoid(self.gate(0, at), kept)
            b.store(h, kept((T.float32(1) - update) * new + update * h[at]), at)

        self.each(cell)


def sigmoid(x: Expr, kept: Callable[[Expr], Expr]) -> Expr:
    """Return ``1 / (1 + exp(-x))``."""
    return kept(T.float32(1) / (T.float32(1) + exp(T.float32(0) - kept(x), kept)))


def tanh(x: Expr, kept: Callable[[Expr], Expr]) -> Expr:
    """Return ``(1 - e) / (1 + e)``, ``e = exp(-2 |x|)``, with the sign of x; a polynomial near 0."""
    x = kept(x)
    magnitude = kept(tirx.max(x, T.float32(0) - x))
    small = kept(exp(magnitude * T.float32(-2), kept))
    far = kept((T.float32(1) - small) / (T.float32(1) + small))
    signed = tirx.Select(x < T.float32(0), T.float32(0) - far, far)
    square = kept(x * x)
    near = x * (square * (square * T.float32(2 / 15) + T.float32(-1 / 3)) + T.float32(1))
    return kept(tirx.Select(magnitude < T.float32(NEAR), near, signed))


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
            for last in self.last:
                with b.loop(self.batch) as row, b.loop(self.form.hidden) as at:
                    b.store(last, self.unless_empty(row, last[direction, row, at]), direction, row, at)

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

            b.either(step < self.lengths[row], inside, lambda: self.store_zeros(step, direction, row))

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
