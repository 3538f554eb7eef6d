"""Sizes, index maps and decoder of a kernel of the wgmma pipeline, before any of it is emitted.

The index functions work on Python integers and on TIR expressions alike, so that
tests evaluate exactly the arithmetic that kernels use.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.decode import Decoder, make_decoder
from ladder.lower.gpu.groups import Groups
from schedules.codes import table_bytes
from schedules.footprint import (
    CHUNK_BYTES,
    RESERVED_BYTES,
    SQUEEZED,
    WARP,
    carries,
    launch_registers,
    math_registers,
    moves_registers,
    promotes,
    registers_per_thread,
    residual_registers,
    shared_bytes,
    staged_columns,
    staged_groups,
    turn_slabs,
    warpgroup_blocks,
    warpgroup_bytes,
)
from schedules.layouts import TILE
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule
from schedules.shares import shares_columns
from targets import TileDevice

ROW_BYTES = 128
"""Bytes of one row of the 128-byte swizzle (PTX ISA, "Shared memory matrix layout")."""

WARP_ROWS = 16
"""Rows of a wgmma tile whose sums one warp holds."""


@dataclass(frozen=True)
class WgmmaGeometry:
    """Sizes that follow from a problem and a schedule that is legal (`schedules.legal`).

    A *slab* is 128 bytes of one row of A: 64 elements of 16 bits or 128 of 8 bits, always
    four wgmma steps and sixteen operand registers. A *stage* holds ``tile_k`` of K. The
    math loop's *body* covers at least two slabs so that operand registers alternate
    between two sets whose numbers are known when the kernel is emitted.
    """

    gemm: Gemm
    schedule: GpuSchedule

    # ---- operands -------------------------------------------------------------------
    @property
    def groups(self) -> Groups:
        """How scales and zero points fall on packed tiles."""
        return Groups(self.gemm)

    @property
    def slab(self) -> int:
        """Elements of K in 128 bytes of A."""
        return ROW_BYTES * 8 // self.groups.lane

    @property
    def slabs(self) -> int:
        """Slabs per stage."""
        return self.schedule.tile_k // self.slab

    @property
    def body(self) -> int:
        """Slabs per iteration of the math loop."""
        return turn_slabs(self.gemm, self.schedule)

    @property
    def tiles_per_slab(self) -> int:
        """Packed 64-wide tiles along K in a slab."""
        return self.slab // TILE

    @property
    def stage_tiles(self) -> int:
        """Packed tiles along K in a stage."""
        return self.schedule.tile_k // TILE

    # ---- division of labour ---------------------------------------------------------
    @property
    def warpgroups(self) -> int:
        return self.schedule.warps // 4

    @property
    def row_tiles(self) -> int:
        """Packed tiles along N in a block's tile."""
        return self.schedule.tile_n // TILE

    @property
    def carries(self) -> bool:
        """Whether sums keep their upper bits apart, for want of registers for totals."""
        return carries(self.gemm, self.schedule)

    @property
    def m64(self) -> int:
        """Row tiles of one warpgroup."""
        return self.row_tiles // self.warpgroups

    @property
    def threads(self) -> int:
        """Threads of a block: the math warpgroups and the producer (a warpgroup where registers move).

        With stream-K a warp beside the producer announces sums that were handed over.
        """
        return self.schedule.warps * 32 + (128 if self.reallocates else 32 + 32 * self.schedule.stream_k)

    @property
    def blocks(self) -> int:
        """Blocks of a cluster: those that sum slices of K, times those that share activation rows."""
        return self.schedule.split_k * self.schedule.cluster

    @property
    def accumulators(self) -> int:
        """Accumulator registers per thread and row tile."""
        return self.schedule.tile_m // 2

    # ---- scales ---------------------------------------------------------------------
    @property
    def promotes(self) -> bool:
        """Whether partial sums move to float32 totals at group ends."""
        return promotes(self.gemm, self.schedule)

    @property
    def scale_step(self) -> int:
        """Elements of K for which scale and zero point stay the same, within a stage."""
        return math.gcd(self.groups.size, self.schedule.tile_k)

    @property
    def held_step(self) -> int:
        """Elements of K within an iteration of the math loop for which scale and zero point stay the same."""
        return math.gcd(self.groups.size, self.body * self.slab)

    @property
    def held_rows(self) -> int:
        """Rows of scales (or zero points) that a thread holds for one slab."""
        return max(1, self.slab // self.scale_step)

    @property
    def scale_rows(self) -> int:
        """Rows of scales (or zero points) per stage."""
        return staged_groups(self.gemm, self.schedule)

    @property
    def row_step(self) -> int:
        """Elements of K that a staged row of scales (or zero points) serves."""
        return self.schedule.tile_k // self.scale_rows

    @property
    def scale_bytes(self) -> int:
        """Bytes of one element of the array of scales."""
        return 2 if self.groups.lane == 16 and not self.groups.exponents else 4

    @property
    def zero_bytes(self) -> int:
        """Bytes of one zero point."""
        return self.groups.lane // 8

    # ---- shared memory --------------------------------------------------------------
    @property
    def x_bytes(self) -> int:
        """Bytes of A per stage."""
        return self.held_m * self.schedule.tile_k * self.groups.lane // 8

    @property
    def held_m(self) -> int:
        """Activation rows of a tile that a block has in its shared memory: a pair has one half each."""
        return self.schedule.tile_m // (1 + self.schedule.pair)

    @property
    def word_bytes(self) -> int:
        """Bytes of packed codes per stage."""
        return self.row_tiles * self.stage_tiles * self.groups.tile_words * 4

    @property
    def scale_stage_bytes(self) -> int:
        """Bytes of scales per stage."""
        return self.scale_rows * self.schedule.tile_n * self.scale_bytes if self.gemm.scale else 0

    @property
    def zero_stage_bytes(self) -> int:
        """Bytes of zero points per stage."""
        return self.scale_rows * self.groups.zero_parts * self.schedule.tile_n * self.zero_bytes

    @property
    def stage_bytes(self) -> int:
        """Bytes that one stage's full barrier waits for."""
        return self.x_bytes + self.word_bytes + self.scale_stage_bytes + self.zero_stage_bytes

    @property
    def chunk(self) -> int:
        """Activation rows that the epilogue stages through shared memory at a time."""
        return staged_columns(self.gemm, self.schedule)

    def store_buffers(self, device: TileDevice) -> int:
        """Return the buffers of a team's staging that tensor copies store from; 0 where threads store.

        Copies pay where the ends of tiles are a good part of the time: fp8 products that decode and scale
        nothing, on a persistent grid, whose blocks go on with a next tile; not where tiles are cut along K.
        Threads add residuals, and know where an expert's rows end. Shared memory must hold two buffers.
        """
        gemm, schedule = self.gemm, self.schedule
        plain = gemm.weight == gemm.activation and gemm.activation.startswith("fp8") and not gemm.scale
        walks = schedule.pipeline == "wgmma" and schedule.persistent
        whole = schedule.split_k == 1 and not schedule.stream_k
        if not (plain and walks and whole) or gemm.output == "float32" or gemm.experts or gemm.residual:
            return 0
        staged = self.warpgroups * self.chunk * self.pitch * 2
        return 2 if shared_bytes(gemm, schedule) + staged <= device.shared_per_block else 0

    @property
    def copied_rows(self) -> int:
        """Activation rows of one tensor copy to the output: every turn's are a multiple."""
        return math.gcd(self.chunk, self.schedule.tile_m)

    @property
    def team(self) -> int:
        """Warps that transpose their sums together, so that stores along N are longer.

        A warpgroup; each warp alone where the blocks of a cluster finish the sums of different warps.
        """
        return 1 if self.schedule.split_k > 1 and not shares_columns(self.schedule) else 4

    @property
    def pitch(self) -> int:
        """Staged elements per activation row of a team.

        +4 floats keep transposing stores free of bank conflicts; 16-bit rows are swizzled instead.
        """
        return self.team * WARP_ROWS + (4 if self.gemm.output == "float32" else 0)

    @property
    def owned_units(self) -> int:
        """Most units (sixteen rows of a warp) that one block of a cluster that splits K finishes."""
        return -(-self.schedule.warps * self.m64 // self.schedule.split_k)

    @property
    def table_bytes(self) -> int:
        """Bytes of the decode table."""
        return table_bytes(self.gemm)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block, alignment included."""
        return warpgroup_bytes(self.gemm, self.schedule)

    # ---- registers ------------------------------------------------------------------
    @property
    def reallocates(self) -> bool:
        """Whether the producer hands registers to the math warpgroups (setmaxnreg)."""
        return moves_registers(self.gemm, self.schedule)

    def resident_blocks(self, device: TileDevice) -> int:
        """Return the blocks that share a multiprocessor; ptxas is asked to leave them registers."""
        return warpgroup_blocks(self.gemm, device, self.schedule)

    def adds_early(self, device: TileDevice) -> bool:
        """Whether a math thread has registers for what the epilogue adds first, while products still run."""
        if not self.gemm.residual:
            return False
        resident = self.resident_blocks(device) * self.threads // WARP
        limit = math_registers(self.schedule.warps) if self.reallocates else launch_registers(resident)
        added = residual_registers(self.gemm, self.schedule)
        return limit - registers_per_thread(self.gemm, self.schedule) >= added + SQUEEZED

    def least_bytes(self, device: TileDevice) -> int:
        """Return the shared memory that a block takes at least, so that no more than meant lie beside it.

        Blocks of the next launch come while those of the one before still run, and fill up a multiprocessor
        while others have none: their work then takes as long as that of all that fit. A persistent grid has
        a block for each multiprocessor, and experts have blocks enough.
        """
        if self.schedule.persistent or self.gemm.experts or self.reallocates:
            return 0
        share = device.shared_per_unit // (self.resident_blocks(device) + 1)
        return share // CHUNK_BYTES * CHUNK_BYTES - RESERVED_BYTES + CHUNK_BYTES


def accumulator_row(warp: Expr, lane: Expr, index: int) -> Expr:
    """Return the row (of 64) of accumulator ``index``: D fragment of wgmma m64nN."""
    return warp * 16 + lane // 4 + (index // 2 % 2) * 8


def accumulator_m(lane: Expr, index: int) -> Expr:
    """Return the activation row (column of D) of accumulator ``index``."""
    return index // 4 * 8 + lane % 4 * 2 + index % 2


def swizzled_run(m: Expr, run: Expr, runs: int) -> Expr:
    """Return where a team stages run ``run`` of activation row ``m``: eight 16-bit outputs; in 16 bytes.

    A row has ``runs`` such runs, two or eight. Permuting them by the row lets a phase of stmatrix,
    which writes one run of eight rows, reach all banks.
    """
    return m * runs + (run ^ (m // (8 // runs) % runs))


def scaled_decoder(gemm: Gemm, device: TileDevice, room: int = 0) -> Decoder:
    """Return the decoder of a problem's operands, which leaves nothing to the finished sums.

    ``room`` is the shared memory in bytes of the table that it may have: few types have something cheaper.
    """
    decoder = make_decoder(gemm, device, table=room, gains=gemm.scale)
    return decoder if decoder.gains == (1.0, 1.0) else make_decoder(gemm, device, table=room)


def byte_decoder(gemm: Gemm, device: TileDevice, room: int = 0) -> Decoder:
    """Return the decoder of 8-bit operands; parameters as of `scaled_decoder`.

    It leaves gains to the sums, but not offsets and zero points, which would need the sums of x as well.
    """
    raw = make_decoder(gemm, device, "accumulator", table=room)
    zeros_left = gemm.zero != "none" and not raw.subtracts_zeros
    return make_decoder(gemm, device, table=room) if zeros_left or any(raw.offsets) else raw


@dataclass(frozen=True)
class Spec:
    """The problem, the device, the schedule, the sizes that follow, and how weights become operands."""

    gemm: Gemm
    device: TileDevice
    schedule: GpuSchedule
    geo: WgmmaGeometry
    decoder: Decoder

    @property
    def integer(self) -> bool:
        """Whether sums are integers; TIR types those of wgmma as untyped 32-bit registers."""
        return self.gemm.activation == "int8"

    @property
    def sums(self) -> int:
        """Accumulators of a thread."""
        return self.geo.m64 * self.geo.accumulators


def choose_spec(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, geometry: type[WgmmaGeometry] = WgmmaGeometry
) -> Spec:
    """Return the sizes, of the class ``geometry``, and the decoder of a kernel.

    Raises ScheduleError if the device lacks the instructions, or the schedule does not fit problem or device;
        names the rule.
    """
    check_legal(gemm, device, schedule)
    geo = geometry(gemm, schedule)
    choose = byte_decoder if geo.groups.lane == 8 else scaled_decoder
    return Spec(gemm, device, schedule, geo, choose(gemm, device, geo.table_bytes))


@dataclass(frozen=True)
class MathThread:
    """Its warpgroup, its place in that, its warp in the warpgroup, and the lane in the warp."""

    group: Expr
    group_thread: Expr
    warp: Expr
    lane: Expr


def find_math_thread(thread: Expr) -> MathThread:
    """Emit where a thread of the block stands among the math warpgroups."""
    group, group_thread = b.bind(thread // 128), b.bind(thread % 128)
    return MathThread(group, group_thread, b.bind(group_thread // 32), b.bind(group_thread % 32))
