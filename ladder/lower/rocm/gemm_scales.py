"""Reads the scales and zero points of an AMD kernel, and whose they are where columns hold groups of K."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any, cast

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.accumulators import ONES, Accumulators
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.groups import GroupRegisters, Groups, Reader, array_dtype, bytes4, left_by
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.dialect import Pieces
from ladder.lower.rocm.gemm_place import Place, Spec
from ladder.lower.rocm.machine import bfloat_halves
from ladder.lower.rocm.steps import DOTS, RUN, WaveStep
from schedules.waves import STEP_COLUMNS, STEP_ROWS, ZERO_WORDS, column_tiles

ELEMENT_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "uint32": 4}


class WaveGroupRegisters(GroupRegisters):
    """Scales and zero points of a tile as words.

    Narrow loads fill a whole register each; neighbouring rows of D arrive by one load. Of narrow
    variables LLVM would make pairs as soon as they arrive, and wait for them.
    """

    def __init__(
        self, groups: Groups, step: WaveStep, lane: Expr, types: tuple[str | None, str | None]
    ) -> None:
        self.types = dict(zip(("scales", "zeros"), types, strict=True))
        super().__init__(groups, step, lane, (None, None))
        scale_type = types[0]
        self.run_words = 0 if scale_type is None or self.rows < RUN else RUN * ELEMENT_BYTES[scale_type] // 4
        singles = [1] * self._scale_count
        widths = [self.run_words] * (self._scale_count // RUN) if self.run_words else singles
        self.scales = Pieces(widths) if scale_type else None
        self.zeros = Pieces([1] * self._zero_count) if types[1] else None

    def fetch(self, read: Reader) -> None:
        if self.run_words:
            for run in range(self._scale_count // RUN):
                granule, first = divmod(run * RUN, self.rows)
                row = self.step.lanes.slot_row(self.lane, first)
                value = cast(GroupReader, read).run(granule, row, self.run_words)
                self.scales.store(run, value, self.run_words)
        super().fetch(read)

    def put(self, array: str, at: int, value: Expr) -> None:
        if array == "zeros" or not self.run_words:
            getattr(self, array).store(at, value, 1)

    def word(self, array: str, at: int) -> Expr:
        """Return a word whose low bits are an element; others may be above them."""
        pieces = getattr(self, array)
        if array == "zeros" or not self.run_words:
            return pieces[at]
        word, place = divmod(at * self.run_words, RUN)
        return pieces[word] >> T.uint32(16) if place else pieces[word]

    def _exponent_word(self, row: int) -> Expr:
        return self._own_exponents(self.word("scales", row))

    def replicated(self, array: str, at: int) -> Expr:
        word = self.word(array, at)
        if self.types[array] == "int8":
            return bytes4(T.reinterpret(T.Cast("uint8", word), dtype="int8"))
        return word * T.uint32(0x00010001)

    def number(self, array: str, at: int) -> Expr:
        word = self.word(array, at)
        return NUMBERS[str(self.types[array])](word)


NUMBERS = {
    "float32": lambda word: T.reinterpret(word, dtype="float32"),
    "bfloat16": lambda word: T.reinterpret(word << T.uint32(16), dtype="float32"),
    "float16": lambda word: T.Cast("float32", T.reinterpret(T.Cast("uint16", word), dtype="float16")),
    "int8": lambda word: T.Cast("float32", T.reinterpret(T.Cast("uint8", word), dtype="int8")),
}
"""How words of each type become float32."""


@dataclass(frozen=True)
class GroupReader:
    """Loads the scales and zero points of a 32-row block for a K tile, as words.

    tile, row: The K tile, and the block.
    """

    groups: Groups
    args: Arguments
    tile: Expr
    row: Expr

    def _place(self, granule: int, row: Expr) -> tuple[Expr, Expr]:
        return self.groups.row(self.tile, granule), self.row * STEP_ROWS + row

    def __call__(self, name: str, granule: int, part: int, row: Expr) -> Expr:
        """Return one element, zero-extended to a word."""
        array = self.args.scales if name == "scales" else self.args.zeros
        group, column = self._place(granule, row)
        value = array[group, part, column] if len(array.shape) == 3 else array[group, column]
        return d.to_word(value, str(array.dtype))

    def run(self, granule: int, row: Expr, words: int) -> Expr:
        """Return the scales of neighbouring rows from ``row`` on as a vector of words."""
        group, column = self._place(granule, row)
        return d.as_type(self.args.scales[group, d.lanes(column, RUN)], f"uint32x{words}")


def row_of(place: Place, block: int) -> Expr:
    """Return a step's 32-row block; those beyond N repeat the last one, and are not stored."""
    return b.bind(T.min(place.row_block + block, place.all_blocks - 1))


def _sum_of(words: list[Expr], spec: Spec) -> Expr:
    """Return the float32 sum of the elements of words of x: by dot products, where the device has them."""
    activation = spec.gemm.activation
    dots = [step for step in DOTS if step.activation == activation and step.feature in spec.device.features]
    if not dots:  # CDNA3 has none of bfloat16
        halves = [half for word in words for half in bfloat_halves(word)]
        return reduce(add, halves)
    (dot,), total = dots, T.float32(0)
    for word in words:
        operands = [d.as_type(each, dot.operand) for each in (word, T.uint32(ONES[activation]))]
        total = dot.product("float32", dot.spelling, operands, total)
    return total


class ColumnAccumulators(Accumulators):
    """Accumulators that `Columns` flush, not the ends of groups."""

    @property
    def periods(self) -> set[int]:
        return set()


class Columns:
    """The groups of K of one activation row that the columns of matrix instructions have.

    Lanes of a column read x of its group, of the other columns' groups zeros: one chain of instructions keeps
    the sums of sixteen groups apart. A lane then multiplies eight sums by the scales of its own group, once
    for the sixteen, and waves hold no others.

    shared: LDS, as uint32 words.
    """

    def __init__(self, spec: Spec, place: Place, shared: Any) -> None:
        self.spec, self.place, self.shared = spec, place, shared
        types = (array_dtype(place.args.scales), None)
        blocks = range(spec.geo.row_blocks)
        self.scales = [WaveGroupRegisters(spec.groups, spec.step, place.lane, types) for _ in blocks]
        self.column = b.bind(place.lane % STEP_COLUMNS)
        self.tiles = column_tiles(spec.gemm, spec.schedule)
        self.sums_x = left_by(spec.decoder, spec.gemm).sums_x
        self.period: Expr = 0
        self.had: Expr = 0

    @property
    def per_stage(self) -> int:
        """Groups of a wave in a stage."""
        return self.spec.geo.slice_tiles // self.tiles

    @property
    def stages(self) -> int:
        """Stages in which every column has had a group: an even number."""
        return STEP_COLUMNS // self.per_stage

    def begin(self) -> None:
        """Emit the zeros in LDS, and the loads of the first scales."""
        with b.when(self.place.thread < ZERO_WORDS):
            b.store(self.shared, T.uint32(0), self.spec.geo.zeros + self.place.thread)
        self._fetch(T.int32(0))

    def takes(self, iteration: Expr, step: int) -> Expr:
        """Return whether this lane's column has x of a wave's tile ``step`` of a stage."""
        first = T.truncmod(iteration, self.stages) * self.per_stage
        return b.bind(self.column == first + step // self.tiles)

    def end_pair(self, multiplier: TileMultiplier, pair: Expr, is_last: Expr) -> None:
        """Emit the flush after two stages, where every column has had a group or K ends."""
        pairs = self.stages // 2
        with b.when(T.Or(T.truncmod(pair + 1, pairs) == 0, is_last) if pairs > 1 else T.bool(True)):
            self.period = b.bind(T.truncdiv(pair, pairs))
            self.had = b.bind((2 * (pair + 1) - self.period * self.stages) * self.per_stage)
            if multiplier.accumulators.flushes:
                multiplier.flush_all(list(self.scales))
            self._fetch(T.truncdiv(pair + 1, pairs))

    def known_sums(self, m_block: int) -> list[Expr]:
        """Return the sum of x of the lane's column in the period that ends, for rows g and g+8."""
        at = self.spec.geo.column_sum(self.period, self.place.slice, self.column)
        at = T.Select(self.column < self.had, at, self.spec.geo.zeros)  # others may be written just now
        value = b.bind(d.as_type(self.shared[at], "float32"))
        return [value, value]

    def sum_piece(self, words: list[Expr], iteration: Expr, chunk: Expr, exists: Expr) -> None:
        """Emit the sums of x over groups, from the words of a chunk of a stage of each thread, into LDS.

        exists: Whether the chunk is one of the stage.
        """
        if not self.sums_x:
            return
        geo, each = self.spec.geo, self.tiles * self.spec.geo.tile_chunks
        value = b.bind(_sum_of(words, self.spec))
        distance = 1
        while distance < each:
            value = b.bind(value + d.exchange(value, "float32", self.place.lane, distance))
            distance *= 2
        group, slice_groups = b.bind(chunk // each), self.per_stage
        column = T.truncmod(iteration, self.stages) * slice_groups + group % slice_groups
        at = geo.column_sum(T.truncdiv(iteration, self.stages), group // slice_groups, column)
        with b.when(T.And(chunk % each == 0, exists)):
            b.store(self.shared, d.as_type(value, "uint32"), at)

    def _fetch(self, period: Expr) -> None:
        """Emit the loads of the scales of the lane's group among the sixteen of a period."""
        geo, args = self.spec.geo, self.place.args
        own = b.bind((period * STEP_COLUMNS + self.column) * self.tiles)
        stage, step = T.truncdiv(own, geo.slice_tiles), T.truncmod(own, geo.slice_tiles)
        tile = stage * geo.stage_tiles + self.place.slice * geo.slice_tiles + step
        tile = b.bind(T.min(tile, args.k_tiles - 1))
        for block, registers in enumerate(self.scales):
            row = row_of(self.place, block)
            registers.fetch(GroupReader(self.spec.groups, args, tile, row))
