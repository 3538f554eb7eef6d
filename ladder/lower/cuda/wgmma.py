"""The sm_90a pipeline: TMA and bulk copies, mbarriers, warp-specialised wgmma.

``out^T = W · x^T``: 64 weight rows are wgmma's M, activation rows are its N. One producer warp
streams x (tensor copies, 128-byte swizzle) and packed words, scales and zero points
(bulk copies) through a ring of stages; math warpgroups decode words into the register
operand while the tensor core works on the previous slab (PTX ISA, "Asynchronous
warpgroup level matrix instructions").
"""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import wgmma8, wgmma16, wgmma_carry
from ladder.lower.cuda.barriers import Ring
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.wgmma16 import Parts
from ladder.lower.cuda.wgmma_epilogue import Epilogue
from ladder.lower.cuda.wgmma_geometry import MathThread, Spec, choose_spec, find_math_thread
from ladder.lower.cuda.wgmma_grid import Grid, Tiles, Walk, cut, emit_of_expert, find_grid, walk_experts
from ladder.lower.cuda.wgmma_memory import Memory, allocate_memory, initialise_barriers
from ladder.lower.cuda.wgmma_operands import Operands, Registers
from ladder.lower.cuda.wgmma_producer import Producer, encode_map, encode_stored_map, prefetch
from ladder.lower.cuda.wgmma_products import Consumer, Descriptor
from ladder.lower.cuda.wgmma_stores import TensorStores, encode_output_map
from ladder.lower.cuda.wgmma_stream import Stream, declare_workspace, divide
from ladder.lower.gpu.arguments import Arguments, declare_arguments
from ladder.lower.gpu.emission import SharedTable
from schedules.footprint import PRODUCER_REGISTERS, math_registers
from schedules.schedule import GpuSchedule
from targets import TileDevice


class Wgmma:
    """Emits one kernel."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.spec, self.overlap = choose_spec(gemm, device, schedule), Overlap(device)

    def emit(self) -> None:
        """Emit host part, set-up and both roles."""
        spec, overlap = self.spec, self.overlap
        args = declare_arguments(spec.gemm)
        x_map = encode_map(spec, args)
        stored_map = encode_stored_map(spec, args)
        y_map = encode_output_map(spec, args) if spec.geo.store_buffers(spec.device) else None
        workspace = declare_workspace(spec) if spec.schedule.stream_k else None
        overlap.declare(cluster=spec.geo.blocks)
        b.device(min_blocks=spec.geo.resident_blocks(spec.device))
        grid = find_grid(spec, args)
        stream = None if workspace is None else divide(spec, grid, workspace)
        overlap.release()
        memory = allocate_memory(spec, grid, args)
        block = Block(spec, args, grid, stream, memory, x_map, y_map, stored_map)
        block.set_up(overlap)
        overlap.wait()
        if spec.gemm.experts and spec.schedule.persistent:
            walk = walk_experts(spec, grid, args)
            block.emit_roles(walk.shown, walk)
        elif spec.gemm.experts:
            emit_of_expert(spec, grid, args, overlap, block.emit_roles)
        else:
            block.emit_roles(args, Tiles(spec, grid, stream, args.m))
        if spec.schedule.cluster > 1:
            # No block may leave while others still copy to it or arrive at its barriers.
            b.cluster_sync()


@dataclass(frozen=True)
class Block:
    """Values of a block before its warps take roles.

    x_map: The tensor map of x.
    y_map: That of the output; None where threads store.
    stored_map: That of weights that are not packed; None where they are.
    """

    spec: Spec
    args: Arguments
    grid: Grid
    stream: Stream | None
    memory: Memory
    x_map: Expr
    y_map: Expr
    stored_map: Expr

    def set_up(self, overlap: Overlap) -> None:
        """Initialise barriers and the decode table, and prefetch the first operands."""
        spec, grid, memory, stream = self.spec, self.grid, self.memory, self.stream
        with b.when(grid.thread == 0):
            # One arrival per math warp that reads what this block copies frees a stage.
            initialise_barriers(spec, memory, spec.schedule.warps * spec.schedule.cluster)
        if memory.table is not None:
            spec.decoder.fill_table(memory.table, grid.thread, spec.geo.threads)
        if overlap.possible:
            with b.when(grid.thread == 32):
                tile, k_tile = (grid.first, grid.first_tile) if stream is None else stream.first()
                prefetch(spec, self.args, self.x_map, cut(spec, grid, tile)[0], k_tile)
        b.sync(spec.schedule.cluster)
        if memory.cluster_sums is not None:
            memory.cluster_sums.announce()

    def emit_roles(self, args: Arguments, tiles: Walk) -> None:
        """Emit the producer and the math warps."""
        b.either(
            self.grid.thread >= self.spec.schedule.warps * 32,
            lambda: self._produce(args, tiles),
            lambda: self._compute(args, tiles),
        )

    def _produce(self, args: Arguments, tiles: Walk) -> None:
        """One thread keeps the ring full."""
        spec, warp = self.spec, self.grid.thread // 32
        if spec.geo.reallocates:
            b.ptx("setmaxnreg.dec.sync.aligned.u32", PRODUCER_REGISTERS)
        if self.stream is not None:
            with b.when(warp == spec.schedule.warps + 1):
                self.stream.announce()
        with b.when(warp == spec.schedule.warps):
            tiles.for_one_thread(lambda: self._producer(args).fill)
        if self.memory.cluster_sums is not None:
            self.memory.cluster_sums.meet()

    def _producer(self, args: Arguments) -> Producer:
        ring = Ring(self.spec.schedule.stages)
        return Producer(self.spec, args, self.grid, self.memory, self.x_map, ring, self.stored_map)

    def _compute(self, args: Arguments, tiles: Walk) -> None:
        """Decode, multiply, and hand finished tiles to the epilogue."""
        spec, memory = self.spec, self.memory
        if spec.geo.reallocates:
            b.ptx("setmaxnreg.inc.sync.aligned.u32", math_registers(spec.schedule.warps))
        who = find_math_thread(self.grid.thread)
        table = None if memory.table is None else SharedTable.of(memory.table, who.lane)
        tiles.for_each(self._loop(args, who, table).tile)
        if (stores := self._stores(who)) is not None:
            stores.leave()

    def _stores(self, who: MathThread) -> TensorStores | None:
        """Return the tensor copies to the output of a thread's team."""
        if self.y_map is None:
            return None
        return TensorStores(self.spec, self.memory, self.y_map, who.group_thread == 0)

    def _loop(
        self, args: Arguments, who: MathThread, table: SharedTable | None
    ) -> wgmma16.Loop16 | wgmma8.Loop8 | wgmma_carry.CarryLoop:
        """Allocate a math thread's registers and return its loop."""
        spec, scales = self.spec, self.memory.scales
        if spec.geo.carries:
            carried = wgmma_carry.allocate_state(spec)
            return wgmma_carry.CarryLoop(self._parts(args, who, table, carried.weights), carried)
        if spec.geo.groups.lane == 8:
            promoted = wgmma8.allocate_state(spec, args, who, scaled=scales is not None)
            parts = self._parts(args, who, table, promoted.weights)
            return wgmma8.Loop8(parts, promoted, args, scales)
        state = wgmma16.allocate_state(spec, scaled=scales is not None)
        return wgmma16.Loop16(self._parts(args, who, table, state.weights), state)

    def _parts(
        self, args: Arguments, who: MathThread, table: SharedTable | None, registers: Registers
    ) -> Parts:
        spec, memory = self.spec, self.memory
        x = Descriptor(spec, memory.x)
        consumer = Consumer(spec, self.grid, memory, who.lane)
        operands = Operands(spec, memory, who, consumer.ring, table, registers)
        sums = memory.staging, memory.cluster_sums, self.stream
        return Parts(spec, operands, x, consumer, Epilogue(spec, args, who, *sums, self._stores(who)))
