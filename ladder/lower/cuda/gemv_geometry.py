"""Sizes and decoder of a gemv kernel, chosen before any of it is emitted."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ladder.ir.gemm import Gemm
from ladder.lower.cuda.grouped import FOUND_BYTES, shares_search
from ladder.lower.gpu.accumulators import SUM_TILES
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS
from ladder.lower.gpu.decode import Decoder, make_decoder
from ladder.lower.gpu.groups import Correction, Groups, left_by
from ladder.lower.gpu.instructions import STEP_COLUMNS, MatrixStep, select_step
from ladder.lower.gpu.proven import table_sizes
from ladder.lower.gpu.tile_multiplier import CORE, widened_step
from schedules.footprint import X_BUFFERS, X_SUMS, block_rows, block_threads
from schedules.gemv_buffers import buffer_chunks, gemv_blocks, gemv_run, unit_rounds
from schedules.group_values import shared_value_bytes
from schedules.layouts import TILE
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule, check
from targets import TileDevice
from tile_types.errors import ScheduleError

STRIP = 16
"""Weight rows of a fragment."""

LEAST_COPY = 1 << 15
"""Bytes of x below which a buffer is not worth its barrier."""


class Slices:
    """How the warps of a block divide rows and K among them: for pipelines whose warps are slices of K."""

    schedule: GpuSchedule
    groups: Groups

    @property
    def halves(self) -> int:
        """Matrices that lie one after the other in the weight, and of which a warp has as many rows."""
        return 2 if self.groups.gemm.gate else 1

    @property
    def own_rows(self) -> int:
        """Neighbouring weight rows of a warp."""
        return self.schedule.warp_rows // self.halves

    @property
    def own_blocks(self) -> int:
        """Fragments of neighbouring weight rows of a warp."""
        return self.own_rows // STRIP

    @property
    def columns(self) -> int:
        """Columns of the output of a block."""
        return self.rows // self.halves

    @property
    def tile_strips(self) -> int:
        """Warps that share a packed tile."""
        return TILE // self.own_rows

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return block_threads(self.schedule)

    @property
    def row_warps(self) -> int:
        """Warps along the rows."""
        return self.schedule.warps // self.schedule.split_k

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return block_rows(self.schedule)

    @property
    def row_blocks(self) -> int:
        """Fragments of a warp along the rows."""
        return self.schedule.warp_rows // STRIP


@dataclass(frozen=True)
class GemvGeometry(Slices):
    """Sizes that follow from a problem, a device, a schedule and the bytes of tables beside x.

    Scales and zero points that lanes hand out have memory of their own beside these.
    """

    groups: Groups
    step: MatrixStep
    device: TileDevice
    schedule: GpuSchedule
    table_bytes: int = 0

    def __post_init__(self) -> None:
        s = self.schedule
        check(
            self.unit_chunks * s.tile_m <= self.buffer_chunks,
            f"{s.tile_m} rows of x, {s.split_k} slices of K do not fit a buffer of x of"
            f" {self.buffer_chunks * CHUNK_BYTES} bytes; use a smaller split_k or tile_m",
        )
        check(
            self.shared_bytes <= self.device.shared_per_block,
            f"{self.shared_bytes} bytes of shared memory exceed the {self.device.shared_per_block} of"
            f" {self.device.name}; use a smaller split_k or tile_m",
        )

    @property
    def held_bytes(self) -> int:
        """Shared memory of a block that holds no x."""
        return self.table_bytes + shared_value_bytes(self.groups.gemm, self.schedule)

    @property
    def resident_blocks(self) -> int:
        """Blocks per multiprocessor that registers and shared memory are meant for."""
        return gemv_blocks(self.groups.gemm, self.device, self.schedule, self.held_bytes)

    @property
    def run(self) -> int:
        """Neighbouring tiles that a slice takes at once: a divisor of ``stages``."""
        return gemv_run(self.schedule, self.buffer_chunks, self.tile_chunks)

    @property
    def round_tiles(self) -> int:
        """Tiles of K that one run of every slice covers."""
        return self.run * self.schedule.split_k

    @property
    def iteration_tiles(self) -> int:
        """Tiles of K that are in flight together."""
        return self.schedule.stages * self.schedule.split_k

    @property
    def tile_chunks(self) -> int:
        """16-byte chunks per activation row of one packed tile."""
        return TILE * self.step.element_bytes // CHUNK_BYTES

    @property
    def unit_rounds(self) -> int:
        """Rounds by which buffers of x grow, so that the swizzle permutes whole rows of eight chunks."""
        return unit_rounds(self.schedule, self.run, self.tile_chunks)

    @property
    def unit_chunks(self) -> int:
        """16-byte chunks per activation row of a unit of rounds."""
        return self.unit_rounds * self.round_tiles * self.tile_chunks

    @property
    def buffer_chunks(self) -> int:
        """16-byte chunks of one of the `X_BUFFERS` of x: as many as resident blocks leave room for."""
        return buffer_chunks(self.device, self.resident_blocks, self.held_bytes)

    @property
    def least_units(self) -> int:
        """Units of rounds of one activation row that are copied together at least."""
        return LEAST_COPY // (self.unit_chunks * CHUNK_BYTES)

    @property
    def group_tiles(self) -> int:
        """Tiles of a run that share scales and zero points."""
        return gcd(self.run, self.groups.span)

    @property
    def flush_tiles(self) -> int:
        """Tiles of a run after which partial sums are flushed, where they are at all."""
        return gcd(
            self.group_tiles, self.groups.tiles, SUM_TILES, self.step.promote // TILE, self.groups.token_tiles
        )

    @property
    def pitch(self) -> int:
        """Words between activation rows of the reduction buffer; 4 more avoid bank conflicts."""
        return self.rows + 4

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block."""
        x = X_BUFFERS * self.buffer_chunks * CHUNK_WORDS
        sums = self.schedule.split_k * self.schedule.tile_m * self.pitch + self.rows
        return max(self.held_bytes + 4 * x, 4 * sums)


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
