"""The pipeline for few activation rows: packed words stream from global memory into registers.

A block owns 16 or 32 weight rows per row-warp, any number of them, so that a grid fills the
multiprocessors evenly; its warps split K, and so may the blocks of a cluster: then each needs only
its share of x. Each thread keeps ``stages`` tiles of words in flight (`gemv_weights`), x passes through
shared memory in chunks of K (`gemv_activations`), and ``mma`` reduces. Slices are added in shared memory
at the end (`gemv_sums`). Nothing depends on the size of M, N or K: *iterations* of ``stages`` tiles per slice
run without guards as long as they and the loads they issue stay within K, guarded iterations finish, and
blocks along the second grid axis serve further activation rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.activations import SPAN_CHUNKS, Copier, SharedCopier
from ladder.lower.cuda.gemv_activations import Activations, OffsetSums
from ladder.lower.cuda.gemv_geometry import STRIP, Spec, choose_spec
from ladder.lower.cuda.gemv_place import Place, find_place, prefetch
from ladder.lower.cuda.gemv_sums import RowScales, SliceSums, halves_of
from ladder.lower.cuda.gemv_weights import Cursor, Weights, warp_words
from ladder.lower.cuda.launch import Overlap, Prologue
from ladder.lower.gpu.accumulators import Accumulators
from ladder.lower.gpu.activation_tile import CHUNK_WORDS
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.emission import SharedTable, allocate_table
from ladder.lower.gpu.instructions import STEP_COLUMNS
from ladder.lower.gpu.tile_multiplier import TileMultiplier, WideningMultiplier
from schedules.footprint import X_BUFFERS
from schedules.group_values import shares_values
from schedules.schedule import GpuSchedule
from targets import TileDevice


@dataclass(frozen=True)
class Memory:
    """Shared memory of a block, and the accumulators of a thread.

    table: The decode table, if the decoder has one.
    offset_sums: Sums of x that the block shares, if it does.
    sums: The thread's accumulators.
    x: Buffers of x.
    slices, row_scales: Where the slices of K leave their sums, and scales of the block's weight rows; they
        reuse the memory of everything else.
    values: Where the lanes of each warp hand out scales and zero points, if they do.
    rows: Activation rows that a prologue computes; None where they are an argument.
    """

    table: SharedTable | None
    offset_sums: OffsetSums | None
    sums: Accumulators
    x: Any
    slices: Any
    row_scales: Any
    values: Any = None
    rows: Any = None


def allocate(spec: Spec, place: Place, prologue: Prologue | None) -> Memory:
    """Allocate shared memory and accumulators."""
    geo, schedule = spec.geo, spec.schedule
    pool = place.pool or b.SharedPool()
    rows = None if prologue is None else prologue.allocate(pool)
    table = allocate_table(pool, spec.decoder.table_words, place.warp.lane)
    shared_sums = OffsetSums(spec, place.warp, pool) if spec.shares_sums else None
    known = None if shared_sums is None else shared_sums.read
    sums = Accumulators(
        spec.groups, spec.step, spec.decoder.operand, geo.row_blocks, spec.row_blocks, spec.left, known
    )
    words = geo.threads // 32 * warp_words(spec)
    values = pool.alloc((words,), "uint32", align=128) if shares_values(spec.gemm) else None
    x = pool.alloc((X_BUFFERS * geo.buffer_chunks * CHUNK_WORDS,), "uint32", align=128)
    pool.move_base_to(0)
    slices = pool.alloc((schedule.split_k, schedule.tile_m, geo.pitch), sums.dtype, align=128)
    row_scales = pool.alloc((geo.rows,), "float32", align=128)
    pool.commit()
    return Memory(table, shared_sums, sums, x, slices, row_scales, values, rows)


@dataclass(frozen=True)
class Iteration:
    """Multiplies ``stages`` tiles of a slice of K and refills their registers."""

    spec: Spec
    place: Place
    memory: Memory
    cursor: Cursor
    weights: Weights
    x: Activations
    multiplier: TileMultiplier

    def emit(self, *, guarded: bool) -> None:
        """Emit an iteration; guards keep both its tiles and its loads within K."""
        geo = self.spec.geo
        for first in range(0, self.spec.schedule.stages, geo.run):
            self.x.ensure()
            self.weights.begin(first, guarded=guarded)
            for index in range(geo.run):
                self._multiply(first + index, guarded)
                self.weights.load(first + index, geo.iteration_tiles + index, guarded=guarded)
            self.cursor.advance()
            self.x.advance()

    def _multiply(self, slot: int, guarded: bool) -> None:
        """Decode and multiply what a slot holds."""
        geo, index = self.spec.geo, slot % self.spec.geo.run

        def load_activations(block: int, span: int, out: Any) -> None:
            self.x.loader.load(block, index * geo.tile_chunks + span * SPAN_CHUNKS, out)

        # A guarded tile may be the last of its group that exists.
        flush = guarded or (index + 1) % geo.flush_tiles == 0
        if self.memory.offset_sums is not None:
            period = 1 if guarded else geo.flush_tiles
            self.memory.offset_sums.tiles = range(index // period * period, index // period * period + period)
        with b.when(self.cursor.inside(index) if guarded else True):
            tile = b.bind(self.cursor.run.value * geo.run + index)
            group = self.weights.values.read(slot)
            for registers in group:
                registers.tile = tile if geo.run % 2 else index
            self.memory.sums.scale_columns(self.place.args, self.place.warp.lane, self.place.first_m, tile)
            self.multiplier.emit(self.weights.words[slot], group, load_activations, flush)


class Gemv:
    """Emits one kernel.

    gemm, device, schedule: The problem, what is compiled for, and how the work is divided.
    prologue: What computes the activation rows in the kernel; None where they are an argument.
    """

    def __init__(
        self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule, prologue: Prologue | None = None
    ) -> None:
        self.spec = choose_spec(gemm, device, schedule, 0 if prologue is None else prologue.nbytes)
        self.prologue = prologue
        self.copier = Copier(device) if prologue is None else SharedCopier(device)
        self.overlap = Overlap(device)

    def emit(self) -> None:
        spec, overlap, prologue = self.spec, self.overlap, self.prologue
        args = declare_arguments(spec.gemm, None if prologue is None else prologue.columns)
        overlap.declare(axes=2, cluster=spec.schedule.cluster)
        place = find_place(spec, args, overlap)
        cursor = Cursor(spec, place)
        overlap.release()
        memory = allocate(spec, place, prologue)
        weights = Weights(spec, place, cursor, memory.values)
        prefetch(spec, place, overlap)
        if prologue is not None:
            place = replace(place, args=replace(place.args, x=memory.rows))
            prologue.prefetch(place.is_first, place.warp.thread)
        x = Activations(spec, place, self.copier, memory.x, memory.offset_sums)
        overlap.wait()
        with b.when(place.exists):
            self._multiply(place, memory, cursor, weights, x)

    def _multiply(
        self, place: Place, memory: Memory, cursor: Cursor, weights: Weights, x: Activations
    ) -> None:
        """Emit the walk over K, and the stores."""
        spec, geo, thread = self.spec, self.spec.geo, place.warp.thread
        if self.prologue is None:  # what all wait for comes first
            x.fill()
            weights.fill()
        else:
            self.prologue.emit(place.is_first, thread)
            weights.fill()
            x.fill()
        row_scales = RowScales(geo, place)
        if memory.table is not None:  # while loads are in flight; a barrier comes before the first tile
            spec.decoder.fill_table(memory.table.buffer, thread, geo.threads)
        if spec.widens:
            multiplier: TileMultiplier = WideningMultiplier(spec.decoder, memory.sums, spec.gemm.activation)
        else:
            multiplier = TileMultiplier(spec.decoder, memory.sums, memory.table)
        iteration = Iteration(spec, place, memory, cursor, weights, x, multiplier)
        tiles, own = geo.iteration_tiles, place.share
        # Counted down: ptxas would compute a bound anew in every iteration.
        whole = T.max(own.count // tiles - 1, 0)
        for guarded, count in ((False, whole), (True, (own.count + tiles - 1) // tiles - whole)):
            left = b.Variable("int32", count)
            with b.repeat_while(left.value > 0):
                iteration.emit(guarded=guarded)
                left.set(left.value - 1)
        _finish(spec, place, memory, row_scales)


def _finish(spec: Spec, place: Place, memory: Memory, row_scales: RowScales) -> None:
    """Leave this warp's sums in shared memory, where all slices of K are added and stored."""
    sums, lanes, warp, schedule = memory.sums, spec.step.lanes, place.warp, spec.schedule
    sums.join_lanes()
    b.block_sync()
    row_scales.keep(memory.row_scales)
    for fragment in range(spec.geo.row_blocks * spec.row_blocks):
        block, m_block = divmod(fragment, spec.row_blocks)
        with b.when(lanes.is_first(warp.lane)):
            for i in range(lanes.accumulators):
                row, m = lanes.position(warp.lane, i)
                row = warp.row_warp * schedule.warp_rows + block * STRIP + row
                b.store(memory.slices, sums.result(fragment, i), warp.slice, m_block * STEP_COLUMNS + m, row)
    halves = halves_of(place, spec.geo, memory.row_scales)
    SliceSums(spec.gemm, halves, spec.geo, place, memory.slices, sums.dtype).store()
