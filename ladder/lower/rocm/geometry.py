"""How the waves of an AMD block share its tile, and what its LDS holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS, ActivationTile
from ladder.lower.gpu.groups import Groups
from ladder.lower.rocm.steps import RUN, WaveStep
from schedules import waves
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, check
from targets import TileDevice

HALF_WAVE_CHUNKS = 32
"""Chunks whose words 32 lanes, all that a pass of a 4-byte write serves, put into LDS at once."""


@dataclass(frozen=True)
class WaveTile(ActivationTile):
    """A tile of x whose chunks are written word by word, as `gemm_activations` transposes them.

    The lanes of a pass write the same chunk of as many spans of four as they have: of some rows, which
    the swizzle tells apart, or of one long row, of which it must tell the spans apart.
    """

    def place(self, row: Any, chunk: Any) -> Any:
        if self.chunks == 4:
            return super().place(row, chunk)
        rows = max(1, HALF_WAVE_CHUNKS // self.chunks)
        return row * self.chunks + (chunk ^ row % 8 ^ chunk // 8 * rows % 4)


@dataclass(frozen=True)
class WaveGeometry:
    """Sizes that follow from a problem, a device and a schedule of `schedules.footprint.WAVES`."""

    groups: Groups
    step: WaveStep
    device: TileDevice
    schedule: GpuSchedule

    def __post_init__(self) -> None:
        s = self.schedule
        check(s.stages == 2, f"x has two stages in LDS, got stages={s.stages}")
        check(
            bool(waves.divisions(s)),
            f"{s.warps} waves, {s.split_k} slices of K, do not divide a tile of {s.tile_m}"
            f" x {waves.tile_rows(s)}",
        )
        check(
            self.shared_bytes <= self.device.shared_per_block,
            f"{self.shared_bytes} bytes of LDS exceed the {self.device.shared_per_block} of"
            f" {self.device.name}; use smaller tiles",
        )

    # ---- division of labour ---------------------------------------------------------
    @property
    def threads(self) -> int:
        """Threads of a block."""
        return waves.block_lanes(self.schedule)

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return waves.tile_rows(self.schedule)

    @property
    def row_waves(self) -> int:
        """Waves along rows."""
        return waves.division(self.schedule).row_waves

    @property
    def row_blocks(self) -> int:
        """Steps along rows of a wave."""
        return self.rows // waves.STEP_ROWS // self.row_waves

    @property
    def wave_m(self) -> int:
        """Activation rows of a wave."""
        return self.schedule.tile_m // waves.division(self.schedule).m_waves

    @property
    def m_blocks(self) -> int:
        """Steps along M of a wave."""
        return self.wave_m // self.step.columns

    # ---- stages ---------------------------------------------------------------------
    @property
    def slice_tiles(self) -> int:
        """Packed tiles along K of a wave in a stage."""
        return self.schedule.tile_k // TILE

    @property
    def stage_tiles(self) -> int:
        """Packed tiles along K in a stage: those of all slices."""
        return self.slice_tiles * self.schedule.split_k

    @property
    def tile_chunks(self) -> int:
        """16-byte chunks per activation row of one packed tile."""
        return TILE * self.step.element_bytes // CHUNK_BYTES

    @property
    def x_tile(self) -> WaveTile:
        """Layout of a stage of x."""
        return WaveTile(self.tile_chunks * self.stage_tiles)

    @property
    def stage_chunks(self) -> int:
        """Chunks of a stage."""
        return self.schedule.tile_m * self.tile_chunks * self.stage_tiles

    @property
    def pieces(self) -> int:
        """Chunks of a stage that a thread copies, some of them perhaps beyond the tile."""
        return -(-self.stage_chunks // self.threads)

    @property
    def zeros(self) -> int:
        """The first word of LDS of zeros, which columns read of other columns' groups."""
        return 2 * self.stage_chunks * CHUNK_WORDS

    def zeros_beside(self, chunk: int) -> int:
        """Return the first of four words of zeros in the half of the banks that has no chunk of these four.

        chunk: The first of four chunks of a row that lanes of other columns read at the same time.
        """
        return self.zeros + (1 - chunk // 4 % 2) * (waves.ZERO_WORDS - CHUNK_WORDS)

    def column_sum(self, period: Any, slice_: Any, column: Any) -> Any:
        """Return the word of LDS of a column's sum of x; those of two periods are kept."""
        return (
            self.zeros
            + waves.ZERO_WORDS
            + (period % 2 * self.schedule.split_k + slice_) * waves.SLICE_SUMS
            + column
        )

    # ---- results --------------------------------------------------------------------
    @property
    def joins(self) -> bool:
        """Whether sums of several waves or lanes are added up through LDS."""
        return waves.joins_waves(self.schedule)

    @property
    def parts(self) -> int:
        """Partial sums of an output in LDS."""
        return waves.parts(self.schedule)

    def sum_word(self, part: Any, m: Any, row: Any) -> Any:
        """Return the word of a partial sum; of a multiple of four rows, of those that follow it too.

        The swizzle spreads the runs of four rows of neighbouring activation rows over the banks.
        """
        run = row // RUN ^ m % 8
        return part * waves.part_words(self.schedule) + m * self.rows + run * RUN + row % RUN

    @property
    def shared_bytes(self) -> int:
        """LDS of a block; partial sums reuse that of x."""
        return waves.lds_bytes(self.groups.gemm, self.schedule)
