"""Sizes of a kernel of the pipeline ``mma``, as far as they are known before it is emitted."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.grouped import find_m_tile
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, ActivationTile
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.decode import Decoder, make_decoder
from ladder.lower.gpu.grouped import count_m_tiles, raster
from ladder.lower.gpu.groups import Groups
from ladder.lower.gpu.instructions import STEP_COLUMNS, MatrixStep, select_step
from schedules.codes import table_bytes
from schedules.group_values import scale_span
from schedules.layouts import TILE
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule
from targets import TileDevice

TILE_WARPS = 4
"""Warps that share a packed tile: 16 weight rows each."""

STAGED_BLOCKS = 4
"""Blocks of eight activation rows per warp whose results pass through shared memory at a time."""


@dataclass(frozen=True)
class MmaGeometry:
    """Sizes that follow from a problem, a device and a schedule."""

    groups: Groups
    step: MatrixStep
    schedule: GpuSchedule

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
        """Ways to split warp quartets along M, given that the rest splits the rows."""
        quartets = self.schedule.warps // TILE_WARPS
        return [
            d
            for d in range(1, quartets + 1)
            if quartets % d == 0
            and self.row_tiles % (quartets // d) == 0
            and self.schedule.tile_m % (STEP_COLUMNS * d) == 0
        ]

    @property
    def m_warps(self) -> int:
        """Warp quartets along M: each decodes the same weights again, so few.

        Two row tiles per warp halve the loads of x; that is worth a repeated decode.
        """
        quartets = self.schedule.warps // TILE_WARPS
        reuse = [d for d in self._splits if self.row_tiles // (quartets // d) >= 2]
        return (reuse or self._splits)[0]

    @property
    def row_quartets(self) -> int:
        """Warp quartets along rows."""
        return self.schedule.warps // TILE_WARPS // self.m_warps

    @property
    def row_blocks(self) -> int:
        """16-row blocks of a warp, one in each of its packed tiles."""
        return self.row_tiles // self.row_quartets

    @property
    def warp_m(self) -> int:
        """Activation rows of a warp."""
        return self.schedule.tile_m // self.m_warps

    @property
    def m_blocks(self) -> int:
        """Blocks of eight activation rows of a warp."""
        return self.warp_m // STEP_COLUMNS

    # ---- stages ---------------------------------------------------------------------
    @property
    def stage_tiles(self) -> int:
        """Packed tiles along K in a stage."""
        return self.schedule.tile_k // TILE

    @property
    def tile_chunks(self) -> int:
        """16-byte chunks per activation row of one packed tile."""
        return TILE * self.step.element_bytes // CHUNK_BYTES

    @property
    def x_tile(self) -> ActivationTile:
        """Layout of a stage of x."""
        return ActivationTile(self.tile_chunks * self.stage_tiles)

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

    # ---- results --------------------------------------------------------------------
    @property
    def staged_blocks(self) -> int:
        """Blocks of eight activation rows per warp that pass through shared memory at a time."""
        return next(n for n in range(min(STAGED_BLOCKS, self.m_blocks), 0, -1) if self.m_blocks % n == 0)

    @property
    def staged_m(self) -> int:
        """Activation rows of the block that pass at a time."""
        return self.staged_blocks * STEP_COLUMNS * self.m_warps

    @property
    def pitch(self) -> int:
        """Words between staged activation rows; 4 more than the rows avoids bank conflicts."""
        return self.schedule.tile_n + 4

    @property
    def table_bytes(self) -> int:
        """Bytes of the decode table."""
        return table_bytes(self.groups.gemm)


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted."""

    gemm: Gemm
    schedule: GpuSchedule
    step: MatrixStep
    groups: Groups
    geo: MmaGeometry
    decoder: Decoder


def choose_spec(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Spec:
    """Return the sizes and the decoder of a kernel.

    Raises ScheduleError if the schedule does not fit the problem or the device.
    """
    check_legal(gemm, device, schedule)
    step, groups = select_step(device, gemm.activation), Groups(gemm, schedule.placement)
    geo = MmaGeometry(groups, step, schedule)
    return Spec(gemm, schedule, step, groups, geo, make_decoder(gemm, device, table=geo.table_bytes))


@dataclass(frozen=True)
class Place:
    """Where a thread works.

    args: The arguments as the product of this block's activation rows sees them.
    thread, lane: The thread in its block, and in its warp.
    row_tile, first_m: First packed tile along N, and first activation row, of the block.
    exists: Whether there are such activation rows.
    row_warp, quartet, m_warp: The warp's place in a packed tile, and its quartet's along rows and along M.
    owner: Whose packed words the lane takes.
    """

    args: Arguments
    thread: Expr
    lane: Expr
    row_tile: Expr
    first_m: Expr
    exists: Expr
    row_warp: Expr
    quartet: Expr
    m_warp: Expr
    owner: Expr


def find_place(spec: Spec, args: Arguments, overlap: Overlap) -> Place:
    """Emit which tile this block and which part of it this thread works on."""
    geo, schedule = spec.geo, spec.schedule
    rows = (args.n_tiles + geo.row_tiles - 1) // geo.row_tiles
    columns = count_m_tiles(args, schedule.tile_m)
    b.device(1)
    (block,) = b.block_index([rows * columns])
    thread = b.thread_index(geo.threads)
    row, column = raster(block, rows, columns, schedule.raster)
    row_tile = b.keep(row * geo.row_tiles)
    warp = b.bind(thread // 32)
    lane = b.bind(thread % 32)
    found = find_m_tile(args, b.keep(column), schedule.tile_m, lane, overlap)
    first_m = b.keep(found.first)
    row_warp = b.bind(warp % TILE_WARPS)
    quartet = b.bind(warp // TILE_WARPS % geo.row_quartets)
    m_warp = b.bind(warp // TILE_WARPS // geo.row_quartets)
    row, column = spec.step.lanes.operand(lane)
    owner = b.bind(row_warp * 32 + row * 4 + column)
    return Place(
        found.args, thread, lane, row_tile, first_m, found.exists, row_warp, quartet, m_warp, owner
    )  # fmt: skip
