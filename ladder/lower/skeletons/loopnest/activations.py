"""Activations as kernels read them: words of one step, rows side by side, padded with zeros.

``words[block][step][row]`` holds 32 bits of one row: a float32, a bfloat16 pair or four
int8, so that a multiply takes its operand by a broadcast from consecutive memory. Columns follow
the packed weight, including the padding of groups. ``sums[block][group][row]`` are the sums of
x over a group: what zero points multiply, or already times the offset of the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.vectors import as_float, bits_of
from schedules.cpu_layout import LANES, UNIT, CpuLayout

WORD_COLUMNS = {"float32": 1, "bfloat16": 2, "int8": 4, "digits": 2, "bytes": 4, "two_bytes": 4, "terms": 2}
"""Columns in one 32-bit word of each operand type."""

PARTS = 8
"""Sums of every eighth word of a row, which are then added in order."""


@dataclass(frozen=True)
class Activations:
    """The prepared activations of a number of blocks of rows.

    layout: The packed weight's layout, which the columns follow.
    operand: ``"float32"``, ``"bfloat16"``, ``"int8"``, ``"terms"`` or digits.
    activation: Element type of x.
    rows: Rows per block, a power of two up to 16.
    x: The argument ``[M, K]``.
    m, k, units, groups: Extents: rows and columns of x, packed units and groups of the weight.
    words, sums: Where they are kept; ``sums`` is None where nothing needs it.
    factor: What sums are kept times.
    """

    layout: CpuLayout
    operand: str
    activation: str
    rows: int
    x: Any
    m: Expr
    k: Expr
    units: Expr
    groups: Expr
    words: Any
    sums: Any
    factor: int

    @property
    def digits(self) -> int:
        """Words of one row and step."""
        return 1

    @property
    def columns(self) -> int:
        """Columns per word."""
        return WORD_COLUMNS[self.operand]

    @property
    def chunk(self) -> int:
        """Columns prepared at a time: they never cross a group."""
        return min(UNIT, self.layout.padded_group or UNIT)

    @property
    def chunks_of_a_group(self) -> Expr:
        """Chunks that a group has."""
        padded = self.layout.padded_group
        return padded // self.chunk if padded else self.units * (UNIT // self.chunk)

    def word(self, block: Expr, step: Expr, local: int) -> Expr:
        """Return one word of a block; ``step`` counts steps along K, ``local`` rows, or their digits."""
        return self.words[(block * self.steps + step) * (self.rows * self.digits) + local]

    @property
    def steps(self) -> Expr:
        """Steps that a block has room for."""
        return self.units * (UNIT // self.columns)

    @property
    def capacity(self) -> Expr:
        """Groups that a block has room for."""
        return self.groups

    def number(self, block: Expr, group: Expr, local: Expr) -> Expr:
        """Return where one number of a row in a group lies."""
        return (block * self.capacity + group) * self.rows + local

    def sum(self, block: Expr, group: Expr, local: int) -> Expr:
        """Return the sum of a row of x over a group times the factor, int32 for int8, else float32."""
        return self.sums[self.number(block, group, local)]

    def prepare(self, block: Expr, first: Expr) -> None:
        """Emit the preparation of one block, whose first row is ``first``."""
        count = self.units * (UNIT // self.chunk)
        with b.loop(self.present(first)) as local, b.loop(count) as chunk:
            self._chunk(block, first + local, local, chunk)
        if self.sums is not None:
            with b.loop(self.groups) as group:
                self._sum_group(block, group)

    def present(self, first: Expr) -> Expr:
        """Return how many rows of a block are rows of x: sums of the others are stored nowhere."""
        return tirx.min(self.rows, self.m - first) if self.rows > 1 else 1

    def _chunk(self, block: Expr, row: Expr, local: Expr, chunk: Expr) -> None:
        """Emit the words of one row and chunk."""
        start, limit = self._source(chunk)
        count = self.chunk // self.columns
        target = (block * self.steps + chunk * count) * self.rows + local
        index = T.ramp(target, self.rows, count)
        whole = tirx.And(row < self.m, start + self.chunk <= limit)

        def guarded() -> None:
            with b.loop(count) as step:
                column = start + step * self.columns
                parts = [self._guarded(row, column + e, limit) for e in range(self.columns)]
                b.store(self.words, self._join(parts), target + step * self.rows)

        b.either(whole, lambda: b.store(self.words, self._vector(row, start, count), index), guarded)

    def _source(self, chunk: Expr) -> tuple[Expr, Expr]:
        """Return the first column of x of a chunk and the column before which its group ends."""
        if self.layout.group == 0:
            return chunk * self.chunk, self.k
        per_group = self.layout.padded_group // self.chunk
        group = chunk // per_group
        start = group * self.layout.group + (chunk % per_group) * self.chunk
        return start, tirx.min(self.k, (group + 1) * self.layout.group)

    def widen(self, values: Any, row: Expr, chunk: Expr, at: Expr) -> None:
        """Emit the elements of a row and chunk as float32, 0 outside x."""
        start, limit = self._source(chunk)

        def whole() -> None:
            with b.vector(self.chunk) as lane:
                b.store(values, as_float(self.x[row, start + lane], self.activation), at + lane)

        def guarded() -> None:
            with b.loop(self.chunk) as lane:
                inside = tirx.And(row < self.m, start + lane < limit)
                value = T.if_then_else(
                    inside, as_float(self.x[row, start + lane], self.activation), T.float32(0)
                )
                b.store(values, value, at + lane)

        b.either(tirx.And(row < self.m, start + self.chunk <= limit), whole, guarded)

    def _guarded(self, row: Expr, column: Expr, limit: Expr) -> Expr:
        """Return the operand bits of one element, 0 outside x."""
        inside = tirx.And(row < self.m, column < limit)
        return T.if_then_else(inside, self._element(self.x[row, column]), T.uint32(0))

    def _element(self, value: Expr) -> Expr:
        """Return the operand bits of one element as uint32."""
        if self.operand == "int8" or (self.operand, self.activation) == ("bfloat16", "bfloat16"):
            return T.Cast("uint32", bits_of(value, self.activation))
        bits = T.reinterpret("uint32", as_float(value, self.activation))
        return T.shift_right(bits, T.uint32(16)) if self.operand == "bfloat16" else bits

    def _join(self, parts: list[Expr]) -> Expr:
        """Return one word of the elements of a step."""
        width = 32 // self.columns
        result = parts[0]
        for position, part in enumerate(parts[1:], 1):
            result = T.bitwise_or(result, T.shift_left(part, T.uint32(width * position)))
        return result

    def _vector(self, row: Expr, start: Expr, count: int) -> Expr:
        """Return ``count`` words of a chunk that lies inside x."""
        if self.operand == self.activation:
            return v.as_type(self.x[row, v.lanes(start, self.chunk)], f"uint32x{count}")
        words = v.scratch(count, "uint32")
        with b.vector(count) as step:
            column = start + step * self.columns
            parts = [self._element(self.x[row, column + e]) for e in range(self.columns)]
            b.store(words, self._join(parts), step)
        return words[v.lanes(0, count)]

    def _sum_group(self, block: Expr, group: Expr) -> None:
        """Emit the sums of one group for all rows: lane ``i`` holds row ``i % rows``.

        Floats of a row are added in one order, however many rows a block has.
        """
        dtype = "int32" if self.operand == "int8" else "float32"
        steps = (self.layout.padded_group or UNIT) // self.columns
        width = min(16, steps * self.rows) if dtype == "int32" else min(PARTS, steps) * self.rows
        vectors = steps * self.rows // width * (self.units if self.layout.group == 0 else 1)
        start = (block * self.steps + group * steps) * self.rows
        total = v.scratch(width, dtype)
        b.store(total, v.constant(0, dtype, width), v.lanes(0, width))
        with b.loop(vectors) as index:
            words = b.bind(self.words[v.lanes(start + index * width, width)])
            b.store(total, total[v.lanes(0, width)] + self._values(words, width), v.lanes(0, width))
        for local in range(self.rows):
            result = total[local]
            for lane in range(local + self.rows, width, self.rows):
                result = result + total[lane]
            result = result if self.factor == 1 else result * tirx.const(self.factor, dtype)
            b.store(self.sums, result, self.number(block, group, local))

    def _values(self, words: Expr, width: int) -> Expr:
        """Return the sum of the elements of every word."""
        if self.operand == "float32":
            return v.as_type(words, f"float32x{width}")
        if self.operand == "bfloat16":
            low = v.shifted(words, -16, "uint32", width)
            high = v.masked(words, 0xFFFF0000, "uint32", width)
            return v.as_type(low, f"float32x{width}") + v.as_type(high, f"float32x{width}")
        signed = v.as_type(words, f"int32x{width}")
        total = v.shifted(signed, 24, "int32", width)
        for left in (8, 16, 24):
            total = total + v.shifted(v.shifted(signed, -left, "int32", width), 24, "int32", width)
        return total


def column_sum(values: Any, count: int, start: int = 0) -> Expr:
    """Emit the sum of float32 in memory, a multiple of 16 of them, and return it."""
    total = v.scratch(LANES, "float32")
    b.store(total, v.constant(0, "float32"), v.lanes(0))
    with b.loop(count // LANES) as part:
        b.store(total, total[v.lanes(0)] + values[v.lanes(start + part * LANES)], v.lanes(0))
    return b.bind(sum((total[lane] for lane in range(1, LANES)), total[0]))
