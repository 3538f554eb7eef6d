"""The sm_90a pipeline: TMA and bulk copies, mbarriers, warp-specialised wgmma.

``out^T = W · X^T``: 64 weight rows are wgmma's M, tokens are its N. One producer warp
streams X (tensor copies, 128-byte swizzle) and packed words, scales and zero points
(bulk copies) through a ring of stages; math warpgroups decode words into the register
operand while the tensor core works on the previous slab (PTX ISA, "Asynchronous
warpgroup level matrix instructions").
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda import wgmma_epilogue
from ladder.lower.cuda.arguments import Arguments, declare_arguments
from ladder.lower.cuda.decode import Decoder, load_order, make_decoder
from ladder.lower.cuda.instructions import PTX_FP8
from ladder.lower.cuda.scales import bytes4, pair16
from ladder.lower.cuda.wgmma_geometry import MATH_REGISTERS, PRODUCER_REGISTERS, Geometry
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, check
from targets import TileDevice

Expr = Any

TENSOR_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

INSTRUCTIONS = {
    "float16": "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16",
    "bfloat16": "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16",
    "int8": "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8",
    "fp8_e4m3": "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{w}.e4m3",
    "fp8_e5m2": "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{w}.e5m2",
}

SWIZZLE_128 = 3


def emit(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, name: str) -> Any:
    """Emit one kernel, generic in M, N and K.

    Parameters
    ----------
    gemm
        The problem; only its ``shape_free()`` part matters.
    device
        An sm_90a device.
    schedule
        A ``"wgmma"`` schedule.
    name
        Symbol of the kernel's host entry.

    Returns
    -------
    A TIRx PrimFunc.

    Raises
    ------
    ScheduleError
        If the device has no wgmma or the schedule does not fit.
    """
    from ladder.lower.cuda.wgmma8 import kernel_class

    check("wgmma" in device.features, f"{device.name} has no wgmma; use the 'mma' pipeline")
    with b.function(name) as result:
        kernel_class(Geometry(gemm, schedule))(gemm, device, schedule).emit()
    return result.func


class Kernel:
    """One kernel being emitted: arguments, shared memory, and the two roles."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.gemm, self.device, self.schedule = gemm, device, schedule
        self.geo = Geometry(gemm, schedule)
        self.decoder: Decoder = make_decoder(gemm, device)
        self.args: Arguments = declare_arguments(gemm)

    # ---- skeleton -------------------------------------------------------------------
    def emit(self) -> None:
        """Emit host part, set-up and both roles."""
        self._tensor_map()
        b.device(min_blocks=1)
        self._grid()
        self._shared_memory()
        self._barriers()
        b.either(self.thread >= self.schedule.warps * 32, self._producer, self._math)
        if self.schedule.split_k > 1:
            # No block may leave while others still read its partial sums.
            b.emit(T.cuda.cluster_sync())

    def _tensor_map(self) -> None:
        """Encode the tensor map of X on the host: rows of 128 swizzled bytes, zero fill outside."""
        geo, x = self.geo, self.args.x
        element = geo.lane // 8
        dtype = self.gemm.activation if geo.lane == 16 else "uint8"
        self.x_map = I.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)
        extent_k, extent_m = self.args.k_x, self.args.m
        b.emit(
            T.call_packed(
                "runtime.cuTensorMapEncodeTiled",
                *(self.x_map, dtype, 2, x.data, extent_k, extent_m, extent_k * element),
                *(geo.slab, self.schedule.tile_m, 1, 1, 0, SWIZZLE_128, 2, 0),
            )
        )

    def _grid(self) -> None:
        """Place blocks: one per tile and K slice, or one per multiprocessor."""
        plan, args = self.schedule, self.args
        n_blocks = (args.n_tiles + self.geo.row_tiles - 1) // self.geo.row_tiles
        m_blocks = (args.m + plan.tile_m - 1) // plan.tile_m
        if plan.persistent:
            (self.block,) = b.block_index([self.device.units])
        else:
            (self.block,) = b.block_index([n_blocks * m_blocks * plan.split_k])
        self.rank: Expr = b.cluster_rank([plan.split_k])[0] if plan.split_k > 1 else 0
        self.thread = b.thread_index(self.geo.threads)
        self.n_blocks, self.m_blocks = b.bind(n_blocks), b.bind(m_blocks)
        body_tiles = self.geo.body * self.geo.tiles_per_slab
        self.turns = b.bind((args.k_tiles + body_tiles * plan.split_k - 1) // (body_tiles * plan.split_k))
        self.first_tile = b.bind(self.rank * self.turns * body_tiles) if plan.split_k > 1 else 0

    def _shared_memory(self) -> None:
        geo, stages = self.geo, self.schedule.stages
        pool = b.shared_pool()
        self.x_tile = pool.alloc((stages, geo.x_bytes), "uint8", align=1024)
        self.words = pool.alloc((stages, geo.word_bytes // 4), "uint32", align=128)
        self.scales = self._row_buffer(pool, geo.scale_stage_bytes, self.args.scales)
        self.zeros = self._row_buffer(pool, geo.zero_stage_bytes, self.args.zeros)
        self.staging = pool.alloc((geo.warpgroups, geo.chunk * geo.pitch), "float32", align=128)
        self.full = pool.alloc((stages,), "uint64", align=8)
        self.empty = pool.alloc((stages,), "uint64", align=8)
        pool.commit()

    def _row_buffer(self, pool: Any, stage_bytes: int, source: Any) -> Any:
        """Allocate stages for rows of ``source`` (scales or zeros), if there are any."""
        if not stage_bytes:
            return None
        element = self.geo.scale_bytes if source is self.args.scales else self.geo.zero_bytes
        return pool.alloc((self.schedule.stages, stage_bytes // element), source.dtype, align=128)

    def _barriers(self) -> None:
        def initialise() -> None:
            for stage in range(self.schedule.stages):
                b.emit(T.ptx.mbarrier.init.shared.b64(self.full.ptr_to([stage]), T.uint32(1)))
                # One arrival per math warp frees a stage.
                warps = T.uint32(self.schedule.warps)
                b.emit(T.ptx.mbarrier.init.shared.b64(self.empty.ptr_to([stage]), warps))
            b.emit(T.ptx.fence.mbarrier_init.release.cluster())

        with b.when(self.thread == 0):
            initialise()
        b.block_sync()

    # ---- tiles ----------------------------------------------------------------------
    def _for_each_tile(self, body: Any) -> None:
        """Run ``body(first row tile, first token)`` for every output tile of this block."""
        plan = self.schedule
        if not plan.persistent:
            body(*self._tile_origin(self.block // plan.split_k if plan.split_k > 1 else self.block))
            return
        tile = b.Variable("int32", self.block)
        with b.repeat_while(tile.value < self.n_blocks * self.m_blocks):
            body(*self._tile_origin(tile.value))
            tile.set(tile.value + self.device.units)

    def _tile_origin(self, tile: Expr) -> tuple[Expr, Expr]:
        """Walk columns of ``raster`` row blocks, tokens inside, so that neighbours share X and W in L2."""
        width = self.schedule.raster * self.m_blocks
        column = b.bind(tile // width)
        inside = b.bind(tile % width)
        columns = b.bind(T.min(self.schedule.raster, self.n_blocks - column * self.schedule.raster))
        row_tile = (column * self.schedule.raster + inside % columns) * self.geo.row_tiles
        return b.bind(row_tile), b.bind(inside // columns * self.schedule.tile_m)

    # ---- producer -------------------------------------------------------------------
    def _producer(self) -> None:
        """One thread keeps the ring full."""
        if self.geo.reallocates:
            b.ptx("setmaxnreg.dec.sync.aligned.u32", PRODUCER_REGISTERS)
        with b.when(self.thread == self.schedule.warps * 32):
            ring = Ring(self.schedule.stages)

            def produce(row_tile: Expr, token: Expr) -> None:
                stages_per_tile = self.turns * (self.geo.body // self.geo.slabs)
                with b.loop(stages_per_tile) as step:
                    self._fill_stage(
                        ring, row_tile, token, b.bind(self.first_tile + step * self.geo.stage_tiles)
                    )
                    ring.advance()

            self._for_each_tile(produce)
        if self.schedule.split_k > 1:
            # Every thread of the cluster takes part in the barrier before the sums are read.
            b.emit(T.cuda.cluster_sync())

    def _fill_stage(self, ring: Ring, row_tile: Expr, token: Expr, k_tile: Expr) -> None:
        """Wait until the stage is free, then start every copy into it."""
        geo, stage = self.geo, ring.stage.value
        b.emit(T.cuda.mbarrier_wait(self.empty.ptr_to([stage]), ring.phase.value ^ 1))
        barrier = self.full.ptr_to([stage])
        b.emit(T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, T.uint32(geo.stage_bytes)))
        for slab in range(geo.slabs):
            target = self.x_tile.ptr_to([stage, slab * self.schedule.tile_m * 128])
            column = k_tile * TILE + slab * geo.slab
            b.ptx(TENSOR_COPY, target, T.address_of(self.x_map), column, token, barrier)
        for index in range(geo.row_tiles):
            # Tiles beyond the matrix repeat the last one: their rows are never stored.
            row = b.bind(T.min(row_tile + index, self.args.n_tiles - 1))
            self._fill_words(stage, barrier, index, row, k_tile)
            self._fill_rows(stage, barrier, index, row, k_tile)

    def _fill_words(self, stage: Expr, barrier: Expr, index: int, row: Expr, k_tile: Expr) -> None:
        """Copy the packed tiles of one row tile; tiles beyond K repeat the last (X is zero there)."""
        geo, words = self.geo, self.args.words
        base = index * geo.stage_tiles * geo.tile_words
        size = T.uint32(geo.tile_words * 4)

        def whole() -> None:
            total = T.uint32(geo.stage_tiles * geo.tile_words * 4)
            b.ptx(BULK_COPY, self.words.ptr_to([stage, base]), words.ptr_to([row, k_tile, 0]), total, barrier)

        def clamped() -> None:
            for step in range(geo.stage_tiles):
                tile = T.min(k_tile + step, self.args.k_tiles - 1)
                target = self.words.ptr_to([stage, base + step * geo.tile_words])
                b.ptx(BULK_COPY, target, words.ptr_to([row, tile, 0]), size, barrier)

        b.either(k_tile + geo.stage_tiles <= self.args.k_tiles, whole, clamped)

    def _fill_rows(self, stage: Expr, barrier: Expr, index: int, row: Expr, k_tile: Expr) -> None:
        """Copy 64 scales and zero points per scale row."""
        geo, tile_n = self.geo, self.schedule.tile_n
        for step in range(geo.scale_rows if self.scales is not None or self.zeros is not None else 0):
            group = self._group_row(k_tile * TILE + step * geo.scale_step)
            if self.scales is not None:
                target = self.scales.ptr_to([stage, step * tile_n + index * TILE])
                source = self.args.scales.ptr_to([group, row * TILE])
                b.ptx(BULK_COPY, target, source, T.uint32(TILE * geo.scale_bytes), barrier)
            for part in range(geo.zero_parts if self.zeros is not None else 0):
                line = (step * geo.zero_parts + part) * tile_n
                target = self.zeros.ptr_to([stage, line + index * TILE])
                source = self.args.zeros.ptr_to(self._zero_index(group, part, row * TILE))
                b.ptx(BULK_COPY, target, source, T.uint32(TILE * geo.zero_bytes), barrier)

    def _zero_index(self, group: Expr, part: int, n: Expr) -> list[Expr]:
        return [group, part, n] if self.geo.zero_parts == 2 else [group, n]

    def _group_row(self, k: Expr) -> Expr:
        """Return the scale row of element ``k``; rows beyond K repeat the last."""
        if self.geo.group == 0:
            return 0
        return b.bind(T.min(k // self.geo.group, self.args.groups - 1))

    # ---- math -----------------------------------------------------------------------
    def _math(self) -> None:
        """Decode, multiply, and hand finished tiles to the epilogue."""
        geo = self.geo
        if geo.reallocates:
            b.ptx("setmaxnreg.inc.sync.aligned.u32", MATH_REGISTERS)
        self.group_index = b.bind(self.thread // 128)
        self.member = b.bind(self.thread % 128)
        self.warp, self.lane = b.bind(self.member // 32), b.bind(self.member % 32)
        # TIR types wgmma's integer sums as untyped 32-bit registers.
        self.integer = self.gemm.activation == "int8"
        self._allocate()
        self.x_descriptor = b.local(1, "uint64")
        b.emit(
            T.cuda.wgmma.encode_matrix_descriptor(
                self.x_descriptor.ptr_to([0]), self.x_tile.ptr_to([0, 0]), 1, 64, SWIZZLE_128
            )
        )
        self.ring = Ring(self.schedule.stages)
        self.previous = b.Variable("int32", 0)
        self._for_each_tile(self._tile)

    def _allocate(self) -> None:
        """Declare a math thread's registers."""
        geo = self.geo
        self.partial = b.local(geo.m64 * geo.accumulators, "uint32" if self.integer else "float32")
        self.total: Any = None
        self.operands = b.local(2 * geo.m64 * 16, "uint32")
        self.tile_words = b.local(geo.bits, "uint32")

    def _tile(self, row_tile: Expr, token: Expr) -> None:
        """Sum one output tile over K and write it."""
        with b.loop(self.turns) as turn:
            for slab in range(self.geo.body):
                self._slab(turn, slab)
        self._wait_products(0)
        self._release()
        wgmma_epilogue.finish_tile(self, row_tile, token)

    def _slab(self, turn: Expr, slab: int) -> None:
        """Decode one slab and start its products; the previous slab's finish meanwhile."""
        geo = self.geo
        within = slab % geo.slabs
        if within == 0:
            self._await_stage()
        for m in range(geo.m64):
            self._decode(m, within, slab % 2)
        self._start_products(turn, slab)
        self._wait_products(1)
        if within == 0:
            self._release_previous(turn, slab)
        if within == geo.slabs - 1:
            self.previous.set(self.ring.stage.value)
            self.ring.advance()

    def _await_stage(self) -> None:
        """Wait for the ring's stage to be filled."""
        b.emit(T.cuda.mbarrier_wait(self.full.ptr_to([self.ring.stage.value]), self.ring.phase.value))

    def _start_products(self, turn: Expr, slab: int) -> None:
        """Start a slab's products; the first one of a tile overwrites what the registers held before."""
        self._products(slab % self.geo.slabs, slab % 2, range(4), turn > 0 if slab == 0 else True)

    def _release_previous(self, turn: Expr, slab: int) -> None:
        """Free the stage that ended with the previous slab: its products are done."""
        if slab > 0:
            self._release()
        else:
            with b.when(turn > 0):
                self._release()

    def _release(self) -> None:
        """Tell the producer that this warp no longer reads the previous stage."""
        with b.when(self.lane == 0):
            empty = self.empty.ptr_to([self.previous.value])
            b.emit(T.ptx.mbarrier.arrive.shared.b64(empty, T.uint32(1)))

    def _wait_products(self, pending: int) -> None:
        b.emit(T.ptx.wgmma.wait_group.sync.aligned(pending))
        if pending == 0:
            pin_registers(self.partial, self.geo.m64 * self.geo.accumulators)

    # ---- decoding -------------------------------------------------------------------
    def _decode(self, m: int, within: int, bank: int) -> None:
        """Turn the packed words of one slab into sixteen operand registers."""
        for tile in range(self.geo.tiles_per_slab):
            self._load_words(m, within * self.geo.tiles_per_slab + tile)
            self._decode_tile(m, within, tile, bank)

    def _decode_tile(self, m: int, within: int, tile: int, bank: int) -> None:
        """Decode the loaded words of one packed tile of a slab."""
        geo = self.geo
        registers = 16 // geo.tiles_per_slab
        step = min(geo.scale_step, TILE)
        count = registers * step // TILE
        for part in range(TILE // step):
            offset = within * geo.slab + tile * TILE + part * step
            scales, zeros = self._operand_rows(m, offset // geo.scale_step)
            target = (bank * geo.m64 + m) * 16 + tile * registers + part * count
            self.decoder.registers(self.tile_words, part * count, count, self.operands, target, scales, zeros)

    def _row_tile(self, m: int) -> Expr:
        return self.group_index * self.geo.m64 + m

    def _load_words(self, m: int, k_tile: int) -> None:
        geo, stage = self.geo, self.ring.stage.value
        base = (self._row_tile(m) * geo.stage_tiles + k_tile) * geo.tile_words
        first = 0
        for offset, width in load_order(geo.bits):
            source = base + offset + self.member * width
            if width == 1:
                b.store(self.tile_words, self.words[stage, source], first)
            else:
                with b.vector(width) as v:
                    b.store(self.tile_words, self.words[stage, source + v], first + v)
            first += width

    def _operand_rows(self, m: int, step: int) -> tuple[Any, Any]:
        """Return the scale and zero operands of rows g and g+8, as the decoder takes them."""
        geo = self.geo
        low = self._row_tile(m) * TILE + self.warp * 16 + self.lane // 4
        scales = zeros = None
        if geo.lane == 16 and self.scales is not None:
            scales = tuple(pair16(self._staged(self.scales, step, low + h * 8)) for h in (0, 1))
        if self.zeros is not None:
            duplicate = pair16 if geo.lane == 16 else bytes4
            parts = [
                tuple(
                    duplicate(self._staged(self.zeros, step * geo.zero_parts + part, low + h * 8))
                    for h in (0, 1)
                )
                for part in range(geo.zero_parts)
            ]
            zeros = parts[0] if geo.zero_parts == 1 else tuple(zip(*parts, strict=True))
        return scales, zeros

    def _staged(self, buffer: Any, row: int, n: Expr) -> Expr:
        return buffer[self.ring.stage.value, row * self.schedule.tile_n + n]

    # ---- products -------------------------------------------------------------------
    def _products(self, within: int, bank: int, steps: range, accumulate: Expr) -> None:
        """Start wgmma steps of a slab as one group; ``accumulate`` says whether the first one adds."""
        b.emit(T.ptx.wgmma.fence.sync.aligned())
        for step in steps:
            for m in range(self.geo.m64):
                registers = [self.operands[(bank * self.geo.m64 + m) * 16 + step * 4 + i] for i in range(4)]
                self._wgmma(m, registers, within, step, accumulate if step == steps[0] else True)
        b.emit(T.ptx.wgmma.commit_group.sync.aligned())

    def _wgmma(self, m: int, registers: list[Expr], within: int, step: int, accumulate: Expr) -> None:
        geo, plan = self.geo, self.schedule
        spelling = INSTRUCTIONS[self.gemm.activation].format(
            n=plan.tile_m, w=PTX_FP8.get(self.decoder.operand, "")
        )
        sums = [self.partial[m * geo.accumulators + i] for i in range(geo.accumulators)]
        start = self.ring.stage.value * geo.x_bytes + (within * plan.tile_m * 128 + step * 32)
        descriptor = self.x_descriptor[0] + T.Cast("uint64", start >> 4)
        # Floating types take signs of both operands; 16-bit types also a transposition of X.
        modifiers = {"int8": (), "float16": (1, 1, 0), "bfloat16": (1, 1, 0)}.get(
            self.gemm.activation, (1, 1)
        )
        adds = T.bool(accumulate) if isinstance(accumulate, bool) else accumulate
        b.ptx(spelling, *sums, *registers, descriptor, adds, *modifiers)

    def partial_sum(self, position: int) -> Expr:
        """Return a register of the running sum as float32."""
        value = self.partial[position]
        return T.Cast("float32", T.reinterpret(value, dtype="int32")) if self.integer else value


class Ring:
    """Stage and phase of one role's walk around the ring."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.stage = b.Variable("int32", 0)
        self.phase = b.Variable("int32", 0)

    def advance(self) -> None:
        """Step to the next stage; the phase flips on every wrap."""
        self.stage.set(self.stage.value + 1)
        with b.when(self.stage.value == self.stages):
            self.stage.set(0)
            self.phase.set(self.phase.value ^ 1)


def pin_registers(buffer: Any, count: int, first: int = 0) -> None:
    """Keep reads of wgmma results behind the wait: the compiler sees each register rewritten here."""
    integer = str(buffer.dtype) == "uint32"
    kind, constraint = ("unsigned", "r") if integer else ("float", "f")
    name = f"ladder_pin_{kind}{count}"
    source = (
        f"__device__ __forceinline__ void {name}({kind}* p) {{\n#pragma unroll\n"
        f'  for (int i = 0; i < {count}; ++i) asm volatile("" : "+{constraint}"(p[i]) :: "memory");\n}}\n'
    )
    b.emit(b.call_inline(name, source, "void", buffer.ptr_to([first])))
