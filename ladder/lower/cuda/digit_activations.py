"""x of the pipeline ``digits``: it is split into digits, chunk by chunk, and read as operands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.digit_geometry import COLUMNS, Spec
from ladder.lower.cuda.gemv_place import (
    BlockPlace,
    find_warp,
    prefetch_scales,
    prefetch_words,
    prefetched_words,
)
from ladder.lower.cuda.launch import Overlap, Prologue
from ladder.lower.gpu.arguments import Arguments
from schedules.layouts import TILE


@dataclass(frozen=True)
class Place(BlockPlace):
    """Where a thread works.

    first_tile, end_tile: The block's packed tiles along K.
    column: The weight row whose scales the lane keeps.
    strip_tile, owner: First packed tile of the warp's strip, and where in a tile the lane's words begin.
    """

    first_tile: Expr
    end_tile: Expr
    column: Expr
    strip_tile: Expr
    owner: Expr


def find_place(spec: Spec, args: Arguments) -> Place:
    """Emit which rows and which part of K this thread works on."""
    geo, schedule = spec.geo, spec.schedule
    tile_strips, cluster = geo.tile_strips, schedule.cluster
    strips = args.n_tiles // geo.halves * tile_strips
    b.device(geo.resident_blocks)
    row_blocks = (strips + geo.row_warps - 1) // geo.row_warps
    m_tiles = (args.m + schedule.tile_m - 1) // schedule.tile_m
    block, m_tile = b.block_index([row_blocks * cluster, m_tiles])
    rank, first_tile, end_tile = _share_of_k(spec, args.k_tiles)
    block = b.bind(block // cluster) if cluster > 1 else block
    warp = find_warp(geo, block, strips)
    first_row = b.bind(block * geo.columns)
    first_m = b.bind(m_tile * schedule.tile_m)
    m_count = b.keep(T.min(args.m - first_m, schedule.tile_m))
    own = min(32, geo.own_rows)
    column = warp.strip * geo.own_rows + warp.lane % own
    column = b.keep(column + warp.lane // own * args.n if geo.halves > 1 else column)
    owner = warp.strip % tile_strips * (32 * geo.own_blocks) + warp.lane
    strip_tile = b.keep(warp.strip // tile_strips * args.k_tiles)
    owner = b.keep(owner * min(spec.groups.bits, 4))
    return Place(
        args, warp, rank, first_row, first_m, m_count, first_tile, end_tile, column, strip_tile, owner
    )  # fmt: skip


def _share_of_k(spec: Spec, tiles: Expr) -> tuple[Expr, Expr, Expr]:
    """Divide K among the blocks of a cluster in whole periods; return rank, first tile and end."""
    blocks, period = spec.schedule.cluster, spec.geo.period
    if blocks == 1:
        return T.int32(0), T.int32(0), tiles
    rank = b.keep(b.cluster_rank([blocks])[0])
    share = b.bind((tiles + period * blocks - 1) // (period * blocks) * period)
    first = b.keep(T.min(rank * share, tiles))
    return rank, first, b.keep(T.min(first + share, tiles))


def slice_periods(spec: Spec, index: Expr, tiles: Expr) -> tuple[Expr, Expr]:
    """Return the periods of a chunk of ``tiles`` where a slice of K begins and ends."""
    split = spec.schedule.split_k
    periods = b.bind((tiles + spec.geo.period - 1) // spec.geo.period)
    share = b.bind((periods + split - 1) // split)
    return T.min(index * share, periods), T.min((index + 1) * share, periods)


def prefetch(spec: Spec, place: Place, overlap: Overlap) -> None:
    """Bring the first words of every slice, and scales, into L2 while the kernel before still runs.

    The words of a packed row of tiles are fetched by the block that has its first strip.
    """
    if not overlap.possible:
        return
    args, warp, geo, split = place.args, place.warp, spec.geo, spec.schedule.split_k
    strips = geo.tile_strips
    tile = b.bind((warp.first_strip + strips - 1) // strips + warp.thread // split)
    mine = tile * strips < warp.first_strip + geo.row_warps
    tiles = b.bind(place.end_tile - place.first_tile)
    begin, stop = slice_periods(spec, warp.thread % split, T.min(geo.chunk_tiles, tiles))
    own = T.min(stop * geo.period, tiles) - begin * geo.period
    even = prefetched_words(args.n_tiles, args.k_tiles * spec.groups.tile_words)
    words = T.min(own * spec.groups.tile_words, even // (split * spec.schedule.cluster) // 4 * 4)
    tiles = args.n_tiles // geo.halves
    for half in range(geo.halves):
        row = tile + half * tiles
        first = T.Cast("int64", row * args.k_tiles + place.first_tile + begin * geo.period)
        prefetch_words(args, T.And(mine, tile < tiles), first * T.int64(spec.groups.tile_words), words)
        if spec.gemm.scale:
            prefetch_scales(args, warp.thread, place.first_row + half * args.n)


@dataclass(frozen=True)
class Memory:
    """Shared memory of a block.

    parts: Sums of x of each warp, by activation row.
    row_scales: Scales of the block's weight rows.
    digits, starts, units: Digits of a chunk of x; where its sums begin, and what one step of them is worth,
        by period.
    slices: Where the slices of K leave their sums; reuses the memory of the chunk.
    rows: Activation rows that a prologue computes; None where they are an argument.
    """

    parts: Any
    row_scales: Any
    digits: Any
    starts: Any
    units: Any
    slices: Any
    rows: Any = None


def allocate(spec: Spec, prologue: Prologue | None) -> Memory:
    """Allocate shared memory."""
    geo, tile_m = spec.geo, spec.schedule.tile_m
    periods = geo.chunk_tiles // geo.period
    pool = b.SharedPool()
    parts = pool.alloc((32, tile_m), "int32", align=128)
    row_scales = pool.alloc((geo.rows,), "float32", align=128)
    rows = None if prologue is None else prologue.allocate(pool)
    first = pool.offset
    digits = pool.alloc((geo.chunk_tiles * geo.tile_bytes // 4,), "uint32", align=128)
    starts = pool.alloc((periods * geo.column_blocks * 16,), "uint32", align=128)
    units = pool.alloc((periods * tile_m,), "uint32", align=128)
    pool.alloc((geo.tile_bytes // 4,), "uint32", align=128)  # a tile is read ahead of its use
    pool.move_base_to(first)
    slices = pool.alloc((spec.schedule.split_k, tile_m, geo.rows + 4), spec.kind, align=128)
    pool.commit()
    return Memory(parts, row_scales, digits, starts, units, slices, rows)


class Converter:
    """Splits chunks of x into digits."""

    def __init__(self, spec: Spec, place: Place, memory: Memory) -> None:
        self.spec, self.place, self.memory = spec, place, memory
        self.words, self.following = (b.local(spec.splitter.words, "uint32") for _ in range(2))

    def begin(self, first: Expr, m: Expr, items: Expr) -> None:
        """Emit the loads of the first two iterations of an activation row's conversion."""
        for iteration, words in enumerate((self.words, self.following)):
            item = self.place.warp.thread + iteration * self.spec.geo.threads
            self._read(words, first, m, item, items)

    def convert(self, first: Expr, items: Expr) -> None:
        """Write the digits of a chunk of x; whole periods, zero beyond K. The first loads are under way."""
        geo, splitter = self.spec.geo, self.spec.splitter
        iterations = b.keep((items + geo.threads - 1) // geo.threads)
        with b.loop(self.place.m_count, rolled=True) as m:
            total = b.Variable("int32", 0)
            with b.when(m > 0):
                self.begin(first, m, items)
            with b.loop(iterations, rolled=True) as iteration:
                item = b.bind(iteration * geo.threads + self.place.warp.thread)
                call = self._convert_item(b.bind(item < items), item, m)
                if geo.lane == 16:
                    b.emit(call)
                else:
                    total.set(total.value + call)
                for i in range(splitter.words):
                    b.store(self.words, self.following[i], i)
                self._read(self.following, first, m, item + 2 * geo.threads, items)
            if not geo.flushes and splitter.offset:
                self._add_part(total, m, first)

    def _read(self, words: Any, first: Expr, m: Expr, item: Expr, items: Expr) -> None:
        """Emit the loads of sixteen elements of a tile, zero where x ends; four items make a tile."""
        args = self.place.args
        count, tile = self.spec.splitter.words, b.bind(first + item // 4)
        start = b.bind(tile * TILE + item % 4 * (32 // self.spec.geo.lane))

        load_word = "ld.global.u32" if self.memory.rows is None else "ld.shared.u32"

        def load(i: int) -> None:
            place = [self.place.first_m + m, start + i * (TILE // count)]
            b.ptx(load_word, words[i], args.x.ptr_to(place))

        def whole() -> None:
            for i in range(count):
                load(i)

        def part() -> None:
            for i in range(count):
                b.store(words, T.uint32(0), i)
                with b.when(T.And(item < items, start + i * (TILE // count) < args.k_x)):
                    load(i)

        b.either(T.And(item < items, tile * TILE + TILE <= args.k_x), whole, part)

    def _convert_item(self, active: Expr, item: Expr, m: Expr) -> Expr:
        geo, memory = self.spec.geo, self.memory
        tile, column = b.bind(item // 4), b.bind(item % 4)
        inner, period = b.bind(tile % geo.period), b.bind(tile // geo.period)
        inside = T.if_then_else(active, tile, 0)
        digit = inside * (geo.tile_bytes // 4) + m * (16 * geo.digits) + column * 4
        first = m * geo.digits  # of the row's columns, two share a start
        at = T.if_then_else(active, period, 0) * (geo.column_blocks * 16) + first // 2 * 4 + first % 2
        targets = [memory.digits.ptr_to([digit])]
        if geo.lane == 16:
            unit = T.if_then_else(active, period, 0) * self.spec.schedule.tile_m + m
            targets += [memory.starts.ptr_to([at + column % 2 * 4]), memory.units.ptr_to([unit])]
        else:
            targets += [memory.starts.ptr_to([at])]
        return self.spec.splitter.emit(self.words, active, column, inner, *targets)

    def _add_part(self, total: b.Variable, m: Expr, first: Expr) -> None:
        """Add a warp's sum of x to its part."""
        parts, warp = self.memory.parts, self.place.warp
        for distance in (16, 8, 4, 2, 1):
            total.set(total.value + b.shuffle_xor(total.value, distance))
        with b.when(warp.lane == 0):
            before = b.Variable("int32", 0)
            with b.when(first > self.place.first_tile):
                before.set(parts[warp.warp, m])
            b.store(parts, before.value + total.value, warp.warp, m)


@dataclass(frozen=True)
class Fragments:
    """Registers of the B operand.

    digits: Fragments of this tile and of the next, by block of columns.
    starts: Where the sums of a period begin, by block of columns.
    """

    digits: list[list[Any]]
    starts: list[Any]

    @classmethod
    def allocate(cls, spec: Spec) -> Fragments:
        blocks = range(spec.geo.column_blocks)
        digits = [[b.local(4, "uint32") for _ in blocks] for _ in range(2)]
        return cls(digits, [b.local(4, "uint32") for _ in blocks])


class FragmentLoader:
    """Loads fragments of a chunk, from a slice's first period on.

    lane, period: Lane of the warp, and the first period of the slice.
    """

    def __init__(self, spec: Spec, memory: Memory, fragments: Fragments, lane: Expr, period: Expr) -> None:
        self.spec, self.fragments = spec, fragments
        geo = spec.geo
        word = period * (geo.period * geo.tile_bytes // 4) + lane % geo.lanes * 4
        self.digits_at = _address(memory.digits, word)
        word = period * (geo.column_blocks * 16) + lane % 4 * 4
        self.starts_at = _address(memory.starts, word) if geo.flushes else None

    def begin(self) -> None:
        """Load what the first tile needs."""
        if self.starts_at is not None:
            self.read_starts(0)
        self.read_digits(0)

    def read_starts(self, index: int) -> None:
        """Emit the loads of where the sums of a period begin, ``index`` periods on."""
        assert self.starts_at is not None
        for block, registers in enumerate(self.fragments.starts):
            at = self.starts_at.value + T.uint32((index * self.spec.geo.column_blocks + block) * 64)
            b.ptx("ld.shared.v4.u32", *(registers[i] for i in range(4)), at)

    def read_digits(self, slot: int) -> None:
        """Emit the loads of the fragments of the tile ``slot`` tiles on."""
        for block, registers in enumerate(self.fragments.digits[slot % 2]):
            at = self.digits_at.value + T.uint32(slot * self.spec.geo.tile_bytes + block * 64 * COLUMNS)
            b.ptx("ld.shared.v4.u32", *(registers[i] for i in range(4)), at)

    def advance(self) -> None:
        """Go on by ``stages`` tiles."""
        geo, stages = self.spec.geo, self.spec.schedule.stages
        self.digits_at.set(self.digits_at.value + T.uint32(stages * geo.tile_bytes))
        if self.starts_at is not None:
            step = stages // geo.period * geo.column_blocks * 64
            self.starts_at.set(self.starts_at.value + T.uint32(step))


def _address(buffer: Any, word: Expr) -> b.Variable:
    return b.Variable("uint32", T.cuda.cvta_generic_to_shared(buffer.ptr_to([word])))
