"""Choose the decoder and the sizes of a gemv kernel before any of it is emitted."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from ladder.lower.cuda.gemv_geometry import STRIP, GemvGeometry
from ladder.lower.cuda.grouped import FOUND_BYTES, shares_search
from ladder.lower.gpu.decode import Decoder, make_decoder
from ladder.lower.gpu.groups import Correction, Groups, left_by
from ladder.lower.gpu.instructions import STEP_COLUMNS, MatrixStep, select_step
from ladder.lower.gpu.proven import table_sizes
from ladder.lower.gpu.tile_multiplier import CORE, widened_step
from schedules.footprint import X_BUFFERS, X_SUMS
from schedules.layouts import TILE
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule
from targets import TileDevice
from tile_types.errors import ScheduleError

SUM_CLOCKS = 24
"""Clocks of the four products of a tile that sum eight activation rows (measured: 6 each on an H200)."""

SHARED_SUM_CLOCKS = 2
"""Clocks per tile and eight activation rows of reading sums that the block shares."""

FEWEST_THREADS = 512
"""Threads of a multiprocessor that still keep enough loads in flight."""


@dataclass(frozen=True)
class Spec:
    """Decisions about a gemv kernel before it is emitted."""

    gemm: Gemm
    schedule: GpuSchedule
    step: MatrixStep
    groups: Groups
    decoder: Decoder
    geo: GemvGeometry

    @property
    def left(self) -> Correction:
        """Corrections that decoded registers leave to the accumulators."""
        return left_by(self.decoder, self.gemm)

    @property
    def widens(self) -> bool:
        """Whether operands of x are widened to the type that weights are decoded to."""
        return bool(self.groups.core)

    @property
    def row_blocks(self) -> int:
        """Blocks of eight activation rows of a thread block."""
        return self.schedule.tile_m // STEP_COLUMNS

    @property
    def shares_sums(self) -> bool:
        """Whether the warps of a block share sums of x."""
        return shares_sums(self.gemm, self.schedule, self.step, self.groups, self.decoder)


def shares_sums(
    gemm: Gemm, schedule: GpuSchedule, step: MatrixStep, groups: Groups, decoder: Decoder
) -> bool:
    """Tell whether the warps of a block share sums of x; they must be sums over whole tiles.

    In a cluster a block has a part of K to sum, and more weight rows that need the sums. Otherwise it is
    faster that every warp sums what it multiplies: filling the table makes all warps wait (measured on an
    H200).
    """
    summed = left_by(decoder, gemm).sums_x and schedule.cluster > 1 and not groups.core
    return summed and groups.per_tile == 1 and not step.lanes.partial_lanes


def choose_spec(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, held: int = 0) -> Spec:
    """Take the decoder whose table is worth filling for a block's tiles and leaves room for x.

    held: Bytes of shared memory for what else a block keeps.
    Raises ScheduleError if the schedule fits with none of the decoders.
    """
    check_legal(gemm, device, schedule)
    tables = [0] if widened_step(gemm, device) else table_sizes(gemm)
    choices: list[tuple[float, Spec]] = []
    for room in tables:
        try:
            spec = _with_table(gemm, device, schedule, room, held)
        except ScheduleError:
            if room == tables[-1] and not choices:
                raise
            continue
        tiles = spec.geo.rows * -(-gemm.k // TILE) / TILE / schedule.cluster
        decoder = spec.decoder  # an entry of its table is written per clock
        clocks = decoder.choice.weight() * tiles + decoder.table_entries
        if not choices or spec.geo.resident_blocks * spec.geo.threads >= FEWEST_THREADS:
            choices.append((clocks, spec))
    return min(choices, key=lambda choice: choice[0])[1]


def _with_table(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, room: int, held: int) -> Spec:
    """Return the spec with a decode table of at most ``room`` bytes."""
    wide = widened_step(gemm, device)
    core = CORE if wide else ""
    step, groups = wide or select_step(device, gemm.activation), Groups(gemm, schedule.placement, core)
    clocks = SUM_CLOCKS if schedule.cluster == 1 else SHARED_SUM_CLOCKS
    sums = clocks * schedule.tile_m // STEP_COLUMNS / (schedule.warp_rows // STRIP)
    decoder = make_decoder(
        gemm, device, schedule.placement, gains=True, table=room, offset_clocks=sums, core=core
    )
    shared = 4 * X_BUFFERS * X_SUMS * shares_sums(gemm, schedule, step, groups, decoder)
    shared += FOUND_BYTES * shares_search(gemm, schedule)
    geo = GemvGeometry(groups, step, device, schedule, 4 * decoder.table_words + shared + held)
    return Spec(gemm, schedule, step, groups, decoder, geo)
