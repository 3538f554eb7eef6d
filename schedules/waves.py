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


def tile_rows(schedule: GpuSchedule) -> int:
    """Return the weight rows of a block: ``tile_n``; of ``"dot"``, those of a slice of K's waves."""
    if schedule.pipeline == "dot":
        return schedule.warp_rows * (schedule.warps // schedule.split_k)
    return schedule.tile_n


def step_tokens(schedule: GpuSchedule) -> int:
    """Return the tokens of a step."""
    return 1 if schedule.pipeline == "dot" else MFMA_TOKENS


def splits(schedule: GpuSchedule) -> list[int]:
    """Return the numbers of waves along tokens with which tokens and rows of a slice of K divide evenly."""
    waves, rest = divmod(schedule.warps, schedule.split_k)
    return [
        d
        for d in range(1, waves + 1)
        if rest == 0
        and waves % d == 0
        and schedule.tile_m % (step_tokens(schedule) * d) == 0
        and tile_rows(schedule) % (STEP_ROWS * (waves // d)) == 0
        and (schedule.pipeline != "dot" or d == 1)
    ]


def token_waves(schedule: GpuSchedule) -> int:
    """Return the waves along tokens.

    Each of them decodes the same weights, each row wave reads the same x: a wave's tile is as square as
    it can be, rather longer along tokens.
    """
    waves = schedule.warps // schedule.split_k
    return min(splits(schedule), key=lambda d: (schedule.tile_m // d + tile_rows(schedule) * d // waves, d))


def row_waves(schedule: GpuSchedule) -> int:
    """Return the waves along rows."""
    return schedule.warps // schedule.split_k // token_waves(schedule)


def row_blocks(schedule: GpuSchedule) -> int:
    """Return the 32-row blocks of a wave."""
    return tile_rows(schedule) // STEP_ROWS // row_waves(schedule)


def joins_waves(schedule: GpuSchedule) -> bool:
    """Whether sums of several waves or lanes are added up through LDS."""
    return schedule.pipeline == "dot" or schedule.split_k > 1


def parts(schedule: GpuSchedule) -> int:
    """Return the partial sums of an output within a block: dot products leave four in a wave."""
    return schedule.split_k * (4 if schedule.pipeline == "dot" else 1)


def stage_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of LDS of a stage of x, ``tile_k`` for each slice; weights go to registers."""
    return schedule.tile_m * schedule.tile_k * schedule.split_k * lane_of(gemm.activation) // 8


def lds_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the LDS of a block; partial sums reuse that of x."""
    sums = 4 * parts(schedule) * schedule.tile_m * tile_rows(schedule) if joins_waves(schedule) else 0
    return max(schedule.stages * stage_bytes(gemm, schedule), sums)


def weight_bytes_ahead(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of packed words that a block has on their way while it works on a stage."""
    elements = tile_rows(schedule) * schedule.tile_k * schedule.split_k
    return elements * get_type(gemm.weight).elem_bits // 8


def wave_registers(gemm: Gemm, schedule: GpuSchedule, *, promoted: bool) -> int:
    """Estimate the registers of a lane: sums, operands, words of two stages, pieces of x on their way.

    ``promoted``: whether partial sums move to a second set.
    """
    lanes = schedule.warps * WAVE
    blocks, tiles = row_blocks(schedule), schedule.tile_k // TILE
    tokens = schedule.tile_m // token_waves(schedule)
    held = 2 * tokens if schedule.pipeline == "dot" else STEP_ROWS * tokens // WAVE
    sums = blocks * held * (1 + promoted)
    words = 2 * get_type(gemm.weight).elem_bits * blocks * tiles
    pieces = -(-stage_bytes(gemm, schedule) // 16 // lanes) * 4
    rows = 8 if promoted and schedule.pipeline == "mfma" else 2
    groups = 2 * blocks * tiles * rows if gemm.scale else 0
    rest = SPARE_REGISTERS + (BFLOAT_REGISTERS if gemm.activation == "bfloat16" else 0)
    return sums + 8 * blocks + words + pieces + groups + rest
