"""The pipeline for very few activation rows and narrow integer codes: integer products of codes in place.

``word & 0x03030303`` *is* four unsigned operands of ``mma.m16n8k32.u8.s8``, each counting a power
of two for the place of its codes: one logic instruction for four weights, no shift, no conversion.
x is decomposed once per block into signed integer digits (`ladder.lower.cuda.digit_decomposition`) that
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
from ladder.lower import builder as b
from ladder.lower.cuda.digit_activations import Converter, FragmentLoader, Fragments, Memory, allocate
from ladder.lower.cuda.digit_geometry import Spec, choose_spec
from ladder.lower.cuda.digit_place import Place, find_place, prefetch, slice_periods
from ladder.lower.cuda.digit_sums import Sums
from ladder.lower.cuda.digit_weights import Weights
from ladder.lower.cuda.gemv_sums import Rows, SliceSums, halves_of
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.prologue import Prologue
from ladder.lower.gpu.arguments import declare_arguments
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule
from targets import TileDevice

Expr = Any


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
        """Emit the whole body."""
        spec, overlap, prologue = self.spec, self.overlap, self.prologue
        args = declare_arguments(spec.gemm, None if prologue is None else prologue.columns)
        shared = ["clusterCtaIdx.x"] * (spec.schedule.cluster > 1)
        overlap.declare("blockIdx.x", "blockIdx.y", *shared, "threadIdx.x")
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
        # Also where nothing is left of K for this block: it finishes its share of the outputs.
        chunks = b.keep(T.max((place.end_tile - place.first_tile + size - 1) // size, 1))
        with b.loop(chunks, rolled=True) as chunk:
            self._chunk(b.keep(place.first_tile + chunk * size))
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
        row_scales = self._read_row_scales()
        self.converter.convert(first, items)
        self._keep_row_scales(row_scales)
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

    def _read_row_scales(self) -> Any:
        """Load this thread's share of the block's row scales, so that nothing waits for them at the end."""
        args, geo, threads = self.place.args, self.spec.geo, self.spec.geo.threads
        count = -(-geo.rows // threads)
        values, last = b.local(count, "uint32"), args.n_tiles * TILE - 1
        for i in range(count):
            row, first = self.place.warp.thread + i * threads, self.place.first_row
            if geo.halves > 1:
                own = T.min(first + row % geo.columns, args.n - 1)
                row = T.min(row // geo.columns * args.n + own, last)
            else:
                row = T.min(first + row, last)
            b.ptx("ld.global.u32", values[i], args.row_scale.ptr_to([row]))
        return values

    def _keep_row_scales(self, values: Any) -> None:
        rows, threads = self.spec.geo.rows, self.spec.geo.threads
        for i in range(-(-rows // threads)):
            row = self.place.warp.thread + i * threads
            with b.when(row < rows):
                b.store(self.memory.row_scales, T.reinterpret(values[i], dtype="float32"), row)

    def _finish(self) -> None:
        """Add the slices and store the block's outputs."""
        spec, place = self.spec, self.place
        self.sums.leave(self.memory)
        # Sums read row scales from this block's copy.
        halves = tuple(
            replace(args, row_scale=Rows(self.memory.row_scales, place.first_row - half * spec.geo.columns))
            for half, args in enumerate(halves_of(place.args, spec.geo))
        )
        gain = 1.0 if spec.geo.flushes else spec.form.factor
        SliceSums(
            spec.gemm, halves, spec.geo, place.warp.thread, place.rank, place.first_m, place.m_count,
            place.first_row, self.memory.slices, spec.kind, gain,
        ).store()  # fmt: skip
