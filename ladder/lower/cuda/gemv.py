"""The pipeline for few tokens: packed words stream from global memory into registers.

A block owns 16 or 32 rows per row-warp, any number of them, so that a grid fills the
multiprocessors evenly; its warps split K, and so may the blocks of a cluster: then each needs only
its share of x. Tiles go to the slices in *runs* of
neighbours, so that tiles of a group share one fetch of its scales. Each thread keeps
``stages`` tiles of words in flight, x passes through shared memory in chunks of K (the fewer
tokens, the longer), and ``mma`` reduces. Slices are added in shared memory at the end. Nothing
depends on the size of M, N or K: *turns* of ``stages`` tiles per slice run without guards as
long as they and the loads they issue stay within K, guarded turns finish, and blocks along
the second grid axis serve further tokens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.experts import find_tokens
from ladder.lower.cuda.gemv_geometry import STRIP, Geometry
from ladder.lower.cuda.gemv_sums import reduce_and_store
from ladder.lower.cuda.gemv_token_sums import TokenSums
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.tokens import SPAN_CHUNKS, Copier, RunLoader
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.decode import Decoder, load_order, make_decoder, table_sizes
from ladder.lower.gpu.emission import SharedTable
from ladder.lower.gpu.experts import count_token_blocks
from ladder.lower.gpu.groups import (
    Accumulators,
    GroupRegisters,
    Groups,
    array_dtype,
    left_by,
)
from ladder.lower.gpu.instructions import STEP_TOKENS, select_step
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from ladder.lower.gpu.token_tile import CHUNK_BYTES, CHUNK_WORDS, TokenTile
from schedules.layouts import TILE
from schedules.legal import (
    TOKEN_BUFFERS,
    TOKEN_SUMS,
)
from schedules.schedule import GpuSchedule
from targets import TileDevice
from tile_types.errors import ScheduleError

Expr = Any

LOADS = {width: f"ld.global.L1::no_allocate{'' if width == 1 else f'.v{width}'}.u32" for width in (1, 2, 4)}
"""Weights are read once: they bypass L1. ``.nc`` would let ptxas move loads before `Overlap.wait`."""

PREFETCH_BYTES, PREFETCH_SHARE = (4 << 20, 12 << 20), 8
"""Bytes of words that are fetched into L2 before the kernel before has ended: at least, at most, and between
them this part of all words.

On an H200, M = 1, microseconds with 4, 8, 12, 16, 24 MB: int4 28672 x 8192 31.1, 30.6, 30.4, 30.5, 31.2, and
8192 x 28672 30.5, 30.3, 30.2, 30.3, 30.7; int2 19.3, 19.05, 19.3, 19.9; int1 8192 x 28672 16.7 with 4, 17.3
with 12; int2 x int8 17.2, 16.9, 16.9, 17.4.
"""

SUM_CLOCKS = 24
"""Clocks of the four products of a tile that sum eight tokens of x (measured: 6 each on an H200)."""

SHARED_SUM_CLOCKS = 2
"""Clocks per tile and eight tokens of beginning with sums that the block has."""

COPIED = 4
"""Chunks of a token of x that a thread copies in one turn."""

FEWEST_THREADS = 512
"""Threads of a multiprocessor that still wait for enough words at once."""


class Gemv:
    """One kernel being emitted."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.gemm, self.schedule = gemm, schedule
        self.step = select_step(device, gemm.activation)
        self.groups = Groups(gemm, schedule.placement)
        self._choose_decoder(device)
        self.copier = Copier(device)
        self.args = declare_arguments(gemm)
        self.overlap = Overlap(device)

    def _choose_decoder(self, device: TileDevice) -> None:
        """Take the decoder whose table, beside which x still fits, is worth filling for a block's tiles."""
        plan, tables = self.schedule, table_sizes(self.gemm)
        choices: list[tuple[float, Decoder, Geometry]] = []
        for room in tables:
            try:
                decoder, geo = self._with_table(device, room)
            except ScheduleError:
                if room == tables[-1] and not choices:
                    raise
                continue
            tiles = geo.rows * -(-self.gemm.k // TILE) / TILE / plan.cluster
            clocks = decoder.choice.weight() * tiles + decoder.table_entries  # an entry is written per clock
            if not choices or geo.resident_blocks * geo.threads >= FEWEST_THREADS:
                choices.append((clocks, decoder, geo))
        _, self.decoder, self.geo = min(choices, key=lambda choice: choice[0])

    def _with_table(self, device: TileDevice, room: int) -> tuple[Decoder, Geometry]:
        """Return the decoder with a table of at most ``room`` bytes, and the kernel's sizes."""
        plan = self.schedule
        clocks = SUM_CLOCKS if plan.cluster == 1 else SHARED_SUM_CLOCKS
        sums = clocks * plan.tile_m // STEP_TOKENS / (plan.warp_rows // STRIP)
        decoder = make_decoder(self.gemm, device, plan.placement, gains=True, table=room, offset_clocks=sums)
        shared = 4 * TOKEN_BUFFERS * TOKEN_SUMS * self._shares_sums(decoder)
        return decoder, Geometry(self.groups, self.step, device, plan, 4 * decoder.table_words + shared)

    @property
    def shares_sums(self) -> bool:
        """Whether the warps of a block share sums of x."""
        return self._shares_sums(self.decoder)

    def _shares_sums(self, decoder: Decoder) -> bool:
        """Tell whether the warps of a block share sums of x: those of whole tiles are needed.

        In a cluster a block has a part of K to sum, and more rows that need the sums. Otherwise it is faster
        that every warp sums what it multiplies: filling the table holds all of them up (measured on an H200).
        """
        summed = left_by(decoder, self.gemm).sums_tokens and self.schedule.cluster > 1
        return summed and self.groups.per_tile == 1 and not self.step.lanes.partial_lanes

    def emit(self) -> None:
        """Emit the whole body."""
        shared = ["clusterCtaIdx.x"] * (self.schedule.cluster > 1)
        self.overlap.declare("blockIdx.x", "blockIdx.y", *shared, "threadIdx.x")
        self._locate()
        self.overlap.release()
        self._allocate()
        self._prefetch()
        self.overlap.wait()
        with b.when(self.exists):
            self._work()

    def _work(self) -> None:
        """Emit the walk over K and the stores."""
        for slot in range(self.schedule.stages):
            self._load(slot, slot // self.geo.run * self.geo.round_tiles + slot % self.geo.run, guarded=True)
        self._place_tokens()
        if self.table is not None:  # while loads are in flight; a barrier comes before the first tile
            self.decoder.fill_table(self.table.buffer, self.thread, self.geo.threads)
        with b.when(self.thread < self.geo.rows):
            b.ptx("prefetch.global.L2", self.args.row_scale.ptr_to([self.first_row + self.thread]))
        multiplier = TileMultiplier(self.decoder, self.sums, self.table)
        turn = self.geo.turn_tiles
        # Counted down: ptxas would compute a bound anew in every turn.
        whole = T.max(self.own_tiles // turn - 1, 0)
        for guarded, count in ((False, whole), (True, (self.own_tiles + turn - 1) // turn - whole)):
            left = b.Variable("int32", count)
            with b.repeat_while(left.value > 0):
                self._turn(multiplier, guarded=guarded)
                left.set(left.value - 1)
        self._finish()

    def _turn(self, multiplier: TileMultiplier, *, guarded: bool) -> None:
        """Multiply ``stages`` tiles and refill their slots; guards keep both within K."""
        geo = self.geo
        for first in range(0, self.schedule.stages, geo.run):
            with b.when(self.rounds_left.value == 0):
                self._advance()
            for index in range(geo.run):
                self._consume(multiplier, first + index, guarded)
                self._load(first + index, geo.turn_tiles + index, guarded=guarded)
            self.run_at.set(self.run_at.value + self.schedule.split_k)
            for at in self.words_at.values():
                at.set(at.value + T.int64(geo.round_tiles * self.tile_words))
            self.loader.advance(geo.round_tiles * geo.tile_chunks)
            if self.token_sums is not None:
                self.token_sums.advance()
            self.rounds_left.set(self.rounds_left.value - 1)

    # ---- set-up ---------------------------------------------------------------------
    def _locate(self) -> None:
        """Find out which rows, tokens and slice of K this thread works on."""
        geo, args = self.geo, self.args
        strips = args.n_tiles * geo.tile_strips
        b.device(geo.resident_blocks)
        blocks = self.schedule.cluster
        block, token_block = b.block_index(
            [
                (strips + geo.row_warps - 1) // geo.row_warps * blocks,
                count_token_blocks(args, self.schedule.tile_m),
            ]
        )
        self.rank: Expr = b.keep(b.cluster_rank([blocks])[0]) if blocks > 1 else T.int32(0)
        block = b.bind(block // blocks) if blocks > 1 else block
        self.thread = b.thread_index(geo.threads)
        warp = b.bind(self.thread // 32)
        self.lane = b.bind(self.thread % 32)
        self.slice = b.bind(warp // geo.row_warps)
        self.row_warp = b.bind(warp % geo.row_warps)
        self.first_strip = b.bind(block * geo.row_warps)
        # Warps beyond the last strip repeat it; nothing of theirs is stored.
        strip = b.keep(T.min(self.first_strip + self.row_warp, strips - 1))
        row, column = self.step.lanes.operand(self.lane)
        owner = b.bind(strip % geo.tile_strips * (32 * geo.row_blocks) + row * 4 + column)
        self.first_row = b.bind(block * geo.rows)
        tokens = find_tokens(args, token_block, self.schedule.tile_m, self.lane, self.overlap)
        self.args, self.first_token, self.exists = tokens.args, tokens.first, tokens.exists
        self.token_count = b.bind(T.min(self.args.m - self.first_token, self.schedule.tile_m))
        self.column = b.keep(strip * self.schedule.warp_rows)
        # The run being consumed, counted over all slices, and by vector width where its words start.
        self.tile_words = 128 * self.groups.bits
        first_run = self._share_tiles()
        self.run_at = b.Variable("int32", first_run + self.slice)
        start = b.bind(
            (strip // geo.tile_strips * args.k_tiles + (first_run + self.slice) * geo.run) * self.tile_words
        )
        self.words_at = {
            width: b.Variable("int64", T.Cast("int64", start + owner * width))
            for _, width in load_order(self.groups.bits)
        }

    def _share_tiles(self) -> Expr:
        """Share K among the blocks of a cluster in whole runs; return this block's first run."""
        blocks, run, tiles = self.schedule.cluster, self.geo.run, self.args.k_tiles
        if blocks == 1:
            self.first_tile, self.end_tile, self.own_tiles = T.int32(0), tiles, tiles
            return T.int32(0)
        runs = b.keep((tiles + run * blocks - 1) // (run * blocks))
        first_run = b.keep(self.rank * runs)
        self.first_tile = b.keep(T.min(first_run * run, tiles))
        self.end_tile = b.keep(T.min((first_run + runs) * run, tiles))
        self.own_tiles = b.bind(self.end_tile - self.first_tile)
        return first_run

    def _allocate(self) -> None:
        """Allocate shared buffers and registers; the reduction reuses x's memory."""
        geo, plan = self.geo, self.schedule
        pool = b.shared_pool()
        self.table: SharedTable | None = None
        if self.decoder.table_words:
            table = pool.alloc((self.decoder.table_words,), "uint32", align=128)
            self.table = SharedTable.of(table, self.lane)
        self.token_sums = TokenSums(self, pool) if self.shares_sums else None
        self.sums = Accumulators(
            self.groups,
            self.step,
            self.decoder.operand,
            geo.row_blocks,
            plan.tile_m // STEP_TOKENS,
            left_by(self.decoder, self.gemm),
            None if self.token_sums is None else self.token_sums.read,
        )
        self.tokens = pool.alloc((TOKEN_BUFFERS * geo.buffer_chunks * CHUNK_WORDS,), "uint32", align=128)
        pool.move_base_to(0)
        self.slices = pool.alloc((plan.split_k, plan.tile_m, geo.pitch), self.kind, align=128)
        pool.commit()
        self.ring = [
            [b.local(self.groups.bits, "uint32") for _ in range(geo.row_blocks)] for _ in range(plan.stages)
        ]
        types = (array_dtype(self.args.scales), array_dtype(self.args.zeros))
        self.group_ring = [
            [GroupRegisters(self.groups, self.step, self.lane, types) for _ in range(geo.row_blocks)]
            for _ in range(plan.stages // geo.group_tiles)
        ]

    def _prefetch(self) -> None:
        """Bring the first words and scales into L2 while the kernel before still runs.

        The words of a packed row of tiles are fetched by the block that has its first strip.
        """
        if not self.overlap.possible or self.gemm.experts:
            return
        args, whole = self.args, b.keep(self.args.k_tiles * self.tile_words)
        even = prefetched_words(args.n_tiles, whole) // self.schedule.cluster // 4 * 4
        words = T.min(self.own_tiles * self.tile_words, even)
        strips = self.geo.tile_strips
        tile = (self.first_strip + strips - 1) // strips + self.thread
        mine = tile * strips < self.first_strip + self.geo.row_warps
        with b.when(T.And(T.And(mine, tile < args.n_tiles), words > 0)):
            start = args.words.ptr_to([0, 0, tile * whole + self.first_tile * self.tile_words])
            b.ptx("cp.async.bulk.prefetch.L2.global", start, T.Cast("uint32", words * 4))
        if self.gemm.scale:
            with b.when(self.thread < args.groups):
                b.ptx("prefetch.global.L2", args.scales.ptr_to([self.thread, self.first_row]))

    # ---- weights --------------------------------------------------------------------
    def _inside(self, distance: int) -> Expr:
        """Return whether the tile ``distance`` after the first of the current run lies within K."""
        return self.run_at.value * self.geo.run + distance < self.end_tile

    def _load(self, slot: int, distance: int, *, guarded: bool) -> None:
        """Emit the loads of a tile's words and, after the last tile of a group, of its scales.

        ``distance`` counts tiles from the first of the current run.
        """
        with b.when(self._inside(distance) if guarded else True):
            for block, words in enumerate(self.ring[slot]):
                self._load_words(words, block, distance)
        before = self.geo.group_tiles - 1
        if slot % self.geo.group_tiles == before and (self.gemm.scale or self.gemm.zero != "none"):
            with b.when(self._inside(distance - before) if guarded else True):
                for block, registers in enumerate(self.group_ring[slot // self.geo.group_tiles]):
                    registers.fetch(partial(self._read_group, distance - before, block))

    def _load_words(self, target: Any, block: int, distance: int) -> None:
        """Emit the loads of a thread's words of one fragment's rows of a tile."""
        at = 0
        for offset, width in load_order(self.groups.bits):
            word = self.words_at[width].value
            word = word + T.int64(distance * self.tile_words + offset + block * 32 * width)
            registers = (target[at + i] for i in range(width))
            b.ptx(LOADS[width], *registers, self.args.words.ptr_to([0, 0, word]))
            at += width

    def _read_group(self, distance: int, block: int, name: str, granule: int, part: int, row: Expr) -> Expr:
        """Return one scale or zero point of a K tile."""
        array = getattr(self.args, name)
        run = self.run_at.value + distance // self.geo.run
        group = self.groups.run_row(run, self.geo.run, distance % self.geo.run, granule)
        column = self.column + block * STRIP + row
        if name == "zeros" and self.gemm.zero == "float":
            return array[group, part, column]
        return array[group, column]

    # ---- tokens ---------------------------------------------------------------------
    def _place_tokens(self) -> None:
        """Lay out the buffers of x, start the first copy and find this lane's share.

        A buffer holds ``rounds`` rounds of each token: the fewer tokens, the more rounds.
        """
        geo, plan = self.geo, self.schedule
        unit = geo.unit_rounds * geo.round_tiles
        # Tokens as the next power of two: shifts instead of divisions by what only the launch knows.
        doublings = (2**i for i in range((plan.tile_m - 1).bit_length()))
        shift = b.keep(sum(T.Cast("int32", self.token_count > count) for count in doublings))
        fitting = T.int32(geo.buffer_chunks // geo.unit_chunks) >> shift
        if self.token_sums is not None:
            fitting = T.min(fitting, TOKEN_SUMS // plan.tile_m // unit)
        needed = (self.own_tiles + unit - 1) // unit
        # Long rows of x come in as many pieces as there are buffers: work begins with the first.
        even = T.max((needed + TOKEN_BUFFERS - 1) // TOKEN_BUFFERS, T.int32(geo.least_units) >> shift)
        units = T.min(fitting, T.min(needed, even))
        self.rounds = b.keep(units * geo.unit_rounds)
        self.token_chunks = b.keep(units * geo.unit_chunks)
        self.token_tile = TokenTile(self.token_chunks)
        self._share_copies(shift)
        self.buffer = b.Variable("int32", 0)
        self.rounds_left = b.Variable("int32", 0)
        self.next_chunk = b.Variable("int32", self.first_tile * geo.tile_chunks)
        self.end_column = b.keep(T.min(self.args.k_x, self.end_tile * TILE))
        self.loader = RunLoader(
            self.step.lanes,
            self.lane,
            self.token_tile,
            plan.tile_m // STEP_TOKENS,
            self.token_count - 1,
            self.tokens,
            aligned=geo.run * geo.tile_chunks % 8 == 0 and not self.step.lanes.partial_lanes,
        )
        with b.loop(TOKEN_BUFFERS - 1, rolled=True) as buffer:
            self._copy_tokens(buffer)

    def _share_copies(self, shift: Expr) -> None:
        """Share tokens among warps, or warps among tokens: all copy however few the tokens are."""
        warps = self.geo.threads // 32
        shared = b.keep(T.min(shift, warps.bit_length() - 1))
        warp, groups = b.bind(self.thread // 32), b.bind(T.int32(warps) >> shared)
        group = b.bind(warp >> shared)
        self.token_step = b.keep(T.int32(1) << shared)
        token = T.bitwise_and(warp, self.token_step - 1)
        self.own_token = b.keep(T.if_then_else(group < groups, token, self.token_count))
        self.own_piece = b.keep(group * (32 * COPIED) + self.lane)
        self.piece_step = b.keep(groups * (32 * COPIED))

    def _copy_tokens(self, buffer: Expr) -> None:
        """Emit the copy of x from chunk ``next_chunk`` of K on into a buffer; zeros beyond x."""
        geo, first = self.geo, b.bind(self.next_chunk.value)
        column = b.bind((first + self.own_piece) * self._chunk_elements)
        whole = b.bind((first + self.token_chunks) * self._chunk_elements <= self.end_column)
        with b.when(first < self.end_tile * geo.tile_chunks):
            token = b.Variable("int32", self.own_token)
            with b.repeat_while(token.value < self.token_count):
                word = self.token_tile.word(token.value, self.own_piece)
                self._copy_row(token.value, column, buffer * (geo.buffer_chunks * CHUNK_WORDS) + word, whole)
                token.set(token.value + self.token_step)
            self.next_chunk.set(self.next_chunk.value + self.token_chunks)
        self.copier.commit()

    @property
    def _chunk_elements(self) -> int:
        return CHUNK_BYTES // self.step.element_bytes

    def _copy_row(self, token: Expr, column: Expr, word: Expr, whole: Expr) -> None:
        """Emit this thread's part of copying a token: every 32nd of each `COPIED` x 32 chunks.

        What a warp copies at a time is whole rows of the swizzle, so that places follow from the first.
        ``whole`` says that no chunk is beyond x; else each is compared.
        """
        row, size = self.first_token + token, self._chunk_elements
        target = b.Variable("uint32", T.cuda.cvta_generic_to_shared(self.tokens.ptr_to([word])))
        # Of 64 bits, so that columns of a turn are immediate offsets of one address.
        at, source = b.Variable("int32", self.own_piece), b.Variable("int64", T.Cast("int64", column))
        last = b.keep(T.if_then_else(whole, self.token_chunks, 0) - 32 * (COPIED - 1))
        with b.repeat_while(at.value < self.token_chunks):
            steps = range(0, 32 * COPIED, 32)
            places = [
                (source.value + T.int64(i * size), target.value + T.uint32(i * CHUNK_BYTES)) for i in steps
            ]
            with b.when(at.value < last):
                for column, place in places:
                    self.copier.chunk(place, self.args.x.ptr_to([row, column]))
            with b.when(at.value >= last):
                for i, (column, place) in zip(steps, places, strict=True):
                    with b.when(at.value + i < self.token_chunks):
                        valid = b.bind(column < self.end_column)
                        x = self.args.x.ptr_to([row, T.if_then_else(valid, column, T.int64(0))])
                        self.copier.chunk(place, x, valid)
            at.set(at.value + self.piece_step)
            source.set(source.value + T.Cast("int64", self.piece_step * size))
            target.set(target.value + T.Cast("uint32", self.piece_step * CHUNK_BYTES))

    def _advance(self) -> None:
        """Wait for a buffer of x, and start the copy of what follows into the one consumed before."""
        geo = self.geo
        self.copier.wait(TOKEN_BUFFERS - 2)
        b.block_sync()
        mine = self.slice * (geo.run * geo.tile_chunks)
        current = b.keep(self.buffer.value)
        self.loader.begin(current * geo.buffer_chunks + mine)
        self.rounds_left.set(self.rounds)
        if self.token_sums is not None:
            self.token_sums.fill(current, self.rounds * geo.round_tiles)
            self.token_sums.begin(current)
            b.block_sync()
        self._copy_tokens(T.if_then_else(current == 0, TOKEN_BUFFERS - 1, current - 1))
        self.buffer.set(T.if_then_else(current == TOKEN_BUFFERS - 1, 0, current + 1))

    # ---- products -------------------------------------------------------------------
    def _consume(self, multiplier: TileMultiplier, slot: int, guarded: bool) -> None:
        """Decode and multiply what a slot holds."""
        geo, index = self.geo, slot % self.geo.run

        def load_tokens(token_block: int, span: int, out: Any) -> None:
            chunk = index * geo.tile_chunks + span * SPAN_CHUNKS
            self.loader.load(token_block, chunk, out)

        group = self.group_ring[slot // geo.group_tiles]
        # A guarded tile may be the last of its group that exists.
        flush = guarded or (index + 1) % geo.flush_tiles == 0
        if self.token_sums is not None:
            period = 1 if guarded else geo.flush_tiles
            self.token_sums.tiles = range(index // period * period, index // period * period + period)
        with b.when(self._inside(index) if guarded else True):
            tile = b.bind(self.run_at.value * geo.run + index)
            for registers in group:
                registers.tile = tile if geo.run % 2 else index
            self.sums.scale_tokens(self.args, self.lane, self.first_token, tile)
            multiplier.emit(self.ring[slot], group, load_tokens, flush)

    # ---- reduction and output -------------------------------------------------------
    def _finish(self) -> None:
        """Leave this warp's sums in shared memory, where all slices of K are added and stored."""
        self.sums.join_lanes()
        b.block_sync()
        lanes = self.step.lanes
        token_blocks = self.schedule.tile_m // STEP_TOKENS
        for fragment in range(self.geo.row_blocks * token_blocks):
            block, token_block = divmod(fragment, token_blocks)
            with b.when(lanes.is_first(self.lane)):
                for i in range(lanes.accumulators):
                    row, token = lanes.position(self.lane, i)
                    row = self.row_warp * self.schedule.warp_rows + block * STRIP + row
                    at = (self.slice, token_block * STEP_TOKENS + token, row)
                    b.store(self.slices, self.sums.result(fragment, i), *at)
        reduce_and_store(self, self.geo)

    @property
    def kind(self) -> str:
        """Type of the sums of a slice."""
        return self.sums.dtype

    def finished(self, total: Expr) -> Expr:
        """Return a total of all slices as float32."""
        return T.Cast("float32", total)


def prefetched_words(n_tiles: Expr, row_words: Expr) -> Expr:
    """Return the words to prefetch of each of ``n_tiles`` packed rows of tiles of ``row_words`` words."""
    least, most = (T.int32(size // 4) // n_tiles for size in PREFETCH_BYTES)
    return b.keep(T.min(T.max(row_words // PREFETCH_SHARE, least), most))
