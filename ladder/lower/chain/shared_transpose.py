"""Shared-memory transpose: a block reads a tile along one axis and uses it along another.

A chain whose input is contiguous along an axis that is not its result's last one (a transpose lies between)
would touch a line of memory per element. A block reads the tile in vectors along the input's axis, puts it
into shared memory transposed, and goes on as if the input lay as the result does. Columns are swizzled so
that neither side has bank conflicts: 16-byte chunk c of row r lies at ``c ^ (r / V * S) % 8 ^ r % 2 * 4``.
V is the elements of a vector along rows; S spreads the few vectors of a low tile over all eight chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.extents import product
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.indices import Index, is_same, variables_of
from ladder.lower.chain.nest import BYTES, uses
from ladder.lower.chain.vectors import ACCESS_BYTES, Shared, element
from schedules.schedule import check
from tile_types.errors import ScheduleError

CHUNK = 4
"""32-bit words of a chunk: what one lane reads from shared memory at once."""

CHUNKS = 8
"""Chunks that all banks hold once."""


@dataclass(frozen=True)
class Staged:
    """One read that goes through shared memory.

    position: Which of the reads of an element it is.
    name, dtype: The input and its type in memory.
    first: The tile's first word in shared memory.
    """

    position: int
    name: str
    dtype: str
    first: int


class SharedTranspose:
    """The tiles of one kernel.

    axes: Of the result's, those that count as a tile's rows, the one that rows run along first at the end.
    """

    def __init__(self, nest: GpuNest, axes: Sequence[int]) -> None:
        self.nest, self.values, self.axes = nest, nest.values, axes
        self.value = nest.graph.outputs[0]
        shape, extents = nest.shape(self.value), nest.graph.tile(self.value).shape
        self.group = [shape[axis] for axis in axes]
        self.others = [axis for axis in range(len(shape) - 1) if axis not in axes]
        self.outer = [shape[axis] for axis in self.others]
        self.columns = shape[-1]
        self.rows = nest.extent(product([extents[axis] for axis in axes]))
        self.tile_rows, self.tile_columns = nest.mapping.tile
        self.span, found = self.find()
        """Elements of a vector along rows."""
        dtypes = [stored_type(nest.graph.tile(name).ttype.name) for _, name in found]
        sizes = [self.tile_rows * self.pitch(dtype) for dtype in dtypes]
        self.staged = [
            Staged(position, name, dtype, sum(sizes[:at]))
            for at, ((position, name), dtype) in enumerate(zip(found, dtypes, strict=True))
        ]
        self.words = sum(sizes)
        """Of shared memory."""

    def place(self, outer: Sequence[Expr], row: Expr, column: Expr) -> Index:
        group = self.nest.unravelled(row, self.group)
        along = dict(zip((*self.others, *self.axes), (*outer, *group), strict=True))
        return (*(along[axis] for axis in sorted(along)), column)

    def find(self) -> tuple[int, list[tuple[int, str]]]:
        """Return the widest vectors that reads along rows can have, and these reads as `along_rows` does."""
        for span in (8, 4, 2, 1):
            if found := self.along_rows(span):
                return span, found
        raise ScheduleError("nothing of this chain lies along the tile's rows")

    def filled(self) -> float:
        """Return how much of a tile has rows; 1 where their number is open."""
        return min(1.0, self.rows / self.tile_rows) if isinstance(self.rows, int) else 1.0

    def pitch(self, dtype: str) -> int:
        """Return the words of a tile's row in shared memory: whole groups of eight chunks."""
        return -(-self.tile_columns * BYTES[dtype] // (32 * CHUNK)) * 32

    def along_rows(self, span: int) -> list[tuple[int, str]]:
        """Return (position, input) of the reads whose neighbours along rows are neighbours in memory.

        Of any row, or of the rows from which vectors begin.
        """
        nest = self.nest
        if isinstance(self.rows, int | tirx.IntImm) and int(self.rows) % span:
            return []
        row, chunk = nest.probe("row", self.rows), nest.probe("rows", tirx.floordiv(self.rows, span))
        every = self.neighbours([row], row, span)  # what counts rows alone counts elements, too
        every = every or self.neighbours([chunk * span + lane for lane in range(max(span, 2))], 0, span)
        behind = self.borders(row) if span == 1 and not every else []
        found = (self.neighbours([row + border], row, span) for border in behind)
        return every or next((reads for reads in found if reads), [])

    def borders(self, row: Expr) -> list[int]:
        """Return the rows at which joins and borders of what is read lie, if known."""
        outer = [self.nest.probe(f"o{axis}", extent) for axis, extent in enumerate(self.outer)]
        place = self.place(outer, row, self.nest.probe("column", self.columns))
        with self.values.only_loads():
            self.nest.reads(self.value, place)
            sides = [*self.values.open]
        return [at for position, at in sides if is_same(position, row) and isinstance(at, int)]

    def neighbours(self, rows: Sequence[Expr], along: Expr, span: int) -> list[tuple[int, str]]:
        """Return the reads that lie side by side in memory for ``rows``, vectors of them as they can be read.

        along: What their addresses are a sum of with something that does not depend on it.
        """
        nest = self.nest
        outer = [nest.probe(f"o{axis}", extent) for axis, extent in enumerate(self.outer)]
        column = nest.probe("column", self.columns)
        reads: list[list[tuple[str, Expr]]] = []
        guarded: list[bool] = []
        with self.values.only_loads():
            for row in rows:
                at = self.place(outer, row, column)
                reads.append(
                    [(name, nest.address(name, index)) for name, index in nest.reads(self.value, at)]
                )
                guarded = [bool(conditions) for conditions in nest.conditions]
                self.values.forget()
        found = []
        for position, column_reads in enumerate(zip(*reads, strict=False)):
            name, base = column_reads[0]
            size = BYTES.get(stored_type(nest.graph.tile(name).ttype.name), 0)
            steps = [self.values.simplified(at - base) for _, at in column_reads]
            rest = self.values.simplified(base - along)
            beside = all(step == lane for lane, step in enumerate(steps))
            beside = beside and not uses(rest, variables_of(along))
            fits = size in (2, 4) or (size == 1 and span >= 4 and self.are_bytes())
            fits = fits and (span == 1 or not guarded[position])
            whole = fits and (span == 1 or nest.vectors.is_aligned(name, rest, span))
            gathered = uses(base, [*self.values.stand_ins.values()])  # a number that is not worked out yet
            if beside and span * size <= ACCESS_BYTES and whole and not gathered:
                found.append((position, name))
        return found

    def are_bytes(self) -> bool:
        """Tell whether results have vectors of bytes, four of which are a word of shared memory."""
        types = (self.nest.graph.tile(value).ttype.name for value in self.nest.graph.outputs)
        narrow = all(BYTES.get(stored_type(name), 8) <= 4 for name in types)
        return narrow and isinstance(self.columns, int) and self.columns % 4 == 0

    # into shared memory ------------------------------------------------------------------------------
    def fill(
        self, outer: Sequence[Expr], first_row: Expr, first_column: Expr, thread: Expr, threads: int
    ) -> None:
        """Emit the reads of a tile along its rows, and its transposition; a barrier follows."""
        for staged in self.staged:
            self.fill_one(staged, outer, first_row, first_column, thread, threads)
        self.nest.dialect.sync()

    def fill_one(
        self, staged: Staged, outer: Sequence[Expr], row: Expr, column: Expr, thread: Expr, threads: int
    ) -> None:
        per_word = 4 // BYTES[staged.dtype]
        groups = self.tile_rows // self.span
        items = groups * (self.tile_columns // per_word)
        loaded = []
        for first in range(0, items, threads):
            item = b.bind(first + thread)
            self.nest.within(item, -(-items // threads) * threads)
            group, word = b.bind(tirx.floormod(item, groups)), b.bind(tirx.floordiv(item, groups))
            self.nest.within(group, groups)
            self.nest.within(
                word, -(-items // threads) * threads // groups if items % threads else items // groups
            )
            inside = self.inside(row + group * self.span, column + word * per_word, item, items)
            registers = [self.registers(staged) for _ in range(per_word)]
            first_row, first_column = row + group * self.span, column + word * per_word
            with b.where(inside):
                for at in range(per_word):
                    beside = first_column + at
                    if at and self.values.is_below(beside, self.columns) is not True:
                        beside = tirx.min(beside, self.columns - 1)  # again: no result needs the next one
                    self.load(staged, outer, first_row, beside, registers[at])
            loaded.append((group, word, inside, registers))
        for group, word, inside, registers in loaded:
            with b.where(inside):
                for lane in range(self.span):
                    found = [r[0] if self.span == 1 else element(r, lane, staged.dtype) for r in registers]
                    self.put(staged, group, lane, word, found)

    def registers(self, staged: Staged) -> Any:
        """Declare the registers of one vector along rows."""
        size = self.span * BYTES[staged.dtype]
        return b.local(1, "uint16") if size == 2 else b.local(size // 4, "uint32")

    def inside(self, row: Expr, column: Expr, item: Expr, items: int) -> Expr | None:
        """Return whether a vector of a tile is one of the result's; None if all are."""
        conditions = []
        for position, boundary in ((row, self.rows), (column, self.columns), (item, items)):
            if self.values.is_below(position, boundary) is not True:
                conditions.append(position < boundary)
        return b.every(*conditions)

    def load(self, staged: Staged, outer: Sequence[Expr], row: Expr, column: Expr, registers: Any) -> None:
        """Emit one vector along rows into registers."""
        row = b.bind(row)  # where it begins in memory is worked out from its number, not from what that is of
        self.nest.within(row, self.rows)
        with self.values.only_loads():
            _, index = self.nest.reads(self.value, self.place(outer, row, column))[staged.position]
            conditions = self.nest.conditions[staged.position]
        if self.span == 1:
            if conditions:
                b.store(registers, tirx.const(0, str(registers.dtype)), 0)
            with b.where(*conditions):
                self.nest.dialect.load_one(registers, self.nest.buffers[staged.name], index)
        else:
            self.nest.vectors.fetch(staged.name, index, registers, self.span)

    def put(self, staged: Staged, group: Expr, lane: int, word: Expr, elements: Sequence[Expr]) -> None:
        """Store neighbouring columns of one row as a word."""
        bits = 32 // len(elements)
        parts = [T.Cast("uint32", part) << T.uint32(bits * at) for at, part in enumerate(elements)]
        value = elements[0] if len(elements) == 1 else reduce(tirx.bitwise_or, parts)
        chunk, within = tirx.floordiv(word, CHUNK), tirx.floormod(word, CHUNK)
        at = self.word(staged, group * self.span + lane, group, chunk) + within
        b.store(self.nest.dialect.shared, value, at)

    def word(self, staged: Staged, row: Expr, group: Expr, chunk: Expr) -> Expr:
        spread = max(1, CHUNKS * self.span // self.tile_rows)
        places = tirx.bitwise_xor(
            tirx.floormod(group * spread, CHUNKS), tirx.floormod(row, 2) * (CHUNKS // 2)
        )
        swizzled = tirx.bitwise_xor(chunk, self.values.simplified(places))
        return staged.first + row * self.pitch(staged.dtype) + swizzled * CHUNK

    # out of it ---------------------------------------------------------------------------------------
    def offer(self, places: Sequence[Index], row: Expr, column: Expr) -> None:
        """Let vectors at ``places``, which lie at a row and column of the tile, come from shared memory.

        places: The elements' indices.
        row, column: Of the first one, within the tile.
        """
        vectors = self.nest.vectors
        with self.values.only_loads():
            reads, conditions = [], []
            for place in places:
                reads.append(self.nest.reads(self.value, place))
                conditions.append(self.nest.conditions)
                self.values.forget()
        for staged in self.staged:
            shared = self.shared_vector(staged, row, column, len(places))
            for lane, row_reads in enumerate(reads):
                base = self.values.simplified(self.nest.address(*row_reads[staged.position]) - lane)
                guards = map(tvm_ffi.structural_hash, conditions[lane][staged.position])
                vectors.transposed[(staged.name, len(places), tvm_ffi.structural_hash(base), *guards)] = (
                    shared
                )

    def shared_vector(self, staged: Staged, row: Expr, column: Expr, width: int) -> Shared:
        words = max(1, width * BYTES[staged.dtype] // 4)
        per_word = 4 // BYTES[staged.dtype]
        first = self.values.simplified(tirx.floordiv(column, per_word))
        group = tirx.floordiv(row, self.span)
        places = []
        for access in range(0, words, CHUNK):
            chunk = self.values.simplified(tirx.floordiv(first + access, CHUNK))
            within = self.values.simplified(tirx.floormod(first + access, CHUNK))
            places.append(self.word(staged, row, group, chunk) + within)
        half = tirx.floormod(column, 2) if width < per_word else None
        return Shared(self.nest.dialect, words, tuple(places), half)


def transpose_of(nest: GpuNest) -> SharedTranspose:
    """Return the tiles along whose rows inputs have the widest vectors; of as many rows as can be."""
    found = []
    for axes in row_axes(nest):
        with suppress(ScheduleError):
            found.append(SharedTranspose(nest, axes))
    check(bool(found), "nothing of this chain lies along other axes than its result")
    return max(found, key=lambda tiles: (tiles.span, tiles.filled()))


def row_axes(nest: GpuNest) -> list[tuple[int, ...]]:
    """Return the axes that may count as a tile's rows: those of a run, or as an input has them in memory."""
    rank = len(nest.graph.tile(nest.graph.outputs[0]).shape)
    if nest.lanes > 1:
        return [tuple(range(rank - 1))]
    runs = [tuple(range(first, last + 1)) for last in range(rank - 2, -1, -1) for first in range(last + 1)]
    return [*dict.fromkeys([*runs, *axes_in_memory(nest)])]


def axes_in_memory(nest: GpuNest) -> list[tuple[int, ...]]:
    """Return for each input the axes of the result that follow each other in its memory."""
    value = nest.graph.outputs[0]
    shape = nest.shape(value)
    index = tuple(nest.probe(f"a{axis}", extent) for axis, extent in enumerate(shape))
    steps: list[list[Expr]] = []
    with nest.values.only_loads():
        base = [nest.address(*read) for read in nest.reads(value, index)]
        for axis in range(len(shape) - 1):
            nest.values.forget()
            moved = nest.reads(value, (*index[:axis], index[axis] + 1, *index[axis + 1 :]))
            pairs = zip(moved, base, strict=False)
            steps.append([nest.values.simplified(nest.address(*read) - at) for read, at in pairs])
    return [axes for along in zip(*steps, strict=False) if (axes := _in_order(along, shape))]


def _in_order(steps: Sequence[Expr], shape: Sequence[Expr]) -> tuple[int, ...]:
    """Return the axes, each with elements so far apart, that are one in memory, the nearest at the end."""
    found: list[int] = []
    apart: Expr = 1
    while isinstance(apart, int):
        near = [at for at, step in enumerate(steps) if isinstance(step, int) and step == apart != 0]
        near = [at for at in near if at not in found and shape[at] != 1]
        if not near:
            break
        found.insert(0, near[0])
        apart = apart * shape[near[0]]
    return tuple(found)


def emit_tiles(nest: GpuNest) -> None:
    """Emit a kernel whose blocks take tiles."""
    transpose = transpose_of(nest)
    (_emit_rows if nest.lanes > 1 else _emit_vectors)(nest, transpose)


def _emit_vectors(nest: GpuNest, transpose: SharedTranspose) -> None:
    """Emit tiles of a chain without reductions: every thread takes vectors of the tile."""
    rows, columns = nest.mapping.tile
    threads, values = nest.mapping.threads, nest.values
    outputs = nest.graph.outputs
    check(len({nest.graph.tile(v).shape for v in outputs}) == 1, "results of a tile differ in shape")
    across = tirx.floordiv(transpose.columns + columns - 1, columns)
    down = tirx.floordiv(transpose.rows + rows - 1, rows)
    total: Expr = across * down
    for extent in transpose.outer:
        total = total * extent
    block, thread = nest.start(total, threads, transpose.words)
    nest.within(thread, threads)
    along = nest.bound_index(block, [*transpose.outer, down, across])
    outer, first_row, first_column = along[:-2], along[-2] * rows, along[-1] * columns
    transpose.fill(outer, first_row, first_column, thread, threads)
    width = min(8, max(16 // BYTES.get(stored_type(nest.graph.tile(v).ttype.name), 16) for v in outputs))
    while width > 1 and (not isinstance(transpose.columns, int) or transpose.columns % width):
        width //= 2
    nest.alone, nest.later = True, []
    for first in range(0, rows * columns // width, threads):
        _emit_vector(nest, transpose, outer, (first_row, first_column), width, first)
        values.forget()
    for valid, store in nest.later:
        with b.where(valid):
            store()
    nest.later = None


def _emit_vector(
    nest: GpuNest,
    transpose: SharedTranspose,
    outer: Sequence[Expr],
    corner: tuple[Expr, Expr],
    width: int,
    first: int,
) -> None:
    """Emit the vector that a thread has among those from ``first`` on; stores wait until all are read.

    Threads beyond the result's edge read its last row or column again, and store nothing.
    """
    (rows, columns), threads, values = nest.mapping.tile, nest.mapping.threads, nest.values
    items, chunks = rows * columns // width, columns // width
    item = b.bind(first + nest.thread)
    if first + threads > items:
        nest.valid, item = item < items, b.bind(tirx.min(item, items - 1))
    else:
        nest.valid = None
    nest.within(item, items)
    row, column = b.bind(tirx.floordiv(item, chunks)), b.bind(tirx.floormod(item, chunks))
    nest.within(row, rows)
    nest.within(column, chunks)
    row, row_inside = _kept_inside(nest, row, corner[0], transpose.rows)
    wide = values.simplified(tirx.floordiv(transpose.columns, width))
    begin = values.simplified(tirx.floordiv(corner[1], width))
    column, column_inside = _kept_inside(nest, column, begin, wide)
    nest.valid = b.every(nest.valid, row_inside, column_inside)
    at = corner[1] + column * width
    places = [transpose.place(outer, corner[0] + row, at + lane) for lane in range(width)]
    nest.vectors.words.clear()
    nest.vectors.transposed.clear()
    transpose.offer(places, row, column * width)
    for value in nest.graph.outputs:
        nest.vectors.width = width
        nest.store_vector(value, places)
        nest.vectors.width = 1
    nest.valid = None


def _kept_inside(nest: GpuNest, position: Expr, begin: Expr, extent: Expr) -> tuple[Expr, Expr | None]:
    """Return a position within a tile, brought inside of the result, and whether it was; None: always."""
    if nest.values.is_below(begin + position, extent) is True:
        return position, None
    return b.bind(tirx.min(position, extent - 1 - begin)), begin + position < extent


def _emit_rows(nest: GpuNest, transpose: SharedTranspose) -> None:
    """Emit tiles of whole rows: teams of lanes take the tile's rows in turns."""
    rows, teams, lanes = nest.mapping.tile[0], nest.mapping.teams, nest.lanes
    wave, lines = nest.dialect.wave, RowLoops(nest)
    check(lanes <= wave and nest.mapping.num > 0, "rows of a tile belong to one warp, which holds them")
    check(rows % teams == 0, "a tile has the same number of rows for each team")
    check(isinstance(nest.count, int) and nest.count % rows == 0, "the last tile is not whole")
    block, thread = nest.start(tirx.floordiv(nest.count, rows), teams * lanes, transpose.words)
    nest.within(thread, teams * lanes)
    nest.within(block, nest.count // rows)
    transpose.fill((), block * rows, 0, thread, teams * lanes)
    nest.lane = b.bind(tirx.floormod(thread, lanes))
    team = b.bind(tirx.floordiv(thread, lanes))
    nest.within(nest.lane, lanes)
    nest.within(team, teams)
    with b.loop(rows // teams) as turn:
        nest.within(turn, rows // teams)
        local = b.bind(turn * teams + team)
        nest.within(local, rows)
        lines.row(b.bind(block * rows + local), partial(_offer_row, nest, transpose, local))


def _offer_row(nest: GpuNest, transpose: SharedTranspose, local: Expr, index: Index) -> None:
    """Let a whole row come from shared memory."""
    width = nest.width()
    check(width > 1, "rows of an odd number of columns")
    for number, _ in nest.unrolled(tirx.floordiv(transpose.columns, width)):
        places = [(*index, number * width + lane) for lane in range(width)]
        transpose.offer(places, local, number * width)
