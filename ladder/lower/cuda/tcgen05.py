"""The sm_100a pipeline: weights decoded into tensor memory, products by tcgen05.mma.

``out^T = W · x^T`` as in the pipeline ``wgmma``, whose producer, decoders and epilogue it shares: 128 weight
rows are the instruction's M, activation rows its N. Math warps decode packed words and store the operand
into tensor memory, in the order of mma's fragments; one thread starts the products of a slab with x from
shared memory; sums stay in tensor memory until the tile ends (PTX ISA, "TensorCore 5th Generation Family
Instructions"). The blocks of a pair (``cta_group::2``) multiply together: each decodes its own weight rows
and holds half of the activation rows, the first one's thread starts the products of both, and these arrive at
the barriers of both. No such kernel has run on hardware yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.tcgen05_loop import DecodeLoop
from ladder.lower.cuda.tcgen05_memory import TensorMemory, after_sync, place_tensor_memory
from ladder.lower.cuda.tcgen05_products import Issuer
from ladder.lower.cuda.tcgen05_spec import TensorGeometry
from ladder.lower.cuda.wgmma_activations import encode_map
from ladder.lower.cuda.wgmma_epilogue import Epilogue
from ladder.lower.cuda.wgmma_grid import Grid, cut, find_grid
from ladder.lower.cuda.wgmma_memory import Memory, Ring, initialise_barriers, place_memory
from ladder.lower.cuda.wgmma_operands import Operands, allocate_registers
from ladder.lower.cuda.wgmma_producer import Producer, prefetch
from ladder.lower.cuda.wgmma_spec import Spec, choose_spec
from ladder.lower.cuda.wgmma_thread import find_math_thread
from ladder.lower.cuda.wgmma_tiles import Tiles, emit_of_expert
from ladder.lower.gpu.arguments import Arguments, declare_arguments
from ladder.lower.gpu.emission import SharedTable
from schedules.schedule import GpuSchedule
from targets import TileDevice

Expr = Any


class Tcgen05:
    """Emits one kernel."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.spec, self.overlap = choose_spec(gemm, device, schedule, TensorGeometry), Overlap(device)

    def emit(self) -> None:
        """Emit host part, set-up and the three roles."""
        spec, overlap, geo = self.spec, self.overlap, self.spec.geo
        assert isinstance(geo, TensorGeometry)
        args = declare_arguments(spec.gemm)
        x_map = encode_map(spec, args)
        overlap.declare("blockIdx.x", *["clusterCtaIdx.x"] * (geo.blocks > 1), "threadIdx.x")
        b.device(min_blocks=geo.resident_blocks(spec.device))
        grid = find_grid(spec, args)
        overlap.release()
        pool = b.shared_pool()
        memory, tensor = place_memory(pool, spec, grid, args), place_tensor_memory(pool, geo)
        pool.commit()
        self._set_up(args, grid, memory, tensor, x_map)
        overlap.wait()
        # Made an address once: every access of tensor memory adds to it.
        base = b.Variable("uint32", tensor.word[0]).value
        block = Block(spec, grid, memory, tensor, x_map, base)
        if spec.gemm.experts:
            emit_of_expert(spec, grid, args, overlap, block.emit_roles)
        else:
            block.emit_roles(args, Tiles(spec, grid, None, args.m))
        b.sync(spec.schedule.cluster)
        with b.when(grid.thread // 32 == spec.schedule.warps + 1):
            tensor.release(base)

    def _set_up(self, args: Arguments, grid: Grid, memory: Memory, tensor: TensorMemory, x_map: Expr) -> None:
        """Initialise barriers and the decode table, allocate tensor memory, prefetch the first operands."""
        spec = self.spec
        with b.when(grid.thread == 0):
            tensor.initialise()
            # Math warps leave a stage, and products of every block that has a copy of its x; of a pair one
            # block's thread starts those of both.
            products = 1 if spec.schedule.pair else spec.schedule.cluster
            initialise_barriers(spec, memory, spec.schedule.warps + products)
        with b.when(grid.thread // 32 == spec.schedule.warps + 1):
            tensor.allocate()
        if memory.table is not None:
            spec.decoder.decoder.fill_table(memory.table, grid.thread, spec.geo.threads)
        if self.overlap.possible:
            with b.when(grid.thread == 32):
                prefetch(spec, args, x_map, cut(spec, grid, grid.first)[0], grid.first_tile)
        b.sync(spec.schedule.cluster)
        after_sync()


@dataclass(frozen=True)
class Block:
    """Values of a block before its warps take roles.

    x_map, base: The tensor map of x, and the first address of its tensor memory.
    """

    spec: Spec
    grid: Grid
    memory: Memory
    tensor: TensorMemory
    x_map: Expr
    base: Expr

    def emit_roles(self, args: Arguments, tiles: Tiles) -> None:
        """Emit the producer, the thread that starts products, and the warps that decode."""
        spec, grid, memory, tensor, base = self.spec, self.grid, self.memory, self.tensor, self.base
        warp = grid.thread // 32

        def produce() -> None:
            with b.when(warp == spec.schedule.warps), b.when(T.cuda.elect_sync()):
                producer = Producer(spec, args, grid, memory, self.x_map, Ring(spec.schedule.stages))
                tiles.for_each(producer.fill)
                if spec.schedule.cluster > 1:
                    producer.drain()
            starts = warp == spec.schedule.warps + 1
            if spec.schedule.pair:
                starts = T.And(starts, grid.member == 0)
            with b.when(starts), b.when(T.cuda.elect_sync()):
                tiles.for_each(Issuer(spec, grid, memory, tensor, base, args.k_tiles).tile)

        def compute() -> None:
            who = find_math_thread(grid.thread)
            table = None if memory.table is None else SharedTable.of(memory.table, who.lane)
            registers = allocate_registers(spec, scaled=memory.scales is not None, sets=1)
            operands = Operands(spec, memory, who, Ring(spec.schedule.stages), table, registers)
            epilogue = Epilogue(spec, args, who, memory.staging, None, None)
            tiles.for_each(DecodeLoop(spec, operands, epilogue, tensor, base).tile)

        b.either(grid.thread >= spec.schedule.warps * 32, produce, compute)
