"""The pipeline of sm_100a and sm_103a: weights decoded into tensor memory, products by tcgen05.mma.

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

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.barriers import Ring
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.tcgen05_memory import (
    SLOTS,
    SUM_COLUMN,
    Issuer,
    TensorGeometry,
    TensorMemory,
    after_sync,
    before_sync,
    lanes_of,
    load_columns,
    place_tensor_memory,
    store_slab,
)
from ladder.lower.cuda.wgmma_epilogue import Epilogue
from ladder.lower.cuda.wgmma_geometry import MathThread, Spec, choose_spec, find_math_thread
from ladder.lower.cuda.wgmma_grid import Grid, Piece, Tiles, cut, emit_of_expert, find_grid
from ladder.lower.cuda.wgmma_memory import Memory, initialise_barriers, place_memory
from ladder.lower.cuda.wgmma_operands import Operands, allocate_registers
from ladder.lower.cuda.wgmma_producer import Producer, encode_map, prefetch
from ladder.lower.cuda.wgmma_products import pin_registers
from ladder.lower.gpu.arguments import Arguments, declare_arguments
from ladder.lower.gpu.emission import SharedTable
from schedules.schedule import GpuSchedule
from targets import TileDevice


class TensorSums:
    """A thread's sums, of which registers hold as many as the epilogue stages at a time.

    Its argument is the accumulator's number, as wgmma counts them. Sums of other columns are loaded when
    the first of them is asked for: all warps of a warpgroup must ask together.

    spec, who, base: The kernel's spec, this thread, and the first address of the block's tensor memory.
    """

    def __init__(self, spec: Spec, who: MathThread, base: Expr) -> None:
        self.spec, self.who, self.base = spec, who, base
        self.registers = b.local(spec.geo.chunk // 2, "uint32" if spec.integer else "float32")
        self.held: tuple[int, int] | None = None

    def __call__(self, index: int) -> Expr:
        geo = self.spec.geo
        m, within = divmod(index, geo.accumulators)
        part, register = divmod(within, geo.chunk // 2)
        if self.held != (m, part):
            self._load(m, part)
            self.held = (m, part)
        gain, held = self.spec.decoder.gains[register // 2 % 2], self.registers[register]
        total = T.Cast("float32", T.reinterpret("int32", held)) if self.spec.integer else held
        return total if gain == 1.0 else total * T.float32(gain)

    def _load(self, m: int, part: int) -> None:
        """Load the columns that the epilogue stages together, of row tile ``m`` of the warpgroup."""
        geo = self.spec.geo
        lanes = lanes_of(self.who, self.who.group * geo.m64 + m)
        place = self.base + lanes + T.uint32(SUM_COLUMN + part * geo.chunk)
        load_columns(place, self.registers, geo.chunk)
        pin_registers(self.registers, geo.chunk // 2)


@dataclass(frozen=True)
class DecodeLoop:
    """A slab of 128 bytes of K is decoded while the products of the one before run.

    tensor, base: The block's tensor memory, and its first address.
    """

    spec: Spec
    operands: Operands
    epilogue: Epilogue
    tensor: TensorMemory
    base: Expr

    def tile(self, piece: Piece) -> None:
        """Decode one tile's weights along K, wait for its sums and write them."""
        spec = self.spec
        held = self.epilogue.load(piece)
        phase = b.Variable("int32", 0)
        self._fetch(0)
        with b.loop(piece.iterations) as iteration:
            for slab in range(spec.geo.body):
                self._slab(slab, phase.value)
                if slab % SLOTS == SLOTS - 1:
                    phase.set(phase.value ^ 1)
                self._fetch_next(iteration, piece.iterations, slab)
        barriers.wait(self.tensor.finished.ptr_to([0]), 0)
        if spec.schedule.pair:  # another block's products arrive here: not after this block has ended
            for slot in range(SLOTS):
                barriers.wait(self.tensor.free.ptr_to([slot]), phase.value ^ 1)
        after_sync()
        self.epilogue.finish(piece, held, TensorSums(spec, self.operands.who, self.base))
        before_sync()

    def _slab(self, slab: int, phase: Expr) -> None:
        """Decode the fetched slab, and store it once the products of two slabs before are done."""
        geo, operands, slot = self.spec.geo, self.operands, slab % SLOTS
        for m in range(geo.m64):
            for tile in range(geo.tiles_per_slab):
                operands.decode(m, tile, 0)
        barriers.wait(self.tensor.free.ptr_to([slot]), phase ^ 1)
        after_sync()
        for m in range(geo.m64):
            place = self.base + lanes_of(operands.who, operands.row_tile(m))
            store_slab(place, slot, [register for step in range(4) for register in operands.step(0, m, step)])
        b.ptx("tcgen05.wait::st.sync.aligned")
        before_sync()
        b.emit(T.cuda.warp_sync())
        with b.when(operands.who.lane == 0):
            self.tensor.arrive_decoded(slot)

    def _fetch_next(self, iteration: Expr, iterations: Expr, slab: int) -> None:
        """Fetch the slab after ``slab``, unless the tile ends."""
        if slab + 1 < self.spec.geo.body:
            self._fetch(slab + 1)
        else:
            with b.when(iteration + 1 < iterations):
                self._fetch(0)

    def _fetch(self, slab: int) -> None:
        """Load an iteration's slab into registers, and leave the stage after its last one."""
        geo, ring = self.spec.geo, self.operands.ring
        if slab % geo.slabs == 0:
            ring.await_full(self.operands.memory.full)
        self.operands.fetch(slab)
        if (slab + 1) % geo.slabs == 0:
            self._arrive(self.operands.memory.empty.ptr_to([ring.stage.value]))
            ring.advance()

    def _arrive(self, barrier: Expr) -> None:
        """Arrive for the whole warp."""
        b.emit(T.cuda.warp_sync())
        with b.when(self.operands.who.lane == 0):
            barriers.arrive(barrier)


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
        overlap.declare(cluster=geo.blocks)
        b.device(min_blocks=geo.resident_blocks(spec.device))
        grid = find_grid(spec, args)
        overlap.release()
        pool = b.SharedPool()
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
            spec.decoder.fill_table(memory.table, grid.thread, spec.geo.threads)
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
