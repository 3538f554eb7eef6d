"""The sm_90a pipeline: TMA and bulk copies, mbarriers, warp-specialised wgmma.

``out^T = W · x^T``: 64 weight rows are wgmma's M, activation rows are its N. One producer warp
streams x (tensor copies, 128-byte swizzle) and packed words, scales and zero points
(bulk copies) through a ring of stages; math warpgroups decode words into the register
operand while the tensor core works on the previous slab (PTX ISA, "Asynchronous
warpgroup level matrix instructions").
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda import wgmma8, wgmma16, wgmma_carry
from ladder.lower.cuda.grouped import find_m_tile
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.wgmma_activations import encode_map
from ladder.lower.cuda.wgmma_epilogue import Epilogue
from ladder.lower.cuda.wgmma_grid import Grid, cut, find_grid
from ladder.lower.cuda.wgmma_loop import MathLoop, Parts
from ladder.lower.cuda.wgmma_memory import Memory, Ring, allocate_memory, initialise_barriers
from ladder.lower.cuda.wgmma_operands import Operands, Registers
from ladder.lower.cuda.wgmma_plan import Plan, choose_plan
from ladder.lower.cuda.wgmma_producer import Producer, prefetch
from ladder.lower.cuda.wgmma_products import Consumer, Descriptor
from ladder.lower.cuda.wgmma_stream import Stream, declare_workspace, divide
from ladder.lower.cuda.wgmma_thread import MathThread, find_math_thread
from ladder.lower.cuda.wgmma_tiles import Tiles
from ladder.lower.gpu.arguments import Arguments, declare_arguments
from ladder.lower.gpu.emission import SharedTable
from schedules.footprint import PRODUCER_REGISTERS, math_registers
from schedules.schedule import GpuSchedule
from targets import TileDevice

Expr = Any


class Wgmma:
    """Emits one kernel."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.plan, self.overlap = choose_plan(gemm, device, schedule), Overlap(device)

    def emit(self) -> None:
        """Emit host part, set-up and both roles."""
        plan, overlap = self.plan, self.overlap
        args = declare_arguments(plan.gemm)
        x_map = encode_map(plan, args)
        workspace = declare_workspace(plan) if plan.schedule.stream_k else None
        overlap.declare("blockIdx.x", *["clusterCtaIdx.x"] * (plan.geo.blocks > 1), "threadIdx.x")
        b.device(min_blocks=plan.geo.resident_blocks(plan.device))
        grid = find_grid(plan, args)
        stream = None if workspace is None else divide(plan, grid, workspace)
        overlap.release()
        memory = allocate_memory(plan, grid, args)
        block = Block(plan, args, grid, stream, memory, x_map)
        block.set_up(overlap)
        overlap.wait()
        if plan.gemm.experts:
            self._emit_expert(block)
        else:
            block.emit_roles(args, Tiles(plan, grid, stream, args.m))
        if plan.schedule.cluster > 1:
            # No block may leave while others still copy to it or arrive at its barriers.
            b.cluster_sync()

    def _emit_expert(self, block: Block) -> None:
        """Run the roles with the arguments of the expert whose activation rows the block has, if any."""
        plan, grid = self.plan, block.grid
        index = b.keep(cut(plan, grid, grid.first)[1])
        lane = b.bind(grid.thread % 32)
        found = find_m_tile(block.args, index, plan.schedule.tile_m, lane, self.overlap)
        first_m = b.keep(found.first)
        with b.when(found.exists):
            block.emit_roles(found.args, Tiles(plan, grid, None, found.args.m, first_m))


@dataclass(frozen=True)
class Block:
    """What a block knows before its warps part into roles.

    Parameters
    ----------
    plan, args, grid, stream, memory
        The kernel's plan, its tensors, the block's place in the grid, its share of tiles that are cut along
        K, and its shared memory.
    x_map
        The tensor map of x.
    """

    plan: Plan
    args: Arguments
    grid: Grid
    stream: Stream | None
    memory: Memory
    x_map: Expr

    def set_up(self, overlap: Overlap) -> None:
        """Initialise barriers and the decode table, and prefetch the first operands."""
        plan, grid, memory, stream = self.plan, self.grid, self.memory, self.stream
        with b.when(grid.thread == 0):
            initialise_barriers(plan, memory)
        if memory.table is not None:
            plan.decoder.decoder.fill_table(memory.table, grid.thread, plan.geo.threads)
        if overlap.possible:
            with b.when(grid.thread == 32):
                tile, k_tile = (grid.first, grid.first_tile) if stream is None else stream.first()
                prefetch(plan, self.args, self.x_map, cut(plan, grid, tile)[0], k_tile)
        if plan.schedule.cluster > 1:
            b.cluster_sync()
        else:
            b.block_sync()
        if memory.cluster_sums is not None:
            memory.cluster_sums.announce()

    def emit_roles(self, args: Arguments, tiles: Tiles) -> None:
        """Emit the producer and the math warps."""
        b.either(
            self.grid.thread >= self.plan.schedule.warps * 32,
            lambda: self._produce(args, tiles),
            lambda: self._compute(args, tiles),
        )

    def _produce(self, args: Arguments, tiles: Tiles) -> None:
        """One thread keeps the ring full."""
        plan, warp = self.plan, self.grid.thread // 32
        if plan.geo.reallocates:
            b.ptx("setmaxnreg.dec.sync.aligned.u32", PRODUCER_REGISTERS)
        if self.stream is not None:
            with b.when(warp == plan.schedule.warps + 1):
                self.stream.announce()
        # ptxas takes the operands of copies from uniform registers only where it sees one thread elected.
        with b.when(warp == plan.schedule.warps), b.when(T.cuda.elect_sync()):
            ring = Ring(plan.schedule.stages)
            tiles.for_each(Producer(plan, args, self.grid, self.memory, self.x_map, ring).fill)
        if self.memory.cluster_sums is not None:
            self.memory.cluster_sums.meet()

    def _compute(self, args: Arguments, tiles: Tiles) -> None:
        """Decode, multiply, and hand finished tiles to the epilogue."""
        plan, memory = self.plan, self.memory
        if plan.geo.reallocates:
            b.ptx("setmaxnreg.inc.sync.aligned.u32", math_registers(plan.schedule.warps))
        who = find_math_thread(self.grid.thread)
        table = None if memory.table is None else SharedTable.of(memory.table, who.lane)
        tiles.for_each(self._loop(args, who, table).tile)

    def _loop(self, args: Arguments, who: MathThread, table: SharedTable | None) -> MathLoop:
        """Allocate a math thread's registers and return its loop."""
        plan, scales = self.plan, self.memory.scales
        if plan.geo.carries:
            carried = wgmma_carry.allocate_state(plan)
            return wgmma_carry.CarryLoop(self._parts(args, who, table, carried.weights), carried)
        if plan.geo.lane == 8:
            promoted = wgmma8.allocate_state(plan, args, who, scaled=scales is not None)
            parts = self._parts(args, who, table, promoted.weights)
            return wgmma8.Loop8(parts, promoted, args, scales)
        state = wgmma16.allocate_state(plan, scaled=scales is not None)
        return wgmma16.Loop16(self._parts(args, who, table, state.weights), state)

    def _parts(
        self, args: Arguments, who: MathThread, table: SharedTable | None, registers: Registers
    ) -> Parts:
        """Return the parts of a math loop."""
        plan, memory = self.plan, self.memory
        x = Descriptor(plan, memory.x)
        consumer = Consumer(plan, self.grid, memory, who.lane)
        operands = Operands(plan, memory, who, consumer.ring, table, registers)
        epilogue = Epilogue(plan, args, who, memory.staging, memory.cluster_sums, self.stream)
        return Parts(plan, operands, x, consumer, epilogue)
