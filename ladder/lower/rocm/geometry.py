"""How the waves of an AMD block share its tile, and what its LDS holds."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.lower.gpu.groups import Groups
from ladder.lower.gpu.token_tile import CHUNK_BYTES, CHUNK_WORDS, TokenTile
from ladder.lower.rocm.steps import WaveStep
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, check
from schedules.waves import STEP_ROWS, WAVE, Division, division, divisions
from targets import TileDevice


@dataclass(frozen=True)
class Geometry:
    """Sizes that follow from a problem, a device and an ``"mfma"`` schedule."""

    groups: Groups
    step: WaveStep
    device: TileDevice
    schedule: GpuSchedule

    def __post_init__(self) -> None:
        plan = self.schedule
        check(plan.tile_m % self.step.tokens == 0, f"mfma takes tokens by {self.step.tokens}")
        check(
            bool(divisions(plan, self.step.tokens)),
            f"{plan.warps} waves do not divide a tile of {plan.tile_m} tokens x {plan.tile_n} rows",
        )
        check(
            self.shared_words * 4 <= self.device.shared_per_block,
            f"{self.shared_words * 4} bytes of LDS exceed the {self.device.shared_per_block} of"
            f" {self.device.name}; use fewer stages or smaller tiles",
        )

    # ---- division of labour ---------------------------------------------------------
    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.schedule.warps * WAVE

    @property
    def row_tiles(self) -> int:
        """Packed tiles along N in a block."""
        return self.schedule.tile_n // TILE

    @property
    def _division(self) -> Division:
        return division(self.schedule, self.step.tokens)

    @property
    def token_waves(self) -> int:
        """Waves along tokens: each decodes the same weights again."""
        return self._division.token_waves

    @property
    def row_waves(self) -> int:
        """Waves along rows: each reads x again."""
        return self._division.row_waves

    @property
    def row_blocks(self) -> int:
        """32-row blocks of a wave."""
        return self.schedule.tile_n // STEP_ROWS // self.row_waves

    @property
    def warp_tokens(self) -> int:
        """Tokens of a wave."""
        return self.schedule.tile_m // self.token_waves

    @property
    def token_blocks(self) -> int:
        """Steps along tokens of a wave."""
        return self.warp_tokens // self.step.tokens

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
    def tokens(self) -> TokenTile:
        """Layout of a stage of x."""
        return TokenTile(self.tile_chunks * self.stage_tiles)

    @property
    def pieces(self) -> int:
        """Chunks of a stage that a thread copies, some of them perhaps beyond the tile."""
        return -(-self.stage_chunks // self.threads)

    @property
    def stage_chunks(self) -> int:
        """Chunks of a stage."""
        return self.schedule.tile_m * self.tile_chunks * self.stage_tiles

    @property
    def shared_words(self) -> int:
        """Words of LDS of a block."""
        return self.schedule.stages * self.stage_chunks * CHUNK_WORDS
