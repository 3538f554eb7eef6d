"""The sm_90a pipeline: TMA and bulk copies, mbarriers, warp-specialised wgmma.

``out^T = W · X^T``: 64 weight rows are wgmma's M, tokens are its N. One producer warp
streams X (tensor copies, 128-byte swizzle) and packed words, scales and zero points
(bulk copies) through a ring of stages; math warpgroups decode words into the register
operand while the tensor core works on the previous slab (PTX ISA, "Asynchronous
warpgroup level matrix instructions").
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda import wgmma_epilogue
from ladder.lower.cuda.grouped import find_m_tile
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.wgmma_activations import SWIZZLE_128, token_source
from ladder.lower.cuda.wgmma_decode import ScaledDecoder, scaled_decoder
from ladder.lower.cuda.wgmma_exchange import Exchange
from ladder.lower.cuda.wgmma_geometry import Geometry
from ladder.lower.cuda.wgmma_producer import Producer, prefetch
from ladder.lower.cuda.wgmma_stream import Stream
from ladder.lower.gpu.arguments import Arguments, declare_arguments
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.emission import SharedTable
from ladder.lower.gpu.grouped import count_m_tiles
from ladder.lower.gpu.instructions import PTX_FP8
from ladder.lower.gpu.scales import bytes4, pair16
from schedules.layouts import EXPONENTS, TILE
from schedules.legal import PRODUCER_REGISTERS, math_registers
from schedules.schedule import GpuSchedule, check
from targets import TileDevice

Expr = Any

INSTRUCTIONS = {
    "float16": "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16",
    "bfloat16": "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16",
    "int8": "wgmma.mma_async.sync.aligned.m64n{n}k32.s32.s8.s8",
    "fp8_e4m3": "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{w}.e4m3",
    "fp8_e5m2": "wgmma.mma_async.sync.aligned.m64n{n}k32.f32.{w}.e5m2",
}

DESCRIPTOR_HIGH = 1 << 30 | 64
"""Upper half of X's matrix descriptor: 128-byte swizzle, 1024 bytes between groups of eight tokens."""

REMOTE_ARRIVE = """
__device__ __forceinline__ void ladder_arrive_at(void* barrier, int rank) {
  unsigned address = (unsigned)__cvta_generic_to_shared(barrier), remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
}
"""


class Kernel:
    """One kernel being emitted: arguments, shared memory, and the two roles."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.gemm, self.device, self.schedule = gemm, device, schedule
        self.geo = Geometry(gemm, schedule)
        limit = device.shared_per_block
        check(
            self.geo.shared_bytes <= limit, f"{self.geo.shared_bytes} bytes of shared memory exceed {limit}"
        )
        self.decoder = self._choose_decoder()
        self.args: Arguments = declare_arguments(gemm)
        self.overlap = Overlap(device)
        self.stream = Stream(self) if schedule.stream_k else None
        self.expert_token: Expr = 0

    def _choose_decoder(self) -> ScaledDecoder:
        """Return how weights become operands."""
        return scaled_decoder(self.gemm, self.device, self.geo.table_bytes)

    # ---- skeleton -------------------------------------------------------------------
    def emit(self) -> None:
        """Emit host part, set-up and both roles."""
        self.token_source = token_source(self)
        self.x_map = self.token_source.encode()
        if self.stream is not None:
            self.stream.declare()
        self.overlap.declare("blockIdx.x", *["clusterCtaIdx.x"] * (self.geo.blocks > 1), "threadIdx.x")
        b.device(min_blocks=self.geo.resident_blocks(self.device))
        self._grid()
        self.overlap.release()
        self._shared_memory()
        self._barriers()
        self.overlap.wait()
        if self.gemm.experts:
            self._find_m_tile()
        else:
            self._roles()
        if self.schedule.cluster > 1:
            # No block may leave while others still copy to it or arrive at its barriers.
            b.cluster_sync()

    def _roles(self) -> None:
        b.either(self.thread >= self.schedule.warps * 32, self._producer, self._math)

    def _find_m_tile(self) -> None:
        """Run the roles with the arguments of the expert whose tokens the block works on, if any."""
        tile_m, index = self.schedule.tile_m, b.keep(self._cut(self.first)[1])
        tokens = find_m_tile(self.args, index, tile_m, b.bind(self.thread % 32), self.overlap)
        self.args, self.expert_token = tokens.args, b.keep(tokens.first)
        with b.when(tokens.exists):
            self._roles()

    def tokens_per_copy(self) -> Expr:
        """Return the tokens that one block of a cluster copies: its share of a tile, or of M, by eights.

        Copying rows beyond M, which are filled with zeros, takes several times as long as rows that exist.
        """
        whole, each = self.schedule.tile_m // self.schedule.cluster, 8 * self.schedule.cluster
        return T.min(whole, (self.args.m + each - 1) // each * 8)

    def _grid(self) -> None:
        """Place clusters: one per tile (or tiles that share tokens), or as many as fit."""
        plan, args, blocks = self.schedule, self.args, self.geo.blocks
        rows = self.geo.row_tiles * plan.cluster
        n_blocks, m_blocks = (args.n_tiles + rows - 1) // rows, count_m_tiles(args, plan.tile_m)
        self.walkers = self.device.units // blocks
        (block,) = b.block_index([(self.walkers if plan.persistent else n_blocks * m_blocks) * blocks])
        rank: Expr = b.cluster_rank([blocks])[0] if blocks > 1 else 0
        self.first = b.bind(block // blocks) if blocks > 1 else block
        self.slice = b.bind(rank // plan.cluster) if plan.cluster > 1 else rank
        self.member = b.bind(rank % plan.cluster) if plan.cluster > 1 else 0
        self.thread = b.thread_index(self.geo.threads)
        self.n_blocks, self.m_blocks = b.bind(n_blocks), b.bind(m_blocks)
        body_tiles = self.geo.body * self.geo.tiles_per_slab
        self.turns = b.bind((args.k_tiles + body_tiles * plan.split_k - 1) // (body_tiles * plan.split_k))
        self.first_tile = b.bind(self.slice * self.turns * body_tiles) if plan.split_k > 1 else 0
        self.copied_tokens = b.bind(self.tokens_per_copy())
        if self.stream is not None:
            self.stream.divide()

    def _shared_memory(self) -> None:
        geo, stages = self.geo, self.schedule.stages
        pool = b.shared_pool()
        self.x_tile = pool.alloc((stages, geo.x_bytes), "uint8", align=1024)
        self.words = pool.alloc((stages, geo.word_bytes // 4), "uint32", align=128)
        self.scales = self._row_buffer(pool, geo.scale_stage_bytes, self.args.scales)
        self.zeros = self._row_buffer(pool, geo.zero_stage_bytes, self.args.zeros)
        self.staging = wgmma_epilogue.allocate(pool, self.gemm, geo)
        self.exchange = Exchange(self, pool) if self.schedule.split_k > 1 else None
        words = self.decoder.decoder.table_words
        self.table = pool.alloc((words,), "uint32", align=128) if words else None
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
                # One arrival per math warp that reads what this block copies frees a stage.
                warps = T.uint32(self.schedule.warps * self.schedule.cluster)
                b.emit(T.ptx.mbarrier.init.shared.b64(self.empty.ptr_to([stage]), warps))
            if self.exchange is not None:
                self.exchange.initialise()
            b.emit(T.ptx.fence.mbarrier_init.release.cluster())

        with b.when(self.thread == 0):
            initialise()
        if self.table is not None:
            self.decoder.decoder.fill_table(self.table, self.thread, self.geo.threads)
        if self.overlap.possible:
            with b.when(self.thread == 32):
                tile, k_tile = (self.first, self.first_tile) if self.stream is None else self.stream.first()
                prefetch(self, self.place(tile)[0], k_tile)
        if self.schedule.cluster > 1:
            b.cluster_sync()
        else:
            b.block_sync()
        if self.exchange is not None:
            self.exchange.announce()

    # ---- tiles ----------------------------------------------------------------------
    def _for_each_tile(self, body: Any) -> None:
        """Run ``body(first row tile, first token)`` for every output tile of this block."""
        if not self.schedule.persistent:
            body(*map(b.keep, self.place(self.first)))
            return
        if self.stream is not None:
            self.stream.for_each_piece(body)
            return
        tile = b.Variable("int32", self.first)
        with b.repeat_while(tile.value < self.n_blocks * self.m_blocks):
            body(*map(b.keep, self.place(tile.value)))
            tile.set(tile.value + self.walkers)

    def place(self, tile: Expr) -> tuple[Expr, Expr]:
        """Return a tile's first row tile and token.

        The last tile of tokens ends at M and repeats some of the one before (equal values, stored
        twice): a tensor copy is several times slower on rows beyond M than on rows that exist.
        """
        row_tile, index = self._cut(tile)
        if self.gemm.experts:
            return row_tile, self.expert_token
        last = T.max(self.args.m - self.schedule.tile_m, 0)
        return row_tile, T.min(index * self.schedule.tile_m, last)

    def _cut(self, tile: Expr) -> tuple[Expr, Expr]:
        """Return a tile's first row tile and the index of its tokens' tile.

        Walk columns of ``raster`` row blocks, tokens inside, so that neighbours share X and W in L2.
        """
        width = self.schedule.raster * self.m_blocks
        column = b.bind(tile // width)
        inside = b.bind(tile % width)
        columns = b.bind(T.min(self.schedule.raster, self.n_blocks - column * self.schedule.raster))
        row_block = column * self.schedule.raster + inside % columns
        row_tile = (row_block * self.schedule.cluster + self.member) * self.geo.row_tiles
        return row_tile, inside // columns

    # ---- producer -------------------------------------------------------------------
    def _producer(self) -> None:
        """One thread keeps the ring full."""
        if self.geo.reallocates:
            b.ptx("setmaxnreg.dec.sync.aligned.u32", PRODUCER_REGISTERS)
        if self.stream is not None:
            with b.when(self.thread // 32 == self.schedule.warps + 1):
                self.stream.announce()
        # ptxas takes the operands of copies from uniform registers only where it sees one thread elected.
        with b.when(self.thread // 32 == self.schedule.warps), b.when(T.cuda.elect_sync()):
            self._for_each_tile(Producer(self, Ring(self.schedule.stages)).tile)
        if self.exchange is not None:
            self.exchange.meet()

    # ---- math -----------------------------------------------------------------------
    def _math(self) -> None:
        """Decode, multiply, and hand finished tiles to the epilogue."""
        geo = self.geo
        if geo.reallocates:
            b.ptx("setmaxnreg.inc.sync.aligned.u32", math_registers(self.schedule.warps))
        self.group_index = b.bind(self.thread // 128)
        self.group_thread = b.bind(self.thread % 128)
        self.warp, self.lane = b.bind(self.group_thread // 32), b.bind(self.group_thread % 32)
        # TIR types wgmma's integer sums as untyped 32-bit registers.
        self.integer = self.gemm.activation == "int8"
        self.looked_up = None if self.table is None else SharedTable.of(self.table, self.lane)
        self._allocate()
        descriptor = b.local(1, "uint64")
        b.emit(
            T.cuda.wgmma.encode_matrix_descriptor(
                descriptor.ptr_to([0]), self.x_tile.ptr_to([0, 0]), 1, 64, SWIZZLE_128
            )
        )
        self.x_descriptor = b.Variable("uint32", T.Cast("uint32", descriptor[0]))
        self.ring = Ring(self.schedule.stages)
        self.previous, self.finished = b.Variable("int32", 0), b.Variable("int32", 0)
        self._for_each_tile(self._tile)

    def _allocate(self) -> None:
        """Declare a math thread's registers."""
        geo = self.geo
        self.partial = b.local(geo.m64 * geo.accumulators, "uint32" if self.integer else "float32")
        self.total: Any = None
        self._allocate_operands()

    def _allocate_operands(self, sets: int = 2) -> None:
        """Declare sets of operand registers, for a slab each, and what is fetched for one slab ahead."""
        geo = self.geo
        self.operands = b.local(sets * geo.m64 * 16, "uint32")
        self.tile_words = [b.local(geo.tiles_per_slab * geo.bits, "uint32") for _ in range(geo.m64)]
        count = 2 * geo.held_rows
        scaled = geo.lane == 16 and self.scales is not None
        factors = count * self.decoder.factors
        self.held_scales = [b.local(factors, "uint32") for _ in range(geo.m64 if scaled else 0)]
        self.held_zeros = [
            b.local(count * geo.zero_parts, "uint32") for _ in range(geo.m64 if geo.zero_parts else 0)
        ]

    def _tile(self, row_tile: Expr, token: Expr) -> None:
        """Sum one output tile over K and write it."""
        rows = wgmma_epilogue.row_values(self, row_tile, token)
        self._first_slab()
        with b.loop(self.turns) as turn:
            for slab in range(self.geo.body):
                self._slab(turn, slab)
        self._wait_products(0)
        self._release()
        self.ring.advance()
        wgmma_epilogue.finish_tile(self, row_tile, token, rows)

    def _first_slab(self) -> None:
        """Fetch a tile's first slab."""
        self._await_stage()
        self._fetch(0)

    def _await_stage(self) -> None:
        """Wait until the ring's current stage is full."""
        b.emit(T.cuda.mbarrier_wait(self.full.ptr_to([self.ring.stage.value]), self.ring.phase.value))

    def _slab(self, turn: Expr, slab: int) -> None:
        """Decode one slab, start its products and fetch the next; the previous slab's products finish."""
        geo = self.geo
        within = slab % geo.slabs
        for m in range(geo.m64):
            self._decode(m, within, slab % 2)
        self._start_products(turn, slab)
        last = within == geo.slabs - 1
        if last:
            self.finished.set(self.ring.stage.value)
        # Words that are operands as they are come into registers which products of the slab before still
        # read: ptxas would run all products one by one (C7513).
        early = geo.slabs > 1 and geo.bits < geo.lane
        if early:
            self._fetch_next(turn, slab)
        self._wait_products(1)
        if within == 0:
            self._release_previous(turn, slab)
        if not early:
            # A ring of two stages can only be filled again once the previous one is free.
            self._fetch_next(turn, slab)
        if last:
            self.previous.set(self.finished.value)

    def _fetch_next(self, turn: Expr, slab: int) -> None:
        """Fetch the slab after ``slab``."""
        if (slab + 1) % self.geo.slabs == 0:
            self._enter_stage(turn, slab + 1)
        self._fetch((slab + 1) % self.geo.body)

    def _enter_stage(self, turn: Expr, slab: int) -> None:
        """Wait for the stage of a slab of the turn, or of the next turn.

        Where the tile ends, the stage at hand is entered again and fetched in vain: in a branch
        ptxas would give registers that products in flight still read to other values.
        """
        if slab < self.geo.body:
            self.ring.advance()
        else:
            self.ring.advance_if(turn + 1 < self.turns)
        self._await_stage()

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
        """Tell every producer that writes to this block that this warp left the previous stage."""
        empty, cluster = self.empty.ptr_to([self.previous.value]), self.schedule.cluster
        if cluster == 1:
            with b.when(self.lane == 0):
                b.emit(T.ptx.mbarrier.arrive.shared.b64(empty, T.uint32(1)))
            return
        with b.when(self.lane < cluster):
            rank = self.slice * cluster + self.lane
            b.emit(b.call_inline("ladder_arrive_at", REMOTE_ARRIVE, "void", empty, rank))

    def _wait_products(self, pending: int) -> None:
        b.emit(T.ptx.wgmma.wait_group.sync.aligned(pending))
        if pending == 0:
            pin_registers(self.partial, self.geo.m64 * self.geo.accumulators)

    # ---- decoding -------------------------------------------------------------------
    def _fetch(self, slab: int) -> None:
        """Load packed words, scales and zero points of a turn's slab, which the current stage holds."""
        geo = self.geo
        within = slab % geo.slabs
        for m in range(geo.m64):
            for tile in range(geo.tiles_per_slab):
                self._load_words(self.tile_words[m], tile * geo.bits, m, within * geo.tiles_per_slab + tile)
            self._fetch_rows(m, slab)

    def _fetch_rows(self, m: int, slab: int) -> None:
        """Load the scales and zero points of a turn's slab, unless those of the slab before still hold."""
        geo = self.geo
        if slab * geo.slab % geo.held_step == 0:
            if geo.exponents:
                self._load_exponents(m, slab)
                return
            first = slab % geo.slabs * geo.slab // geo.scale_step
            for row in range(geo.held_rows):
                self._load_rows(m, first + row, row)

    def _load_exponents(self, m: int, slab: int) -> None:
        """Turn the exponents of a turn's slab into scale operands; turns begin with whole words."""
        geo = self.geo
        low = self._row_tile(m) * TILE + self.warp * 16 + self.lane // 4
        for h in (0, 1):
            word = b.bind(self._staged(self.scales, slab % geo.slabs * geo.slab // geo.row_step, low + h * 8))
            for row in range(geo.held_rows):
                at = (slab * geo.held_rows + row) % EXPONENTS
                self._hold_scale(m, row, h, self.decoder.prepare(word, h, at))

    def _hold_scale(self, m: int, row: int, half: int, factors: Sequence[Expr]) -> None:
        """Keep what operands of a scale row are multiplied by."""
        for index, factor in enumerate(factors):
            b.store(self.held_scales[m], factor, (2 * row + half) * len(factors) + index)

    def _decode(self, m: int, within: int, bank: int) -> None:
        """Turn the fetched words of one slab into sixteen operand registers."""
        for tile in range(self.geo.tiles_per_slab):
            first, words = tile * self.geo.bits, self.tile_words[m]
            self._decode_tile([words[first + i] for i in range(self.geo.bits)], m, tile, bank)

    def _decode_tile(self, words: Sequence[Expr], m: int, tile: int, bank: int) -> None:
        """Decode the words of one packed tile of a slab, whose scales and zero points are held."""
        geo = self.geo
        registers = 16 // geo.tiles_per_slab
        step = min(geo.scale_step, TILE)
        count = registers * step // TILE
        for part in range(TILE // step):
            scales, zeros = self._held(m, (tile * TILE + part * step) // geo.scale_step)
            target = (bank * geo.m64 + m) * 16 + tile * registers + part * count
            first = part * count
            self.decoder.registers(words, first, count, self.operands, target, scales, zeros, self.looked_up)

    def _row_tile(self, m: int) -> Expr:
        return self.group_index * self.geo.m64 + m

    def _load_words(self, target: Any, first: int, m: int, k_tile: int) -> None:
        """Load this thread's words of a packed tile of the stage into ``target[first:]``."""
        geo, stage = self.geo, self.ring.stage.value
        base = (self._row_tile(m) * geo.stage_tiles + k_tile) * geo.tile_words
        for offset, width in load_order(geo.bits):
            source = base + offset + self.group_thread * width
            if width == 1:
                b.store(target, self.words[stage, source], first)
            else:
                with b.vector(width) as v:
                    b.store(target, self.words[stage, source + v], first + v)
            first += width

    def _load_rows(self, m: int, step: int, row: int) -> None:
        """Load the scale and zero operands of rows g and g+8."""
        geo = self.geo
        duplicate = pair16 if geo.lane == 16 else bytes4
        low = self._row_tile(m) * TILE + self.warp * 16 + self.lane // 4
        for h in (0, 1):
            if self.held_scales:
                scale = duplicate(self._staged(self.scales, step, low + h * 8))
                self._hold_scale(m, row, h, self.decoder.prepare(scale, h))
            for part in range(geo.zero_parts):
                value = self._staged(self.zeros, step * geo.zero_parts + part, low + h * 8)
                b.store(self.held_zeros[m], duplicate(value), (2 * row + h) * geo.zero_parts + part)

    def _held(self, m: int, row: int) -> tuple[Any, Any]:
        """Return the scale and zero operands of rows g and g+8, as the decoder takes them."""
        parts = self.geo.zero_parts
        scales = zeros = None
        if self.held_scales:
            count = self.decoder.factors
            kept = [self.held_scales[m][2 * row * count + index] for index in range(2 * count)]
            scales = (kept[:count], kept[count:])
        if parts:
            held = [self.held_zeros[m][2 * row * parts + index] for index in range(2 * parts)]
            zeros = tuple(held) if parts == 1 else (tuple(held[:2]), tuple(held[2:]))
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
        descriptor = self._descriptor(self.ring.stage.value, within, step)
        # Floating types take signs of both operands; 16-bit types also a transposition of X.
        modifiers = {"int8": (), "float16": (1, 1, 0), "bfloat16": (1, 1, 0)}.get(
            self.gemm.activation, (1, 1)
        )
        adds = T.bool(accumulate) if isinstance(accumulate, bool) else accumulate
        b.ptx(spelling, *sums, *registers, descriptor, adds, *modifiers)

    def _descriptor(self, stage: Expr, within: int, step: int, token: int = 0) -> Expr:
        """Return the matrix descriptor of X at a step of a slab, from token ``token`` on."""
        start = T.Cast("uint32", stage) * T.uint32(self.geo.x_bytes >> 4)
        inside = (within * self.schedule.tile_m + token) * 128 + step * 32
        low = self.x_descriptor.value + start + T.uint32(inside >> 4)
        return T.Cast("uint64", low) | T.uint64(DESCRIPTOR_HIGH << 32)

    def sum_of(self, register: int) -> Expr:
        """Return the finished sum of an accumulator as float32."""
        return self.partial_sum(register) if self.total is None else self.total[register]

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

    def advance_if(self, condition: Expr) -> None:
        """Step to the next stage where ``condition`` holds, without a branch."""
        following = b.keep(self.stage.value + T.Cast("int32", condition))
        wraps = T.Cast("int32", following == self.stages)
        self.stage.set(following * (1 - wraps))
        self.phase.set(self.phase.value ^ wraps)


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
