"""The pipeline of MFMA: x through LDS in two or more buffers, weights from memory to registers.

``out^T = W · x^T``: a block owns ``tile_n`` weight rows and ``tile_m`` tokens. Packed words lie in the
order of the matrix cores' operands, so a lane loads what it decodes and multiplies, one stage ahead.
x is loaded to registers a stage ahead too, and written to LDS when the stage at hand is done: one
barrier per stage. A lane of D holds four neighbouring rows of a token, which it stores as they are.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import declare_arguments
from ladder.lower.gpu.decode import load_order
from ladder.lower.gpu.groups import Accumulators, GroupRegisters, Groups, array_dtype
from ladder.lower.gpu.tile_multiplier import TileMultiplier
from ladder.lower.gpu.token_tile import CHUNK_BYTES, CHUNK_WORDS
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import left_by_fnuz, reads_fnuz, to_fnuz, wave_decoder
from ladder.lower.rocm.epilogue import store_run
from ladder.lower.rocm.geometry import Geometry
from ladder.lower.rocm.groups import WaveGroupRegisters
from ladder.lower.rocm.steps import owner, select_step
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule
from schedules.waves import STEP_ROWS, WAVE
from targets import TileDevice

Expr = Any

SPAN_GROUPS = 4
"""Groups of four words in 64 bytes of K, one for each quarter of a wave."""

RUN = 4
"""Neighbouring rows of a token that a lane of D holds."""


def emit(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, name: str) -> Any:
    """Emit one kernel, generic in M, N and K.

    Parameters
    ----------
    gemm
        The problem; only its ``shape_free()`` part matters.
    device
        An AMD device with MFMA.
    schedule
        An ``"mfma"`` schedule.
    name
        Symbol of the kernel's host entry.

    Returns
    -------
    A TIRx PrimFunc.

    Raises
    ------
    DeviceError
        If the device has no matrix core for the activations.
    ScheduleError
        If the schedule does not fit.
    """
    with b.function(name) as result:
        Mfma(gemm, device, schedule).emit()
    return result.func


class Mfma:
    """One kernel being emitted."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.gemm, self.device, self.schedule = gemm, device, schedule
        self.step = select_step(device, gemm.activation)
        self.groups = Groups(gemm, schedule.placement)
        self.geo = Geometry(self.groups, self.step, device, schedule)
        self.decoder = wave_decoder(gemm, device)
        self.args = declare_arguments(gemm)

    def emit(self) -> None:
        """Emit the whole body: first stage, walk over K, stores."""
        geo, stages = self.geo, self.schedule.stages
        self._locate()
        self._allocate()
        turns = b.keep((self.args.k_tiles + geo.stage_tiles - 1) // geo.stage_tiles)
        self._fetch_tokens(T.int32(0))
        self._fetch_weights(T.int32(0))
        self._write_tokens(T.int32(0), T.int32(0))
        multiplier = TileMultiplier(self.decoder, self.sums)
        at = b.Variable("int32", 0)
        with b.loop(turns, rolled=True) as turn:
            d.block_sync()
            self._use_weights()
            ahead = b.bind(T.min(turn + 1, turns - 1))
            self._fetch_tokens(ahead)
            self._fetch_weights(ahead)
            d.schedule_fence()
            self._multiply_stage(multiplier, at.value, turn)
            d.schedule_fence()
            at.set(
                T.if_then_else(at.value == (stages - 1) * geo.stage_chunks, 0, at.value + geo.stage_chunks)
            )
            self._write_tokens(at.value, ahead)
        self._store()

    # ---- set-up ---------------------------------------------------------------------
    def _locate(self) -> None:
        """Find out which tile this block and which part of it this lane works on."""
        geo, args, plan = self.geo, self.args, self.schedule
        rows = (args.n_tiles + geo.row_tiles - 1) // geo.row_tiles
        columns = (args.m + plan.tile_m - 1) // plan.tile_m
        dealt, self.thread = d.launch(rows * columns, geo.threads)
        block = together(dealt, rows * columns, self.device.dies)
        band = b.keep(columns * plan.raster)
        first = b.keep(T.truncdiv(block, band) * plan.raster)
        place = b.keep(T.truncmod(block, band))
        width = b.keep(T.min(rows - first, plan.raster))
        row_tile = b.keep(first + T.truncmod(place, width))
        self.first_token = b.keep(T.truncdiv(place, width) * plan.tile_m)
        self.lane = b.bind(self.thread % WAVE)
        wave = b.bind(self.thread // WAVE)
        # 32-row blocks are counted over the whole weight.
        self.row_block = b.keep(row_tile * (plan.tile_n // STEP_ROWS) + wave % geo.row_waves * geo.row_blocks)
        self.wave_token = b.keep(wave // geo.row_waves * geo.warp_tokens)
        self.owner = b.bind(owner(self.lane))

    def _allocate(self) -> None:
        """Allocate LDS and registers."""
        geo, bits = self.geo, self.groups.bits
        self.shared = d.shared(geo.shared_words)
        self.sums = Accumulators(
            self.groups,
            self.step,
            self.decoder.operand,
            geo.row_blocks,
            geo.token_blocks,
            left_by_fnuz(self.device, self.gemm.activation),
        )
        self.fetched = b.local(geo.pieces * CHUNK_WORDS, "uint32")
        types = (array_dtype(self.args.scales), array_dtype(self.args.zeros))
        blocks = geo.row_blocks * geo.stage_tiles
        self.words = [(b.local(bits, "uint32"), b.local(bits, "uint32")) for _ in range(blocks)]
        self.group_registers = [
            tuple(WaveGroupRegisters(self.groups, self.step, self.lane, types) for _ in range(2))
            for _ in range(blocks)
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
            column = b.bind(turn * self.schedule.tile_k + chunk * per_chunk)
            at = d.lanes(T.Select(column < args.k_x, column, 0), per_chunk)
            loaded = d.as_type(args.x[token, at], "uint32x4")
            b.store(self.fetched, loaded, d.lanes(index * CHUNK_WORDS, CHUNK_WORDS))

    def _write_tokens(self, stage: Expr, turn: Expr) -> None:
        """Emit the writes of the pieces fetched for a turn to the stage at chunk ``stage``; zeros beyond K.

        Word c of chunk i of 64 bytes goes to place 4c + i, so that the lanes of column group c find
        their operands of two steps side by side.
        """
        geo, fnuz = self.geo, reads_fnuz(self.device, self.gemm.activation)
        for index in range(geo.pieces):
            row, chunk = self._piece(index)
            span = b.bind(chunk // SPAN_GROUPS * SPAN_GROUPS)
            first = b.bind(geo.tokens.word(row, span) + chunk % SPAN_GROUPS)
            column = turn * self.schedule.tile_k + chunk * (CHUNK_BYTES // self.step.element_bytes)
            inside = b.bind(column < self.args.k_x)

            def write(index: int = index, first: Expr = first, inside: Expr = inside) -> None:
                for c in range(CHUNK_WORDS):
                    word = T.Select(inside, self.fetched[index * CHUNK_WORDS + c], T.uint32(0))
                    word = to_fnuz(word, self.gemm.activation) if fnuz else word
                    # The swizzle is an exclusive or of multiples of four words.
                    b.store(self.shared, word, stage * CHUNK_WORDS + (first ^ (c * CHUNK_WORDS)))

            if (index + 1) * geo.threads <= self.schedule.tile_m * geo.tokens.chunks:
                write()
            else:
                with b.when(row < self.schedule.tile_m):
                    write()

    # ---- weights --------------------------------------------------------------------
    def _fetch_weights(self, turn: Expr) -> None:
        """Emit the loads of a stage's packed words, scales and zero points of this lane."""
        for step in range(self.geo.stage_tiles):
            tile = b.bind(T.min(turn * self.geo.stage_tiles + step, self.args.k_tiles - 1))
            for block in range(self.geo.row_blocks):
                self._fetch_block(tile, step * self.geo.row_blocks + block, block)

    def _fetch_block(self, tile: Expr, slot: int, block: int) -> None:
        # Blocks beyond N repeat the last ones; nothing of theirs is stored.
        row = b.bind(T.min(self.row_block + block, self.args.n_tiles * (TILE // STEP_ROWS) - 1))
        row_tile, half = b.bind(row // 2), b.bind(row % 2)
        at = 0
        for offset, width in load_order(self.groups.bits):
            place = offset + (half * WAVE + self.owner) * width
            d.load(self.words[slot][1], at, self.args.words, row_tile, tile, place, width=width)
            at += width

        def read(name: str, granule: int, part: int, inner: Expr) -> Expr:
            array = self.args.scales if name == "scales" else self.args.zeros
            index = self.groups.row(tile, granule), row * STEP_ROWS + inner
            value = array[index[0], part, index[1]] if len(array.shape) == 3 else array[index]
            return d.to_word(value, str(array.dtype))

        self.group_registers[slot][1].fetch(read)

    def _use_weights(self) -> None:
        """Make what was fetched for the next stage that of the stage at hand."""
        for current, following in self.words:
            for i in range(self.groups.bits):
                b.store(current, following[i], i)
        for now, then in self.group_registers:
            now.copy(then)

    # ---- products -------------------------------------------------------------------
    def _multiply_stage(self, multiplier: TileMultiplier, stage: Expr, turn: Expr) -> None:
        """Decode and multiply the packed tiles of a stage."""
        geo = self.geo
        token, column = b.bind(self.wave_token + self.lane % self.step.tokens), b.bind(self.lane // 16)
        for step in range(geo.stage_tiles):
            slots = range(step * geo.row_blocks, (step + 1) * geo.row_blocks)
            registers: list[GroupRegisters] = [self.group_registers[slot][0] for slot in slots]
            for each in registers:
                each.tile = step if geo.stage_tiles % 2 == 0 else turn

            def load_tokens(token_block: int, span: int, out: Any, step: int = step) -> None:
                group = (step * geo.tile_chunks // SPAN_GROUPS + span) * SPAN_GROUPS
                row = token + token_block * self.step.tokens
                place = (stage + geo.tokens.place(row, group + column)) * CHUNK_WORDS
                d.load(out, 0, self.shared, place, width=CHUNK_WORDS)

            tile = b.bind(turn * geo.stage_tiles + step)
            due = self.sums.flush_due(tile, self.args.k_tiles)
            real = T.min(tile, self.args.k_tiles - 1)
            self.sums.scale_tokens(self.args, self.lane, self.first_token + self.wave_token, real)
            words = [self.words[slot][0] for slot in slots]
            multiplier.emit(words, registers, load_tokens, flush=due is True)
            if not isinstance(due, bool):
                with b.when(due):
                    multiplier.flush_all(registers)

    # ---- output ---------------------------------------------------------------------
    def _store(self) -> None:
        """Finish and store this lane's sums: runs of four rows of one token."""
        geo, lanes = self.geo, self.step.lanes
        for token_block in range(geo.token_blocks):
            inner = lanes.token(self.lane, 0) + token_block * self.step.tokens
            m = b.bind(self.first_token + self.wave_token + inner)
            with b.when(m < self.args.m):
                for block in range(geo.row_blocks):
                    for first in range(0, lanes.accumulators, RUN):
                        self._store_run(m, block, token_block, first)

    def _store_run(self, m: Expr, block: int, token_block: int, first: int) -> None:
        n = b.bind((self.row_block + block) * STEP_ROWS + self.step.lanes.slot_row(self.lane, first))
        with b.when(n < self.args.n):
            fragment = block * self.geo.token_blocks + token_block
            sums = [T.Cast("float32", self.sums.result(fragment, first + i)) for i in range(RUN)]
            store_run(self.gemm, self.args, sums, m, n)


def together(block: Expr, blocks: Expr, dies: int) -> Expr:
    """Return a block's place in an order in which the blocks of a die follow each other.

    Dies with an L2 of their own get blocks in turn (MI300X: eight). Neighbouring tiles share rows of x or
    weights, so a die should work on a run of them.
    """
    if dies == 1:
        return block
    each, rest = b.bind(T.truncdiv(blocks, dies)), b.bind(T.truncmod(blocks, dies))
    die = b.bind(T.truncmod(block, dies))
    return b.keep(die * each + T.min(die, rest) + T.truncdiv(block, dies))
