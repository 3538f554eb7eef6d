"""The pipeline for very few activation rows and narrow integer codes: integer products of codes in place.

``word & 0x03030303`` *is* four unsigned operands of ``mma.m16n8k32.u8.s8``, each counting a power
of two for the place of its codes: one logic instruction for four weights, no shift, no conversion.
x is decomposed once per block into signed integer digits (`ladder.lower.cuda.digit_geometry`) that
stay in shared memory, a digit per column of the instruction; integer sums are exact. A warp owns 16 to 64
weight rows and one slice of K, whose words it streams through registers; slices are added in shared
memory. The blocks of a cluster split K too: each then splits its own part of x only.

Nothing depends on the size of M, N or K: x passes in *chunks* of K as large as shared memory holds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.digit_activations import (
    Converter,
    FragmentLoader,
    Fragments,
    Memory,
    Place,
    allocate,
    find_place,
    prefetch,
    slice_periods,
)
from ladder.lower.cuda.digit_geometry import COLUMNS, DIGIT_BITS, MAGIC, MAGIC_VALUE, Spec, choose_spec
from ladder.lower.cuda.gemv_geometry import STRIP
from ladder.lower.cuda.gemv_place import Warp, half_words
from ladder.lower.cuda.gemv_sums import RowScales, SliceSums, halves_of
from ladder.lower.cuda.gemv_weights import LOADS
from ladder.lower.cuda.launch import Overlap, Prologue
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.emission import TirMachine
from ladder.lower.gpu.groups import array_dtype
from ladder.lower.gpu.machine import XOR_AND, repeat
from schedules.schedule import GpuSchedule
from targets import TileDevice

PRODUCT = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"


class Sums:
    """The accumulators of a thread."""

    def __init__(self, spec: Spec, warp: Warp) -> None:
        self.spec, self.geo, self.warp = spec, spec.geo, warp
        self.count = spec.fragments * 4
        self.running = [b.local(self.count, "uint32") for _ in self.geo.classes]
        self.totals = b.local(self.count, spec.kind)
        for i in range(self.count):
            b.store(self.totals, T.float32(0) if self.geo.flushes else T.int32(0), i)

    # ---- running sums ---------------------------------------------------------------
    def clear(self) -> None:
        """Clear integer sums before a chunk."""
        if not self.geo.flushes:
            for sums in self.running:
                for i in range(self.count):
                    b.store(sums, T.uint32(0), i)

    def multiply(self, place: int, fragment: int, a: Any, x: Any, start: Any) -> None:
        """Emit a product into the sums of class ``place``; ``start``: where they begin, None to go on."""
        sums = [self.running[place][fragment * 4 + i] for i in range(4)]
        before = sums
        if start is not None:
            before = [start[i] for i in range(4)] if place == 0 else [T.uint32(MAGIC)] * 4
        b.ptx(PRODUCT, *sums, *a, *x, *before)

    # ---- totals ---------------------------------------------------------------------
    def keep_integers(self) -> None:
        """Move integer sums of a chunk to the totals; what places of codes add to them divides them."""
        if self.geo.flushes:
            return
        for i in range(self.count):
            down = self.spec.groups.bits * (i % 4 // 2)
            total = self.totals[i]
            for (exponent, _), sums in zip(self.geo.classes, self.running, strict=True):
                total = total + (T.Cast("int32", sums[i]) >> T.int32(exponent + down))
            b.store(self.totals, total, i)

    def flush(self, memory: Memory, scales: Any, period: Expr) -> None:
        """Add a period's sums, times their scales and the unit of x, to the totals.

        ``scales`` are the registers of the lane's scales, None where there are none.
        """
        geo = self.geo
        for column_block in range(geo.column_blocks):
            unit = self._unit(memory, period, column_block) if geo.lane == 16 else None
            own = [] if scales is None else self._own_scales(scales, unit)
            for row_block in range(geo.row_blocks):
                for half in range(2):
                    factor = self._factor(own, row_block, half, unit)
                    for i in (2 * half, 2 * half + 1):
                        at = (row_block * geo.column_blocks + column_block) * 4 + i
                        b.store(self.totals, self.totals[at] + self._as_float(at) * factor, at)

    def _unit(self, memory: Memory, period: Expr, column_block: int) -> Expr:
        tile_m = self.spec.schedule.tile_m
        m = (column_block * COLUMNS + self.warp.lane % 4 * 2) // self.geo.digits % tile_m
        return b.bind(T.reinterpret(memory.units[period * tile_m + m], dtype="float32"))

    @property
    def _one_unit(self) -> bool:
        return self.spec.schedule.tile_m == 1

    def _own_scales(self, scales: Any, unit: Expr | None) -> list[Expr]:
        """Return the scales that this lane has, times the unit of x if all columns have the same."""
        own = [T.Cast("float32", scales[i]) for i in range(self.spec.scale_parts)]
        return [b.bind(x * unit if self._one_unit and unit is not None else x) for x in own]

    def _factor(self, scales: list[Expr], row_block: int, half: int, unit: Expr | None) -> Expr:
        """Return the scale of a weight row, which another lane has, times the unit of x."""
        if not scales:
            return unit
        part, row = divmod(row_block * STRIP + 8 * half, 32)
        source = self.warp.lane // 4 + row
        scale = b.shuffle(scales[part], source)
        return b.bind(scale if unit is None or self._one_unit else scale * unit)

    def _as_float(self, at: int) -> Expr:
        """Return a fragment's finished sum as float32."""
        value: Expr = None
        for (exponent, _), sums in zip(self.geo.classes, self.running, strict=True):
            own = T.reinterpret(sums[at], dtype="float32") - T.float32(MAGIC_VALUE)
            own = own if exponent == 0 else own * T.float32(2.0**-exponent)
            value = own if value is None else value + own
        return value

    # ---- results --------------------------------------------------------------------
    def leave(self, memory: Memory) -> None:
        """Join the digits and leave the sums of the slice in shared memory."""
        geo, warp = self.geo, self.warp
        if not geo.flushes and self.spec.splitter.offset:
            self._add_offsets(memory.parts)
        for row_block in range(geo.row_blocks):
            for column_block in range(geo.column_blocks):
                at = (row_block * geo.column_blocks + column_block) * 4
                for half in range(2):
                    row = warp.row_warp * self.spec.schedule.warp_rows + row_block * STRIP + warp.lane // 4
                    if geo.lane == 16:
                        self._leave_digits(memory.slices, at + 2 * half, column_block, row + 8 * half, half)
                    else:
                        self._leave_integers(memory.slices, at + 2 * half, row + 8 * half, half)

    def _leave_digits(self, slices: Any, at: int, column_block: int, row: Expr, half: int) -> None:
        """Join the digits of an activation row, two each of neighbouring lanes."""
        lane = self.warp.lane
        low = self.totals[at] + self.totals[at + 1] * T.float32(2.0**DIGIT_BITS)
        upper = T.float32(2.0 ** (2 * DIGIT_BITS))
        low = b.Variable("float32", low * T.if_then_else(lane % 2 == 0, T.float32(1), upper)).value
        gain = T.float32(self.spec.form.factor * 2.0 ** (-self.spec.groups.bits * half))
        value = b.bind((low + b.shuffle_xor(low, 1)) * gain)
        m = column_block * 2 + lane % 4 // 2
        with b.when(T.And(lane % 2 == 0, m < self.spec.schedule.tile_m)):
            b.store(slices, value, self.warp.slice, m, row)

    def _leave_integers(self, slices: Any, at: int, row: Expr, half: int) -> None:
        for i in range(2):
            m = self.warp.lane % 4 * 2 + i
            value = self.totals[at + i]
            if self.geo.flushes:
                value = value * T.float32(self.spec.form.factor * 2.0 ** (-self.spec.groups.bits * half))
            with b.when(m < self.spec.schedule.tile_m):
                b.store(slices, value, self.warp.slice, m, row)

    def _add_offsets(self, parts: Any) -> None:
        """Add what the offset of the type makes of the sums of x to the integer sums of the first slice."""
        schedule = self.spec.schedule
        for i in range(2):
            m = T.min(self.warp.lane % 4 * 2 + i, schedule.tile_m - 1)
            with b.when(self.warp.slice == 0):
                total: Expr = parts[0, m]
                for warp in range(1, schedule.warps):
                    total = total + parts[warp, m]
                shift = b.keep(total * self.spec.splitter.offset)
                for fragment in range(self.spec.fragments * 2):
                    at = 2 * fragment + i
                    b.store(self.totals, self.totals[at] + shift, at)


class Weights:
    """Registers of the tiles in flight, and their loads.

    words_at: Where the lane's words of the current tile begin.
    """

    def __init__(self, spec: Spec, place: Place, words_at: b.Variable) -> None:
        self.spec, self.place, self.words_at = spec, place, words_at
        bits, stages = spec.groups.bits, spec.schedule.stages
        self.words = [[b.local(bits, "uint32") for _ in range(spec.geo.row_blocks)] for _ in range(stages)]
        # Warps without work multiply what they never loaded: nobody reads the sums, but they are defined.
        for words in (words for stage in self.words for words in stage):
            for i in range(bits):
                b.store(words, T.uint32(0), i)
        self.half_words = half_words(place.args, spec.geo, spec.groups.tile_words)
        dtype = array_dtype(place.args.scales)
        periods = range(stages // spec.geo.period)
        # A lane has the scale of one row of 32, and hands it out when the period ends.
        self.scales = [b.local(spec.scale_parts, dtype) for _ in periods] if dtype else []

    def begin(self, tile: Expr) -> None:
        """Go to a packed tile along K."""
        start = T.Cast("int64", self.place.strip_tile + tile) * T.int64(self.spec.groups.tile_words)
        self.words_at.set(start + T.Cast("int64", self.place.owner))

    def advance(self) -> None:
        """Go on by ``stages`` tiles."""
        step = T.int64(self.spec.schedule.stages * self.spec.groups.tile_words)
        self.words_at.set(self.words_at.value + step)

    def load(self, slot: int, distance: int, tile: Expr, end: Expr, *, guarded: bool) -> None:
        """Emit the loads of the tile ``distance`` after ``tile``, and of its period's scales."""
        spec, args, bits = self.spec, self.place.args, self.spec.groups.bits
        with b.when(tile + distance < end if guarded else True):
            for block, words in enumerate(self.words[slot]):
                half, own = divmod(block, spec.geo.own_blocks)
                at = self.words_at.value + T.int64(distance * spec.groups.tile_words + own * 32 * bits)
                at = at + T.Cast("int64", self.half_words) if half else at
                b.ptx(LOADS[bits], *(words[i] for i in range(bits)), args.words.ptr_to([0, 0, at]))
        before = spec.geo.period - 1
        if spec.gemm.scale and slot % spec.geo.period == before:
            first = tile + (distance - before)
            with b.when(first < end if guarded else True):
                row = b.bind(spec.groups.row(first, 0))
                for part in range(spec.scale_parts):
                    scale = args.scales[row, self.place.column + part * 32]
                    b.store(self.scales[slot // spec.geo.period], scale, part)

    def codes(self, words: Any, half: int, t: int) -> Expr:
        """Return four codes of row g or g+8 in place."""
        spec, bits = self.spec, self.spec.groups.bits
        quad = spec.quads[t]
        position = quad.position + bits * half
        mask = 0x01010101 * (((1 << bits) - 1) << position)
        if not spec.form.flip:
            return b.bind(words[quad.word] & T.uint32(mask))
        # All codes are flipped by one constant, which stays in a register beside the mask.
        m = TirMachine()
        flip = m.constant(repeat(spec.form.flip, bits))
        return m.lop3(m.input(words[quad.word]), flip, m.constant(mask), XOR_AND).content


@dataclass(frozen=True)
class Walk:
    """The tiles of a chunk that a slice of K multiplies.

    stop, end: Period of the chunk, and tile of K, after the last one.
    tile, period: The current tile of K, and the current period of the chunk.
    """

    stop: Expr
    end: Expr
    tile: b.Variable
    period: b.Variable


@dataclass(frozen=True)
class Iteration:
    """Multiplies ``stages`` tiles of a slice and refills their registers."""

    spec: Spec
    memory: Memory
    weights: Weights
    sums: Sums
    fragments: Fragments
    loader: FragmentLoader
    walk: Walk

    def emit(self, *, guarded: bool) -> None:
        """Emit an iteration; guards keep both its tiles and its loads within the slice."""
        geo, stages, walk = self.spec.geo, self.spec.schedule.stages, self.walk
        for first in range(0, stages, geo.period):
            index = first // geo.period
            with b.when(walk.period.value + index < walk.stop if guarded else True):
                for slot in range(first, first + geo.period):
                    self._multiply(slot, fresh=geo.flushes and slot == first)
                    if geo.flushes and slot == first:
                        self.loader.read_starts(index + 1)
                if geo.flushes:
                    scales = self.weights.scales[index] if self.spec.gemm.scale else None
                    self.sums.flush(self.memory, scales, walk.period.value + index)
                for slot in range(first, first + geo.period):
                    self.weights.load(slot, slot + stages, walk.tile.value, walk.end, guarded=guarded)
        self.weights.advance()
        walk.tile.set(walk.tile.value + stages)
        walk.period.set(walk.period.value + stages // geo.period)
        self.loader.advance()

    def _multiply(self, slot: int, *, fresh: bool) -> None:
        """Emit the products of a tile; ``fresh`` ones start from what the period says."""
        geo = self.spec.geo
        self.loader.read_digits(slot + 1)
        for row_block, words in enumerate(self.weights.words[slot]):
            codes = [self.weights.codes(words, half, t) for t in range(4) for half in range(2)]
            for column_block, registers in enumerate(self.fragments.digits[slot % 2]):
                for place, (_, steps) in enumerate(geo.classes):
                    for step, (first, second) in enumerate(steps):
                        a = (*codes[2 * first : 2 * first + 2], *codes[2 * second : 2 * second + 2])
                        x = (registers[first], registers[second])
                        start = self.fragments.starts[column_block] if fresh and step == 0 else None
                        fragment = row_block * geo.column_blocks + column_block
                        self.sums.multiply(place, fragment, a, x, start)


class Digits:
    """Emits one kernel; parameters as `ladder.lower.cuda.gemv.Gemv`."""

    def __init__(
        self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule, prologue: Prologue | None = None
    ) -> None:
        self.spec = choose_spec(gemm, device, schedule, 0 if prologue is None else prologue.nbytes)
        self.prologue = prologue
        self.overlap = Overlap(device)

    def emit(self) -> None:
        spec, overlap, prologue = self.spec, self.overlap, self.prologue
        args = declare_arguments(spec.gemm, None if prologue is None else prologue.columns)
        overlap.declare(axes=2, cluster=spec.schedule.cluster)
        place = find_place(spec, args)
        words_at = b.Variable("int64", T.int64(0))
        overlap.release()
        memory = allocate(spec, prologue)
        if prologue is not None:
            place = replace(place, args=replace(place.args, x=memory.rows))
        converter, weights = Converter(spec, place, memory), Weights(spec, place, words_at)
        kernel = Body(
            spec, place, memory, converter, weights, Sums(spec, place.warp), Fragments.allocate(spec)
        )  # fmt: skip
        prefetch(spec, place, overlap)
        if prologue is not None:
            prologue.prefetch(place.is_first, place.warp.thread)
        overlap.wait()
        if prologue is not None:
            prologue.emit(place.is_first, place.warp.thread)
        kernel.emit()


@dataclass(frozen=True)
class Body:
    """The part of a kernel that runs once the kernel before has ended."""

    spec: Spec
    place: Place
    memory: Memory
    converter: Converter
    weights: Weights
    sums: Sums
    fragments: Fragments

    def emit(self) -> None:
        """Emit the walk over the chunks of K, and the stores."""
        place, size = self.place, self.spec.geo.chunk_tiles
        row_scales = RowScales(self.spec.geo, place)
        # Also where nothing is left of K for this block: it finishes its share of the outputs.
        chunks = b.keep(T.max((place.end_tile - place.first_tile + size - 1) // size, 1))
        with b.loop(chunks, rolled=True) as chunk:
            self._chunk(b.keep(place.first_tile + chunk * size))
        row_scales.keep(self.memory.row_scales)
        self._finish()

    def _chunk(self, first: Expr) -> None:
        """Multiply the tiles of K from ``first`` on that one chunk of x holds."""
        spec, stages, period = self.spec, self.spec.schedule.stages, self.spec.geo.period
        tiles = b.keep(T.min(spec.geo.chunk_tiles, self.place.end_tile - first))
        periods = b.keep((tiles + period - 1) // period)
        walk = self._walk(first, tiles)
        self.weights.begin(walk.tile.value)
        self.sums.clear()
        # x first: its conversion begins while the weights, which would delay it, are on their way.
        items = b.keep(periods * (4 * period))
        self.converter.begin(first, T.int32(0), items)
        for slot in range(stages):
            self.weights.load(slot, slot, walk.tile.value, walk.end, guarded=True)
        self.converter.convert(first, items)
        b.block_sync()
        lane = self.place.warp.lane
        loader = FragmentLoader(spec, self.memory, self.fragments, lane, walk.period.value)
        loader.begin()
        iteration = Iteration(spec, self.memory, self.weights, self.sums, self.fragments, loader, walk)
        count = walk.end - walk.tile.value
        iterations = b.keep((count + stages - 1) // stages)
        whole = b.keep(T.max(count // stages - 1, 0))
        with b.loop(whole, rolled=True):
            iteration.emit(guarded=False)
        with b.loop(iterations, whole, rolled=True):
            iteration.emit(guarded=True)
        self.sums.keep_integers()
        b.block_sync()

    def _walk(self, first: Expr, tiles: Expr) -> Walk:
        """Find the slice's tiles of the chunk that begins at tile ``first``."""
        period = self.spec.geo.period
        begin, stop = slice_periods(self.spec, self.place.warp.slice, tiles)
        begin, stop = b.keep(begin), b.keep(stop)
        end = b.keep(T.min(first + stop * period, self.place.end_tile))
        tile = b.Variable("int32", first + begin * period)
        return Walk(stop, end, tile, b.Variable("int32", begin))

    def _finish(self) -> None:
        """Add the slices and store the block's outputs."""
        spec, place = self.spec, self.place
        self.sums.leave(self.memory)
        halves = halves_of(place, spec.geo, self.memory.row_scales)
        gain = 1.0 if spec.geo.flushes else spec.form.factor
        SliceSums(spec.gemm, halves, spec.geo, place, self.memory.slices, spec.kind, gain).store()
