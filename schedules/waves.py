"""How AMD blocks share their tile among waves of 64 lanes, and what that takes.

Used by the emitters (`ladder.lower.rocm`), by legality and by cost models.
"""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from schedules.layouts import TILE, lane_of
from schedules.schedule import GpuSchedule
from tile_types import get_type

WAVE = 64
"""Lanes of a wave."""

STEP_ROWS = 32
"""Weight rows of a wave's step: those of which two NVIDIA warps hold packed words."""

MFMA_TOKENS = 16
"""Tokens of an MFMA step."""

SPARE_REGISTERS = 60
"""Registers for addresses and values on their way, beside those that `wave_registers` counts (measured)."""

BFLOAT_REGISTERS = 32
"""The same for bfloat16 operands, which are made of float32 values (measured)."""


def splits(schedule: GpuSchedule) -> list[int]:
    """Return the numbers of waves along tokens with which tokens and rows divide evenly."""
    return [
        d
        for d in range(1, schedule.warps + 1)
        if schedule.warps % d == 0
        and schedule.tile_m % (MFMA_TOKENS * d) == 0
        and schedule.tile_n % (STEP_ROWS * (schedule.warps // d)) == 0
    ]


def token_waves(schedule: GpuSchedule) -> int:
    """Return the waves along tokens of an ``"mfma"`` block.

    Each of them decodes the same weights, each row wave reads the same x: a wave's tile is as square as
    it can be, rather longer along tokens.
    """
    return min(
        splits(schedule), key=lambda d: (schedule.tile_m // d + schedule.tile_n * d // schedule.warps, d)
    )


def row_waves(schedule: GpuSchedule) -> int:
    """Return the waves along rows of an ``"mfma"`` block."""
    return schedule.warps // token_waves(schedule)


def row_blocks(schedule: GpuSchedule) -> int:
    """Return the 32-row blocks of a wave of an ``"mfma"`` block."""
    return schedule.tile_n // STEP_ROWS // row_waves(schedule)


def stage_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of LDS of a stage of x; weights go to registers."""
    return schedule.tile_m * schedule.tile_k * lane_of(gemm.activation) // 8


def lds_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the LDS of an ``"mfma"`` block."""
    return schedule.stages * stage_bytes(gemm, schedule)


def wave_registers(gemm: Gemm, schedule: GpuSchedule, *, promoted: bool) -> int:
    """Estimate the registers of a lane: sums, operands, words of two stages, pieces of x on their way.

    ``promoted``: whether partial sums move to a second set.
    """
    lanes = schedule.warps * WAVE
    sums = schedule.tile_m * schedule.tile_n // lanes * (1 + promoted)
    blocks, tiles = row_blocks(schedule), schedule.tile_k // TILE
    words = 2 * get_type(gemm.weight).elem_bits * blocks * tiles
    pieces = stage_bytes(gemm, schedule) // 4 // lanes
    groups = 2 * blocks * tiles * (8 if promoted else 2) if gemm.scale else 0
    rest = SPARE_REGISTERS + (BFLOAT_REGISTERS if gemm.activation == "bfloat16" else 0)
    return sums + 8 * blocks + words + pieces + groups + rest
