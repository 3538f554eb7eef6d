"""The pipeline for few tokens: packed words stream from global memory into registers.

A block owns 16 rows per row-warp; its warps split K into interleaved slices. Each thread
keeps ``stages`` tiles of words in flight, x passes through shared memory in chunks of K, and
``mma`` reduces. Slices are added in shared memory at the end. Nothing depends on the size of
M, N or K: tails are guarded, and blocks along the second grid axis serve further tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cuda.arguments import declare_arguments
from ladder.lower.cuda.decode import load_order, make_decoder
from ladder.lower.cuda.epilogue import finish
from ladder.lower.cuda.groups import Accumulators, GroupRegisters, Groups, TileMultiplier, array_dtype
from ladder.lower.cuda.instructions import STEP_TOKENS, MatrixStep, select_step
from ladder.lower.cuda.tokens import CHUNK_BYTES, SPAN_CHUNKS, Copier, SpanLoader, TokenTile
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, check
from targets import TileDevice

Expr = Any

TILE_WARPS = 4
"""Warps that share a packed tile: 16 rows each."""

LOADS = {
    width: f"ld.global.nc.L1::no_allocate{'' if width == 1 else f'.v{width}'}.u32" for width in (1, 2, 4)
}
"""Weights are read once: they bypass L1."""

BASE_REGISTERS = 44
"""Registers for addresses, operands and accumulators of eight tokens, as ptxas reports."""


def emit(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, name: str) -> Any:
    """Emit one kernel, generic in M, N and K.

    Parameters
    ----------
    gemm
        The problem; only its ``shape_free()`` part matters.
    device
        Any NVIDIA device with tensor cores.
    schedule
        A ``"gemv"`` schedule: ``tile_m`` tokens (8 or 16), ``warps`` in ``split_k`` slices.
    name
        Symbol of the kernel's host entry.

    Returns
    -------
    A TIRx PrimFunc.

    Raises
    ------
    DeviceError
        If the device has no tensor core for the activations.
    ScheduleError
        If the schedule does not fit.
    """
    with b.function(name) as result:
        Gemv(gemm, device, schedule).emit()
    return result.func


@dataclass(frozen=True)
class Geometry:
    """Sizes that follow from a problem, a device and a schedule."""

    groups: Groups
    step: MatrixStep
    device: TileDevice
    schedule: GpuSchedule

    def __post_init__(self) -> None:
        plan = self.schedule
        check(plan.tile_n == TILE, f"gemv works on the packed tile's {TILE} rows, got tile_n={plan.tile_n}")
        check(plan.tile_m in (8, 16), f"gemv serves 8 or 16 tokens per block, got tile_m={plan.tile_m}")
        check(
            plan.warps in (plan.split_k, 2 * plan.split_k, TILE_WARPS * plan.split_k) and plan.warps <= 32,
            f"gemv takes 1, 2 or 4 warps per slice of K and at most 32, got warps={plan.warps},"
            f" split_k={plan.split_k}",
        )
        check(
            self.shared_bytes <= self.device.shared_per_block,
            f"{self.shared_bytes} bytes of shared memory exceed the {self.device.shared_per_block} of"
            f" {self.device.name}; use a smaller split_k or tile_m",
        )
        check(
            self.registers <= 65536 // self.threads,
            f"{plan.stages} tiles in flight need about {self.registers} registers per thread, more than the"
            f" {65536 // self.threads} of {self.threads} threads; use at most {self.most_stages} stages",
        )

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.warps * 32

    @property
    def row_warps(self) -> int:
        """Warps along the rows."""
        return self.schedule.warps // self.schedule.split_k

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return 16 * self.row_warps

    @property
    def _registers_per_tile(self) -> int:
        """Registers that one more tile in flight takes."""
        values = (2 if self.groups.gemm.scale else 0) + {"none": 0, "integer": 2, "float": 4}[
            self.groups.gemm.zero
        ]
        return self.groups.bits + values * self.groups.per_tile

    @property
    def registers(self) -> int:
        """Estimated registers per thread."""
        fragments = self.schedule.tile_m // STEP_TOKENS * self.step.lanes.accumulators
        sums = 2 * fragments if self.groups.lane == 8 or self.groups.on_accumulator else fragments
        return BASE_REGISTERS + sums + (self.schedule.stages + 1) * self._registers_per_tile

    @property
    def most_stages(self) -> int:
        """Tiles in flight that fit the register file (at least 1)."""
        spare = 65536 // self.threads - self.registers + self.schedule.stages * self._registers_per_tile
        return max(1, spare // self._registers_per_tile)

    def _chunks(self, slots: int) -> int:
        """Return the 16-byte chunks of a token in ``slots`` tiles of every slice."""
        return slots * self.schedule.split_k * TILE * self.step.element_bytes // CHUNK_BYTES

    @property
    def slots(self) -> int:
        """Tiles per slice between two block barriers: a divisor of ``stages``.

        The largest for which two buffers of x leave room for a second block.
        """
        budget = min(self.device.shared_per_unit // 2 - 1024, self.device.shared_per_block) // 2
        stages = self.schedule.stages
        sizes = [s for s in range(stages, 0, -1) if stages % s == 0]
        fits = (s for s in sizes if self._chunks(s) * CHUNK_BYTES * self.schedule.tile_m <= budget)
        return next(fits, 1)

    @property
    def tokens(self) -> TokenTile:
        """Layout of one buffer of x; rows are padded to what the swizzle permutes."""
        chunks = self.chunks
        return TokenTile(chunks if chunks == 4 else -(-chunks // 8) * 8)

    @property
    def chunks(self) -> int:
        """16-byte chunks per token that one buffer of x holds."""
        return self._chunks(self.slots)

    @property
    def tile_chunks(self) -> int:
        """16-byte chunks per token of one packed tile."""
        return TILE * self.step.element_bytes // CHUNK_BYTES

    @property
    def pitch(self) -> int:
        """Words between tokens of the reduction buffer; 4 more than the rows avoids bank conflicts."""
        return self.rows + 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        tokens = 2 * self.tokens.words(self.schedule.tile_m)
        return 4 * max(tokens, self.schedule.split_k * self.schedule.tile_m * self.pitch)


class Gemv:
    """One kernel being emitted."""

    def __init__(self, gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> None:
        self.gemm, self.schedule = gemm, schedule
        self.step = select_step(device, gemm.activation)
        self.groups = Groups(gemm, schedule.placement)
        self.geo = Geometry(self.groups, self.step, device, schedule)
        self.decoder = make_decoder(gemm, device)
        self.copier = Copier(device)
        self.args = declare_arguments(gemm)

    def emit(self) -> None:
        """Emit the whole body."""
        self._locate()
        self._allocate()
        for slot in range(self.schedule.stages):
            self._load(slot, slot)
        self._copy_tokens(0)
        multiplier = TileMultiplier(self.decoder, self.sums, 1, self.schedule.tile_m // STEP_TOKENS)
        rounds = (self.slice_tiles + self.schedule.stages - 1) // self.schedule.stages
        with b.loop(b.bind(rounds)) as turn:
            for slot in range(self.schedule.stages):
                position = b.bind(turn * self.schedule.stages + slot)
                if slot % self.geo.slots == 0:
                    chunk = b.bind(turn * (self.schedule.stages // self.geo.slots) + slot // self.geo.slots)
                    self._advance(chunk)
                with b.when(self._tile(position) < self.args.k_tiles):
                    self._consume(multiplier, slot, position, chunk)
        self._finish()

    # ---- set-up ---------------------------------------------------------------------
    def _locate(self) -> None:
        """Find out which rows, tokens and slice of K this thread works on."""
        geo, args = self.geo, self.args
        parts = TILE_WARPS // geo.row_warps
        b.device(1)
        block, token_block = b.block_index(
            [args.n_tiles * parts, (args.m + self.schedule.tile_m - 1) // self.schedule.tile_m]
        )
        self.thread = b.thread_index(geo.threads)
        warp = b.bind(self.thread // 32)
        self.lane = b.bind(self.thread % 32)
        self.slice = b.bind(warp // geo.row_warps)
        self.row_tile = b.bind(block // parts)
        self.row_warp = b.bind(warp % geo.row_warps)
        part = b.bind(block % parts)
        row, column = self.step.lanes.operand(self.lane)
        self.owner = b.bind((part * geo.row_warps + self.row_warp) * 32 + row * 4 + column)
        self.first_row = b.bind(self.row_tile * TILE + part * geo.rows)
        self.first_token = b.bind(token_block * self.schedule.tile_m)
        self.token_count = b.bind(T.min(args.m - self.first_token, self.schedule.tile_m))
        self.last_token = b.bind(self.token_count - 1)
        split = self.schedule.split_k
        self.slice_tiles = (args.k_tiles + split - 1) // split

    def _allocate(self) -> None:
        """Allocate shared buffers and registers; the reduction reuses x's memory."""
        geo, plan = self.geo, self.schedule
        self.sums = Accumulators(self.groups, self.step, self.decoder.operand, plan.tile_m // STEP_TOKENS)
        pool = b.shared_pool()
        self.tokens = pool.alloc((2, geo.tokens.words(plan.tile_m)), "uint32", align=128)
        pool.move_base_to(0)
        self.slices = pool.alloc((plan.split_k, plan.tile_m, geo.pitch), self.sums.dtype, align=128)
        pool.commit()
        self.ring = b.local(plan.stages * self.groups.bits, "uint32")
        self.words = b.local(self.groups.bits, "uint32")
        # One more slot holds the tile being multiplied while its own slot is refilled.
        types = (array_dtype(self.args.scales), array_dtype(self.args.zeros))
        self.group_ring = GroupRegisters(self.groups, self.step, self.lane, types, plan.stages)
        self.group_now = GroupRegisters(self.groups, self.step, self.lane, types)

    # ---- weights --------------------------------------------------------------------
    def _tile(self, position: Expr) -> Expr:
        """Return the K tile at a position of this thread's slice."""
        return position * self.schedule.split_k + self.slice

    def _load(self, slot: int, position: Expr) -> None:
        """Emit the loads of a tile's words, scales and zero points, unless it lies beyond K."""
        tile = b.bind(self._tile(position))
        with b.when(tile < self.args.k_tiles):
            at = slot * self.groups.bits
            for offset, width in load_order(self.groups.bits):
                source = self.args.words.ptr_to([self.row_tile, tile, offset + self.owner * width])
                b.ptx(LOADS[width], *(self.ring[at + i] for i in range(width)), source)
                at += width
            self.group_ring.fetch(slot, lambda *where: self._read_group(tile, *where))

    def _read_group(self, tile: Expr, name: str, granule: int, part: int, row: Expr) -> Expr:
        """Return one scale or zero point of a K tile."""
        array = getattr(self.args, name)
        column = self.first_row + self.row_warp * 16 + row
        group = self.groups.row(tile, granule)
        if name == "zeros" and self.gemm.zero == "float":
            return array[group, part, column]
        return array[group, column]

    # ---- tokens ---------------------------------------------------------------------
    def _copy_tokens(self, chunk: Expr) -> None:
        """Emit the copy of x's chunk ``chunk`` of K into its buffer; zeros beyond x."""
        tile, chunks = self.geo.tokens, self.geo.chunks
        per_chunk = CHUNK_BYTES // self.step.element_bytes
        buffer, x = chunk % 2, self.args.x
        pieces = self.token_count * chunks
        with b.loop(b.bind((pieces + self.geo.threads - 1) // self.geo.threads)) as turn:
            piece = b.bind(turn * self.geo.threads + self.thread)
            token, at = b.bind(piece // chunks), b.bind(piece % chunks)
            column = b.bind((chunk * chunks + at) * per_chunk)
            valid = b.bind(column < self.args.k_x)
            with b.when(token < self.token_count):
                source = x.ptr_to([self.first_token + token, T.if_then_else(valid, column, 0)])
                self.copier.chunk(self.tokens.ptr_to([buffer, tile.word(token, at)]), source, valid)
        self.copier.commit()

    def _advance(self, chunk: Expr) -> None:
        """Wait for a chunk of x, and start the copy of the next one into the other buffer."""
        self.copier.wait(0)
        b.block_sync()
        per_chunk = self.geo.slots * self.schedule.split_k
        with b.when((chunk + 1) * per_chunk < self.args.k_tiles):
            self._copy_tokens(b.bind(chunk + 1))

    # ---- products -------------------------------------------------------------------
    def _consume(self, multiplier: TileMultiplier, slot: int, position: Expr, chunk: Expr) -> None:
        """Refill the slot, then decode and multiply what it held."""
        bits = self.groups.bits
        for i in range(bits):
            b.store(self.words, self.ring[slot * bits + i], i)
        self.group_now.take(self.group_ring, slot)
        self._load(slot, position + self.schedule.stages)
        loader = SpanLoader(self.step.lanes, self.lane, self.geo.tokens, self.last_token)
        buffer = b.bind(chunk % 2)
        first = b.bind((slot % self.geo.slots * self.schedule.split_k + self.slice) * self.geo.tile_chunks)

        def load_tokens(token_block: int, span: int, out: Any) -> None:
            at = first + span * SPAN_CHUNKS
            loader.load(self.tokens, [buffer], token_block * STEP_TOKENS, at, out)

        # The tiles of a slice lie apart, so each is a group's end to it.
        multiplier.emit([self.words], [self.group_now], load_tokens, flush=True)

    # ---- reduction and output -------------------------------------------------------
    def _finish(self) -> None:
        """Add the slices and store the block's outputs."""
        self.sums.join_lanes()
        b.block_sync()
        lanes = self.step.lanes
        for block in range(self.schedule.tile_m // STEP_TOKENS):
            with b.when(lanes.is_first(self.lane)):
                for i in range(lanes.accumulators):
                    row, token = lanes.position(self.lane, i)
                    at = (self.slice, block * STEP_TOKENS + token, self.row_warp * 16 + row)
                    b.store(self.slices, self.sums.result(block, i), *at)
        b.block_sync()
        outputs = b.bind(self.token_count * self.geo.rows)
        with b.loop(b.bind((outputs + self.geo.threads - 1) // self.geo.threads)) as turn:
            output = b.bind(turn * self.geo.threads + self.thread)
            token, row = b.bind(output // self.geo.rows), b.bind(output % self.geo.rows)
            inside = T.And(output < outputs, self.first_row + row < self.args.n)
            with b.when(inside):
                self._store(token, row)

    def _store(self, token: Expr, row: Expr) -> None:
        """Store one output."""
        total = self.slices[0, token, row]
        for index in range(1, self.schedule.split_k):
            total = total + self.slices[index, token, row]
        value = b.bind(T.Cast("float32", total))
        m, n = self.first_token + token, self.first_row + row
        b.store(self.args.y, finish(self.gemm, value, m, n, self.args), m, n)
