"""The pipeline of warp-wide matrix instructions: stages in shared memory, decode in registers.

``out^T = W · x^T``: a block owns ``tile_n`` weight rows and ``tile_m`` tokens and walks K in
stages. Packed words stay in fragment order through shared memory, so a thread decodes what
it multiplies; x is swizzled for ldmatrix. Copies are asynchronous from sm_80 on. Results pass
through shared memory so that stores run along N.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.activations import SPAN_CHUNKS, Copier, SpanLoader
from ladder.lower.cuda.grouped import find_m_tile
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.mma_activations import token_source
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, ActivationTile, each_piece
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.decode import load_order, make_decoder
from ladder.lower.gpu.emission import SharedTable
from ladder.lower.gpu.epilogue import finish_row
from ladder.lower.gpu.grouped import count_m_tiles
from ladder.lower.gpu.groups import Accumulators, GroupRegisters, Groups, array_dtype
from ladder.lower.gpu.instructions import STEP_TOKENS, MatrixStep, select_step
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from schedules.codes import table_bytes
from schedules.layouts import TILE
from schedules.legal import scale_span
from schedules.schedule import GpuSchedule, check
from targets import TileDevice

Expr = Any

TILE_WARPS = 4
"""Warps that share a packed tile: 16 rows each."""

STAGED_BLOCKS = 4
"""8-token blocks per warp whose results pass through shared memory at a time."""

RUN = 8
"""Outputs along N that a thread finishes together."""

ELEMENT_BYTES = {"float32": 4, "uint32": 4, "float16": 2, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True)
class Geometry:
    """Sizes that follow from a problem, a device and a schedule."""

    groups: Groups
    step: MatrixStep
    device: TileDevice
    schedule: GpuSchedule

    def __post_init__(self) -> None:
        plan = self.schedule
        check(plan.warps % TILE_WARPS == 0, f"mma warps come in groups of four, got warps={plan.warps}")
        check(plan.tile_m % STEP_TOKENS == 0, f"mma takes tokens by eight, got tile_m={plan.tile_m}")
        check(plan.stages >= 2, f"mma needs at least 2 stages, got {plan.stages}")
        check(
            plan.split_k == 1 and not plan.persistent,
            "the mma pipeline neither splits K over blocks nor persists; use split_k=1, persistent=False",
        )
        check(
            bool(self._splits),
            f"{plan.warps} warps do not divide a tile of {plan.tile_m} tokens x {plan.tile_n} rows",
        )
        check(
            self.shared_bytes <= self.device.shared_per_block,
            f"{self.shared_bytes} bytes of shared memory exceed the {self.device.shared_per_block} of"
            f" {self.device.name}; use fewer stages or smaller tiles",
        )

    # ---- division of labour ---------------------------------------------------------
    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.warps * 32

    @property
    def row_tiles(self) -> int:
        """Packed tiles along N in a block."""
        return self.schedule.tile_n // TILE

    @property
    def _splits(self) -> list[int]:
        """Ways to split warp quartets along tokens, given that the rest splits the rows."""
        quartets = self.schedule.warps // TILE_WARPS
        return [
            d
            for d in range(1, quartets + 1)
            if quartets % d == 0
            and self.row_tiles % (quartets // d) == 0
            and self.schedule.tile_m % (STEP_TOKENS * d) == 0
        ]

    @property
    def token_warps(self) -> int:
        """Warp quartets along tokens: each decodes the same weights again, so few.

        Two row tiles per warp halve the loads of x; that is worth a repeated decode.
        """
        quartets = self.schedule.warps // TILE_WARPS
        reuse = [d for d in self._splits if self.row_tiles // (quartets // d) >= 2]
        return (reuse or self._splits)[0]

    @property
    def row_quartets(self) -> int:
        """Warp quartets along rows."""
        return self.schedule.warps // TILE_WARPS // self.token_warps

    @property
    def row_blocks(self) -> int:
        """16-row blocks of a warp, one in each of its packed tiles."""
        return self.row_tiles // self.row_quartets

    @property
    def warp_tokens(self) -> int:
        """Tokens of a warp."""
        return self.schedule.tile_m // self.token_warps

    @property
    def token_blocks(self) -> int:
        """8-token blocks of a warp."""
        return self.warp_tokens // STEP_TOKENS

    # ---- stages ---------------------------------------------------------------------
    @property
    def stage_tiles(self) -> int:
        """Packed tiles along K in a stage."""
        return self.schedule.tile_k // TILE

    @property
    def tile_chunks(self) -> int:
        """16-byte chunks per token of one packed tile."""
        return TILE * self.step.element_bytes // CHUNK_BYTES

    @property
    def tokens(self) -> ActivationTile:
        """Layout of a stage of x."""
        return ActivationTile(self.tile_chunks * self.stage_tiles)

    @property
    def tile_words(self) -> int:
        """32-bit words of a packed tile."""
        return 128 * self.groups.bits

    @property
    def stage_in_group(self) -> bool:
        """Whether one scale row serves a whole stage."""
        return scale_span(self.groups.gemm) % self.schedule.tile_k == 0

    @property
    def group_rows(self) -> int:
        """Scale rows of a stage."""
        return 1 if self.stage_in_group else self.stage_tiles * self.groups.per_tile

    def group_row(self, step: int, granule: int) -> int:
        """Return the scale row in a stage of a granule of its packed tile ``step``."""
        return 0 if self.stage_in_group else step * self.groups.per_tile + granule

    @property
    def zero_parts(self) -> int:
        """Arrays that make up zero points: none, coarse part, and remainder."""
        return {"none": 0, "integer": 1, "float": 2}[self.groups.gemm.zero]

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a stage."""
        wide = self.groups.lane == 16
        scale = (2 if wide and not self.groups.exponents else 4) if self.groups.gemm.scale else 0
        zero = self.zero_parts * (2 if wide else 1)
        tokens: int = self.tokens.words(self.schedule.tile_m)
        words = self.row_tiles * self.stage_tiles * self.tile_words + tokens
        return 4 * words + self.group_rows * self.schedule.tile_n * (scale + zero)

    # ---- results --------------------------------------------------------------------
    @property
    def staged_blocks(self) -> int:
        """8-token blocks per warp that pass through shared memory at a time."""
        return next(
            n for n in range(min(STAGED_BLOCKS, self.token_blocks), 0, -1) if self.token_blocks % n == 0
        )

    @property
    def staged_tokens(self) -> int:
        """Tokens of the block that pass at a time."""
        return self.staged_blocks * STEP_TOKENS * self.token_warps

    @property
    def pitch(self) -> int:
        """Words between staged tokens; 4 more than the rows avoids bank conflicts."""
        return self.schedule.tile_n + 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block; results reuse the table and the stages."""
        stages = self.table_bytes + self.schedule.stages * self.stage_bytes
        return max(stages, 4 * self.staged_tokens * self.pitch)

    @property
    def table_bytes(self) -> int:
        """Bytes of the decode table."""
        return table_bytes(self.groups.gemm)


class Mma:
    """One kernel being emitted."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.gemm, self.schedule = gemm, schedule
        self.step = select_step(device, gemm.activation)
        self.groups = Groups(gemm, schedule.placement)
        self.geo = Geometry(self.groups, self.step, device, schedule)
        self.decoder = make_decoder(gemm, device, table=self.geo.table_bytes)
        self.copier = Copier(device)
        self.overlap = Overlap(device)
        self.args = declare_arguments(gemm)

    def emit(self) -> None:
        """Emit the whole body: fill the stages, walk K, store."""
        self.overlap.declare("blockIdx.x", "threadIdx.x")
        self._locate()
        self.overlap.release()
        self._allocate()
        self.token_source = token_source(self)
        self.overlap.wait()
        with b.when(self.exists):
            self._work()

    def _work(self) -> None:
        """Emit the walk over K and the stores."""
        stages = self.schedule.stages
        turns = b.keep((self.args.k_tiles + self.geo.stage_tiles - 1) // self.geo.stage_tiles)
        for turn in range(stages - 1):
            with b.when(turns > turn):
                self._copy_stage(turn, turn)
            self.copier.commit()
        if self.table is not None:  # a barrier comes before the first stage is read
            self.decoder.fill_table(self.table.buffer, self.thread, self.geo.threads)
        multiplier = TileMultiplier(self.decoder, self.sums, self.table)
        with b.loop(turns) as turn:
            self.copier.wait(stages - 2)
            b.block_sync()
            ahead = b.bind(turn + (stages - 1))
            with b.when(ahead < turns):
                self._copy_stage(b.keep(T.truncmod(ahead, stages)), ahead)
            self.copier.commit()
            self._multiply_stage(multiplier, b.keep(T.truncmod(turn, stages)), turn)
        self._finish()

    # ---- set-up ---------------------------------------------------------------------
    def _locate(self) -> None:
        """Find out which tile this block and which part of it this thread works on."""
        geo, args, plan = self.geo, self.args, self.schedule
        rows = (args.n_tiles + geo.row_tiles - 1) // geo.row_tiles
        columns = count_m_tiles(args, plan.tile_m)
        b.device(1)
        (block,) = b.block_index([rows * columns])
        self.thread = b.thread_index(geo.threads)
        # The operands are positive, so truncating division spares the code for signs.
        band = b.keep(columns * plan.raster)
        first = b.keep(T.truncdiv(block, band) * plan.raster)
        place = b.keep(T.truncmod(block, band))
        width = b.keep(T.min(rows - first, plan.raster))
        self.row_tile = b.keep((first + T.truncmod(place, width)) * geo.row_tiles)
        warp = b.bind(self.thread // 32)
        self.lane = b.bind(self.thread % 32)
        tokens = find_m_tile(args, b.keep(T.truncdiv(place, width)), plan.tile_m, self.lane, self.overlap)
        self.args, self.first_token, self.exists = tokens.args, b.keep(tokens.first), tokens.exists
        self.row_warp = b.bind(warp % TILE_WARPS)
        self.quartet = b.bind(warp // TILE_WARPS % geo.row_quartets)
        self.token_warp = b.bind(warp // TILE_WARPS // geo.row_quartets)
        row, column = self.step.lanes.operand(self.lane)
        self.owner = b.bind(self.row_warp * 32 + row * 4 + column)

    def _allocate(self) -> None:
        """Allocate shared stages and registers; results reuse the stages' memory."""
        geo, plan = self.geo, self.schedule
        self.sums = Accumulators(
            self.groups, self.step, self.decoder.operand, geo.row_blocks, geo.token_blocks
        )
        pool = b.shared_pool()
        self.table: SharedTable | None = None
        if self.decoder.table_words:
            table = pool.alloc((self.decoder.table_words,), "uint32", align=128)
            self.table = SharedTable.of(table, self.lane)
        self.tokens = pool.alloc((plan.stages, geo.tokens.words(plan.tile_m)), "uint32", align=128)
        words = (plan.stages, geo.row_tiles, geo.stage_tiles, geo.tile_words)
        self.words = pool.alloc(words, "uint32", align=128)
        types = (array_dtype(self.args.scales), array_dtype(self.args.zeros))
        self.scales = self._group_buffer(pool, 1, types[0])
        self.zeros = self._group_buffer(pool, geo.zero_parts, types[1])
        pool.move_base_to(0)
        self.results = pool.alloc((geo.staged_tokens, geo.pitch), "float32", align=128)
        pool.commit()
        self.tile_words = [b.local(self.groups.bits, "uint32") for _ in range(geo.row_blocks)]
        self.group_registers = [
            GroupRegisters(self.groups, self.step, self.lane, types) for _ in range(geo.row_blocks)
        ]

    def _group_buffer(self, pool: Any, parts: int, dtype: str | None) -> Any:
        """Return the stages' buffer of scales or zero points, or None where absent."""
        if dtype is None:
            return None
        shape = (self.schedule.stages, self.geo.group_rows, parts, self.schedule.tile_n)
        return pool.alloc(shape, dtype, align=128)

    # ---- copies ---------------------------------------------------------------------
    def _copy_stage(self, stage: Expr, turn: Expr) -> None:
        """Emit this thread's share of the copies of one stage."""
        tile = b.bind(turn * self.geo.stage_tiles)
        self.token_source.copy(stage, tile)
        self._copy_words(stage, tile)
        self._copy_groups(stage, tile, "scales", self.scales, 1)
        self._copy_groups(stage, tile, "zeros", self.zeros, self.geo.zero_parts)

    def _row_tile(self, index: Expr) -> Expr:
        """Return a packed tile along N; tiles beyond N repeat the last one."""
        return T.min(self.row_tile + index, self.args.n_tiles - 1)

    def _k_tile(self, tile: Expr) -> Expr:
        """Return a packed tile along K; tiles beyond K repeat the last one, against zeros of x."""
        return tile if self.geo.stage_tiles == 1 else T.min(tile, self.args.k_tiles - 1)

    def _copy_words(self, stage: Expr, tile: Expr) -> None:
        """Copy packed words as they lie."""
        per_tile = self.geo.tile_words // 4

        def copy(piece: Expr) -> None:
            which, at = b.bind(piece // per_tile), b.bind(piece % per_tile * 4)
            row, step = b.bind(which // self.geo.stage_tiles), b.bind(which % self.geo.stage_tiles)
            source = self.args.words.ptr_to([self._row_tile(row), self._k_tile(tile + step), at])
            self.copier.chunk(self.words.ptr_to([stage, row, step, at]), source)

        pieces = self.geo.row_tiles * self.geo.stage_tiles * per_tile
        each_piece(pieces, self.geo.threads, self.thread, copy)

    def _copy_groups(self, stage: Expr, tile: Expr, name: str, buffer: Any, parts: int) -> None:
        """Copy the rows of scales or zero points that serve a stage."""
        if buffer is None:
            return
        array = getattr(self.args, name)
        per_chunk = CHUNK_BYTES // ELEMENT_BYTES[str(array.dtype)]
        per_row, per_tile = self.schedule.tile_n // per_chunk, self.groups.per_tile

        def copy(piece: Expr) -> None:
            line, column = b.bind(piece // per_row), b.bind(piece % per_row * per_chunk)
            row, part = b.bind(line // parts), b.bind(line % parts)
            group = self.groups.row(self._k_tile(tile + row // per_tile), row % per_tile)
            at = self._row_tile(column // TILE) * TILE + column % TILE
            source = [group, part, at] if parts == 2 else [group, at]
            self.copier.chunk(buffer.ptr_to([stage, row, part, column]), array.ptr_to(source))

        each_piece(self.geo.group_rows * parts * per_row, self.geo.threads, self.thread, copy)

    # ---- products -------------------------------------------------------------------
    def _multiply_stage(self, multiplier: TileMultiplier, stage: Expr, turn: Expr) -> None:
        """Decode and multiply the packed tiles of a stage."""
        first_token = b.bind(self.token_warp * self.geo.warp_tokens)
        loader = SpanLoader(self.step.lanes, self.lane, self.geo.tokens)
        for step in range(self.geo.stage_tiles):
            for block in range(self.geo.row_blocks):
                self._load_row_block(stage, step, block)
                self.group_registers[block].tile = step if self.geo.stage_tiles % 2 == 0 else turn

            def load_tokens(token_block: int, span: int, out: Any, step: int = step) -> None:
                token = first_token + token_block * STEP_TOKENS
                chunk = step * self.geo.tile_chunks + span * SPAN_CHUNKS
                loader.load(self.tokens, [stage], token, chunk, out)

            tile = b.bind(turn * self.geo.stage_tiles + step)
            due = self.sums.flush_due(tile, self.args.k_tiles)
            real = T.min(tile, self.args.k_tiles - 1)
            self.sums.scale_tokens(self.args, self.lane, self.first_token + first_token, real)
            multiplier.emit(self.tile_words, self.group_registers, load_tokens, flush=due is True)
            if not isinstance(due, bool):
                with b.when(due):
                    multiplier.flush_all(self.group_registers)

    def _load_row_block(self, stage: Expr, step: int, block: int) -> None:
        """Load the thread's words, scales and zero points of one packed tile."""
        row_tile = b.bind(self.quartet * self.geo.row_blocks + block)
        at = 0
        for offset, width in load_order(self.groups.bits):
            source = self.words.ptr_to([stage, row_tile, step, offset + self.owner * width])
            registers = [self.tile_words[block][at + i] for i in range(width)]
            b.ptx(f"ld.shared{'' if width == 1 else f'.v{width}'}.u32", *registers, source)
            at += width

        def read(name: str, granule: int, part: int, row: Expr) -> Expr:
            buffer = self.scales if name == "scales" else self.zeros
            column = row_tile * TILE + self.row_warp * 16 + row
            return buffer[stage, self.geo.group_row(step, granule), part, column]

        self.group_registers[block].fetch(read)

    # ---- output ---------------------------------------------------------------------
    def _finish(self) -> None:
        """Store the tile, some tokens at a time."""
        self.sums.join_lanes()
        self.copier.wait(0)
        for first in range(0, self.geo.token_blocks, self.geo.staged_blocks):
            b.block_sync()
            self._stage_results(first)
            b.block_sync()
            self._store_results(first)

    def _stage_results(self, first: int) -> None:
        """Write token blocks ``first..`` of every warp to shared memory, transposed."""
        lanes, geo = self.step.lanes, self.geo
        token_row = b.bind(self.token_warp * (geo.staged_blocks * STEP_TOKENS))
        with b.when(lanes.is_first(self.lane)):
            for block in range(geo.row_blocks):
                column = b.bind((self.quartet * geo.row_blocks + block) * TILE + self.row_warp * 16)
                for index in range(geo.staged_blocks):
                    fragment = block * geo.token_blocks + first + index
                    for i in range(lanes.accumulators):
                        row, token = lanes.position(self.lane, i)
                        value = T.Cast("float32", self.sums.result(fragment, i))
                        b.store(self.results, value, token_row + index * STEP_TOKENS + token, column + row)

    def _store_results(self, first: int) -> None:
        """Finish and store runs of outputs along N of the staged tokens."""
        geo = self.geo
        runs = self.schedule.tile_n // RUN
        per_warp = geo.staged_blocks * STEP_TOKENS

        def store(piece: Expr) -> None:
            row, column = b.bind(piece // runs), b.bind(piece % runs * RUN)
            offset = row // per_warp * geo.warp_tokens + first * STEP_TOKENS + row % per_warp
            m, n = b.bind(self.first_token + offset), b.bind(self.row_tile * TILE + column)
            with b.when(T.And(m < self.args.m, n < self.args.n)):
                sums = b.local(RUN, "float32")
                for i in range(RUN):
                    b.store(sums, self.results[row, column + i], i)
                finish_row(self.gemm, self.args, sums, RUN, m, n)

        each_piece(geo.staged_tokens * runs, geo.threads, self.thread, store)
