"""The pipelines of AMD: x through two buffers of LDS, weights from memory to registers.

``out^T = W · x^T``: a block owns rows of weights and ``tile_m`` tokens. Packed words lie in the order of
the matrix cores' operands, so a lane loads what it decodes and multiplies, one stage ahead. x is loaded
to registers a stage ahead too, and written to LDS when the stage at hand is done: one barrier per
stage. Waves may split K; their sums are added up through LDS. ``mfma`` multiplies with matrix
instructions, of whose result a lane holds four neighbouring rows of a token, ``dot`` multiplies few
tokens with dot products within lanes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from itertools import product
from math import gcd
from operator import add
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS, each_piece
from ladder.lower.gpu.arguments import Arguments, declare_arguments
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.grouped import count_m_tiles, find_m_tile
from ladder.lower.gpu.groups import Accumulators, GroupRegisters, Groups, array_dtype, left_by
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import left_by_fnuz, reads_fnuz, to_fnuz, wave_decoder
from ladder.lower.rocm.epilogue import store_run
from ladder.lower.rocm.geometry import Geometry
from ladder.lower.rocm.grouped import WaveLanes
from ladder.lower.rocm.groups import WaveGroupRegisters
from ladder.lower.rocm.steps import RUN, dot_step, select_step, wide_step
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule
from schedules.waves import STEP_ROWS, WAVE, leaves_offsets
from targets import TileDevice

Expr = Any

STEPS_OF = {"mfma": select_step, "mfma32": wide_step, "dot": dot_step}
"""Pipeline -> what selects its step for a device and a type of activations."""

SPAN_GROUPS = 4
"""Groups of four words in 64 bytes of K, one for each quarter of a wave."""


class Kernel:
    """One kernel being emitted."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.gemm, self.device, self.schedule = gemm, device, schedule
        self.step = STEPS_OF[schedule.pipeline](device, gemm.activation)
        self.groups = Groups(gemm, schedule.placement)
        self.geo = Geometry(self.groups, self.step, device, schedule)
        self.raw = leaves_offsets(gemm, schedule)
        self.decoder = wave_decoder(gemm, device, raw=self.raw)
        self.args = declare_arguments(gemm)

    def emit(self) -> None:
        """Emit the whole body."""
        self._locate()
        self._allocate()
        with b.when(self.exists):
            self._work()

    def _work(self) -> None:
        """Emit the first stage, the walk over K and the stores."""
        geo = self.geo
        # Two turns at a time: registers and LDS of a stage change places without copies. Were the second
        # conditional, LLVM would sink its loads into it.
        two = 2 * geo.stage_tiles
        pairs = b.keep((self.args.k_tiles + two - 1) // two)
        self._fetch_tokens(T.int32(0))
        self._fetch_weights(T.int32(0), 0)
        self._write_tokens(0, T.int32(0))
        multiplier = TileMultiplier(self.decoder, self.sums)
        with b.loop(pairs, rolled=True) as pair:
            self.is_last = pair == pairs - 1
            for half in range(2):
                self._turn(multiplier, b.bind(2 * pair + half), half)
        if self.sums.periods == {0}:
            multiplier.flush_all([sets[0] for sets in self.group_registers[: geo.row_blocks]])
        if geo.joins:
            self._join()
        else:
            self._store()

    def _turn(self, multiplier: TileMultiplier, turn: Expr, half: int) -> None:
        """Multiply a stage, which is in set ``half`` of registers and LDS; fetch the next to the other."""
        other = 1 - half
        d.block_sync(WAVE)
        ahead = b.bind(turn + 1)
        self._fetch_tokens(ahead)
        d.schedule_fence()  # x is awaited first: loads return in order
        self._fetch_weights(ahead, other)
        d.schedule_fence()
        self._multiply_stage(multiplier, turn, half, lambda: self._write_tokens(other, ahead))

    # ---- set-up ---------------------------------------------------------------------
    def _locate(self) -> None:
        """Find out which tile this block and which part of it this lane works on."""
        geo, args, plan = self.geo, self.args, self.schedule
        # 32-row blocks are counted over the whole weight.
        self.all_blocks = args.n_tiles * (TILE // STEP_ROWS)
        own = geo.rows // STEP_ROWS
        rows = (self.all_blocks + own - 1) // own
        columns = count_m_tiles(args, plan.tile_m)
        dealt, self.thread = d.launch(rows * columns, geo.threads)
        dies = self.device.dies
        block = b.keep(together(dealt, rows * columns, dies)) if dies > 1 else dealt
        band = b.keep(columns * plan.raster)
        first = b.keep(T.truncdiv(block, band) * plan.raster)
        place = b.keep(T.truncmod(block, band))
        width = b.keep(T.min(rows - first, plan.raster))
        row_tile = b.bind(first + T.truncmod(place, width))
        self.lane = b.bind(self.thread % WAVE)
        tokens = find_m_tile(args, b.keep(T.truncdiv(place, width)), plan.tile_m, WaveLanes(self.lane))
        self.args, self.first_token, self.exists = tokens.args, b.keep(tokens.first), tokens.exists
        wave, per_slice = b.bind(self.thread // WAVE), plan.warps // plan.split_k
        self.first_block = b.keep(row_tile * own)
        self.slice: Expr = wave // per_slice if plan.split_k > 1 else 0
        place = wave % per_slice if plan.split_k > 1 else wave
        self.unit = self.step.rows // STEP_ROWS
        self.row_block = b.keep(self.first_block + place % geo.row_waves * (geo.row_blocks * self.unit))
        self.wave_token = b.keep(place // geo.row_waves * geo.warp_tokens)
        self.holders = [self.step.holder(self.lane, part) for part in range(self.step.parts)]
        self.holders = [(b.bind(block), b.bind(thread)) for block, thread in self.holders]

    def _allocate(self) -> None:
        """Allocate LDS and registers."""
        geo, bits = self.geo, self.groups.bits
        self.shared = d.shared(geo.shared_bytes // 4)
        self.sums = Accumulators(
            self.groups,
            self.step,
            self.decoder.operand,
            geo.row_blocks,
            geo.token_blocks,
            left_by(self.decoder, self.gemm) if self.raw else left_by_fnuz(self.device, self.gemm.activation),
        )
        self.fetched = b.local(geo.pieces * CHUNK_WORDS, "uint32")
        types = (array_dtype(self.args.scales), array_dtype(self.args.zeros))
        blocks = geo.row_blocks * geo.slice_tiles
        widths = [width for _, width in load_order(bits)]
        self.words = [(d.Pieces(widths), d.Pieces(widths)) for _ in range(blocks * self.step.parts)]
        # Neighbouring tiles of a stage that have their scales in common share registers.
        self.share = gcd(self.groups.span or geo.slice_tiles, geo.slice_tiles)
        self.group_registers = [
            tuple(WaveGroupRegisters(self.groups, self.step, self.lane, types) for _ in range(2))
            for _ in range(blocks // self.share)
        ]

    # ---- tokens ---------------------------------------------------------------------
    def _piece(self, index: int) -> tuple[Expr, Expr]:
        """Return token and chunk of a thread's piece of a stage."""
        chunks = self.geo.tokens.chunks
        piece = b.bind(self.thread + index * self.geo.threads)
        return b.bind(piece // chunks), b.bind(piece % chunks)

    def _fetch_tokens(self, turn: Expr) -> None:
        """Emit the loads of this thread's pieces of a stage of x; whatever lies beyond x is in its place."""
        args, per_chunk = self.args, CHUNK_BYTES // self.step.element_bytes
        for index in range(self.geo.pieces):
            row, chunk = self._piece(index)
            token = b.bind(T.min(self.first_token + row, args.m - 1))
            column = b.bind(turn * (self.geo.stage_tiles * TILE) + chunk * per_chunk)
            at = d.lanes(T.Select(column < args.k_x, column, 0), per_chunk)
            loaded = d.as_type(args.x[token, at], "uint32x4")
            b.store(self.fetched, loaded, d.lanes(index * CHUNK_WORDS, CHUNK_WORDS))

    def _write_tokens(self, half: int, turn: Expr) -> None:
        """Emit the writes of the pieces fetched for a turn to LDS; zeros beyond K.

        Word c of chunk i of 64 bytes goes to place 4c + i, so that the lanes of column group c find
        their operands of two steps side by side.
        """
        geo, fnuz = self.geo, reads_fnuz(self.device, self.gemm.activation)
        stage = half * geo.stage_chunks * CHUNK_WORDS
        for index in range(geo.pieces):
            row, chunk = self._piece(index)
            span = b.bind(chunk // SPAN_GROUPS * SPAN_GROUPS)
            first = b.bind(geo.tokens.word(row, span) + chunk % SPAN_GROUPS)
            column = turn * (geo.stage_tiles * TILE) + chunk * (CHUNK_BYTES // self.step.element_bytes)
            inside = b.bind(column < self.args.k_x)

            def write(index: int = index, first: Expr = first, inside: Expr = inside) -> None:
                for c in range(CHUNK_WORDS):
                    word = T.Select(inside, self.fetched[index * CHUNK_WORDS + c], T.uint32(0))
                    word = to_fnuz(word, self.gemm.activation) if fnuz else word
                    # The swizzle is an exclusive or of multiples of four words.
                    b.store(self.shared, word, stage + (first ^ (c * CHUNK_WORDS)))

            if (index + 1) * geo.threads <= self.schedule.tile_m * geo.tokens.chunks:
                write()
            else:
                with b.when(row < self.schedule.tile_m):
                    write()

    # ---- weights --------------------------------------------------------------------
    def _fetch_weights(self, turn: Expr, half: int) -> None:
        """Emit the loads of a stage's packed words, scales and zero points of this lane."""
        for step in range(self.geo.slice_tiles):
            tile = b.bind(T.min(self._tile(turn, step), self.args.k_tiles - 1))
            for block in range(self.geo.row_blocks):
                for part in range(self.step.parts):
                    self._fetch_words(tile, step, block, part, half)
                if step % self.share == 0:
                    registers = self._registers(step, block, half)
                    registers.fetch(GroupReader(self.groups, self.args, tile, self._row(block)))

    def _registers(self, step: int, block: int, half: int) -> WaveGroupRegisters:
        """Return the scales and zero points of a tile of a stage."""
        return self.group_registers[step // self.share * self.geo.row_blocks + block][half]

    def _row(self, block: int) -> Expr:
        """Return a step's first 32-row block; those beyond N repeat the last ones, and are not stored."""
        return b.bind(T.min(self.row_block + block * self.unit, self.all_blocks - self.unit))

    def _tile(self, turn: Expr, step: int) -> Expr:
        """Return a packed tile along K of this wave's slice of a stage; it may lie beyond K."""
        return b.bind(turn * self.geo.stage_tiles + self.slice * self.geo.slice_tiles + step)

    def _words(self, step: int, half: int) -> list[d.Pieces]:
        """Return a lane's words of a tile of a stage, by row block and part."""
        count = self.geo.row_blocks * self.step.parts
        return [words[half] for words in self.words[step * count : (step + 1) * count]]

    def _fetch_words(self, tile: Expr, step: int, block: int, part: int, half: int) -> None:
        inner, thread = self.holders[part]
        row = b.bind(self._row(block) + inner)
        row_tile, upper = b.bind(row // 2), b.bind(row % 2)
        words = self._words(step, half)[block * self.step.parts + part].buffers
        for buffer, (offset, width) in zip(words, load_order(self.groups.bits), strict=True):
            place = offset + (upper * WAVE + thread) * width
            d.load(buffer, self.args.words, row_tile, tile, place, width=width)

    # ---- products -------------------------------------------------------------------
    def _multiply_stage(
        self, multiplier: TileMultiplier, turn: Expr, half: int, write: Callable[[], None]
    ) -> None:
        """Decode and multiply this wave's tiles of a stage; near its end ``write`` what was fetched."""
        geo = self.geo
        stage, last = half * geo.stage_chunks, (geo.slice_tiles - 1, geo.tile_chunks // SPAN_GROUPS - 1, 0)
        before = self.slice * geo.slice_tiles * geo.tile_chunks
        token = self.wave_token + (self.lane % self.step.tokens if self.step.tokens > 1 else 0)
        token, parts = b.bind(token), range(self.step.parts)
        groups = [b.bind(before + self.step.column(self.lane, part)) for part in parts]
        for step in range(geo.slice_tiles):
            blocks = range(geo.row_blocks)
            registers: list[GroupRegisters] = [self._registers(step, block, half) for block in blocks]
            tile, index, period = self._tile(turn, step), *self._place(half, step)
            for each in registers:
                each.tile = tile if period % 2 else index

            def load_tokens(token_block: int, span: int, out: Any, step: int = step) -> None:
                if (step, span, token_block) == last:
                    d.schedule_fence()  # before, waiting for what was fetched would stop the work
                    write()
                ahead = step * geo.tile_chunks + span * SPAN_GROUPS
                row = token + token_block * self.step.tokens
                for part in parts:
                    place = (stage + geo.tokens.place(row, groups[part] + ahead)) * CHUNK_WORDS
                    d.load(out, self.shared, place, width=CHUNK_WORDS, at=part * CHUNK_WORDS)

            due = self._due(turn, half, step)
            real = T.min(tile, self.args.k_tiles - 1)
            self.sums.scale_tokens(self.args, self.lane, self.first_token + self.wave_token, real)
            multiplier.emit(self._words(step, half), registers, load_tokens, flush=due is True)
            if not isinstance(due, bool):
                with b.when(due):
                    multiplier.flush_all(registers)
            if geo.joins:
                d.schedule_fence()  # or LLVM decodes all tiles of a stage at once, in hundreds of registers

    def _place(self, half: int, step: int) -> tuple[int, int]:
        """Return which of a run of neighbouring tiles a wave's tile is, and how many those are.

        Runs begin at multiples of their length: two stages, or one where other waves have what follows.
        """
        tiles = self.geo.slice_tiles
        return (half * tiles + step, 2 * tiles) if self.schedule.split_k == 1 else (step, tiles)

    def _due(self, turn: Expr, half: int, step: int) -> Expr:
        """Return whether sums must be flushed after a wave's tile ``step`` of a stage.

        Tiles beyond K add nothing and have the scales of the last one. Where K is split, a wave's next
        tile after a stage is in another group, unless groups are longer than a stage.
        """
        tiles, periods = self.geo.slice_tiles, sorted(self.sums.periods - {0})
        last, (index, run) = step == tiles - 1, self._place(half, step)
        if not periods or any((index + 1) % p == 0 for p in periods if run % p == 0):
            return bool(periods)
        if last and self.schedule.split_k > 1:
            return True
        tile = self._tile(turn, step)
        due = [(tile + 1) % p == 0 for p in periods if run % p and (last or p % tiles)]
        due += [self.is_last] if last and half else []
        return reduce(T.Or, due) if due else False

    # ---- output ---------------------------------------------------------------------
    def _store(self) -> None:
        """Finish and store this lane's sums: runs of four rows of one token."""
        geo, lanes = self.geo, self.step.lanes
        for token_block in range(geo.token_blocks):
            inner = lanes.token(self.lane, 0) + token_block * self.step.tokens
            m = b.bind(self.first_token + self.wave_token + inner)
            with b.when(m < self.args.m):
                for block, first in product(range(geo.row_blocks), range(0, lanes.accumulators, RUN)):
                    inner = block * self.step.rows + lanes.slot_row(self.lane, first)
                    row = self.row_block * STEP_ROWS + inner
                    fragment = block * geo.token_blocks + token_block
                    sums = [self.sums.result(fragment, first + i) for i in range(RUN)]
                    self._store_run(sums, m, b.bind(row))

    def _store_run(self, sums: list[Expr], m: Expr, n: Expr) -> None:
        with b.when(n < self.args.n):
            store_run(self.gemm, self.args, [T.Cast("float32", value) for value in sums], m, n)

    def _join(self) -> None:
        """Add up the sums of all slices of K, and of all lanes of a row, through LDS, and store them."""
        geo, lanes = self.geo, self.step.lanes
        inside = b.bind((self.row_block - self.first_block) * STEP_ROWS)
        part = self.slice
        if lanes.partial_lanes:
            part = self.slice * (WAVE // lanes.partial_lanes[0]) + self.lane // lanes.partial_lanes[0]
        part, run = b.bind(part), self.step.run
        d.block_sync(WAVE)
        fragments, firsts = range(geo.row_blocks * geo.token_blocks), range(0, lanes.accumulators, run)
        for fragment, first in product(fragments, firsts):
            block, token_block = divmod(fragment, geo.token_blocks)
            row, token = lanes.position(self.lane, first)
            token = self.wave_token + token_block * self.step.tokens + token
            at = geo.sum_word(part, token, inside + block * self.step.rows + row)
            sums = [d.as_type(self.sums.result(fragment, first + i), "uint32") for i in range(run)]
            b.store(self.shared, d.vector(sums), d.lanes(at, run))
        d.block_sync(WAVE)
        runs = geo.rows // RUN

        def store(piece: Expr) -> None:
            token, row = b.bind(piece // runs), b.bind(piece % runs * RUN)
            m, n = b.bind(self.first_token + token), b.bind(self.first_block * STEP_ROWS + row)
            with b.when(m < self.args.m):
                self._store_run(self._joined(token, row), m, n)

        each_piece(self.schedule.tile_m * runs, geo.threads, self.thread, store)

    def _joined(self, token: Expr, row: Expr) -> list[Expr]:
        """Return the sums of a run of rows of a token over all parts, in the order of K."""
        kind = self.sums.dtype
        loaded = [b.local(RUN, "uint32") for _ in range(self.geo.parts)]
        for part, words in enumerate(loaded):
            d.load(words, self.shared, self.geo.sum_word(part, token, row), width=RUN)
        return [b.bind(reduce(add, (d.as_type(words[i], kind) for words in loaded))) for i in range(RUN)]


@dataclass(frozen=True)
class GroupReader:
    """Loads the scales and zero points of a 32-row block for a K tile, as words.

    Parameters
    ----------
    groups, args
        Where they lie.
    tile, row
        The K tile, and the block.
    """

    groups: Groups
    args: Arguments
    tile: Expr
    row: Expr

    def _place(self, granule: int, row: Expr) -> tuple[Expr, Expr]:
        return self.groups.row(self.tile, granule), self.row * STEP_ROWS + row

    def __call__(self, name: str, granule: int, part: int, row: Expr) -> Expr:
        """Return one element, zero-extended to a word."""
        array = self.args.scales if name == "scales" else self.args.zeros
        group, column = self._place(granule, row)
        value = array[group, part, column] if len(array.shape) == 3 else array[group, column]
        return d.to_word(value, str(array.dtype))

    def run(self, granule: int, row: Expr, words: int) -> Expr:
        """Return the scales of neighbouring rows from ``row`` on as a vector of words."""
        group, column = self._place(granule, row)
        return d.as_type(self.args.scales[group, d.lanes(column, RUN)], f"uint32x{words}")


def together(block: Expr, blocks: Expr, dies: int) -> Expr:
    """Return a block's place in an order in which the blocks of a die follow each other.

    Dies with an L2 of their own get blocks in turn (MI300X: eight). Neighbouring tiles share rows of x or
    weights, so a die should work on a run of them.
    """
    each, rest, die = T.truncdiv(blocks, dies), T.truncmod(blocks, dies), T.truncmod(block, dies)
    return die * each + T.min(die, rest) + T.truncdiv(block, dies)
