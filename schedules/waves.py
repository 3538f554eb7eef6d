"""How AMD blocks share their tile among waves of 64 lanes, and what that takes.

Used by the emitters (`ladder.lower.rocm`), by legality and by cost models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from schedules.layouts import TILE, lane_of, packed_group
from schedules.schedule import GpuSchedule
from tile_types import get_type

WAVE = 64
"""Lanes of a wave."""

STEP_ROWS = 32
"""Weight rows of a wave's step: those of which two NVIDIA warps hold packed words."""

STEP_COLUMNS = 16
"""Activation rows of an MFMA step."""

BANKS = 32
"""Banks of LDS, four bytes each."""

SPARE_REGISTERS = 40
"""Registers for addresses and values on their way, beside those that `wave_registers` counts (measured)."""

GRANULE_REGISTERS = 120
"""The same where several scale groups of a tile end on accumulators: products of many are in flight."""

MOST_REGISTERS = 252
"""Registers of a lane up to which no kernel was seen to spill, by estimate; two waves then share a SIMD."""


def narrow(schedule: GpuSchedule) -> bool:
    """Whether a block has as many rows as the waves of a slice of K take, whatever its ``tile_n``."""
    return schedule.pipeline == "dot" or schedule.warp_rows >= STEP_ROWS


def tile_rows(schedule: GpuSchedule) -> int:
    """Return the weight rows of a block."""
    waves = schedule.warps // schedule.split_k
    return schedule.warp_rows * waves if narrow(schedule) else schedule.tile_n


STEPS: Mapping[str, tuple[int, int]] = {
    "mfma": (STEP_ROWS, STEP_COLUMNS),
    "mfma32": (2 * STEP_ROWS, 2 * STEP_COLUMNS),
    "dot": (STEP_ROWS, 1),
}
"""Rows and activation rows of a pipeline's step."""


def step_rows(schedule: GpuSchedule) -> int:
    """Return the rows of a step."""
    return STEPS[schedule.pipeline][0]


def step_columns(schedule: GpuSchedule) -> int:
    """Return the activation rows of a step."""
    return STEPS[schedule.pipeline][1]


@dataclass(frozen=True)
class Division:
    """The division of a block's tile among the waves of one slice of K.

    row_waves, m_waves: Waves along weight rows and along activation rows: each of the latter decodes the same
        weights again, each of the former reads x again.
    """

    row_waves: int
    m_waves: int


def divisions(schedule: GpuSchedule) -> list[Division]:
    """Return every even division of a tile; none if waves do not fit."""
    waves, rest = divmod(schedule.warps, schedule.split_k)
    most = 1 if schedule.pipeline == "dot" else waves
    return [
        Division(waves // split, split)
        for split in range(1, most + 1)
        if rest == 0
        and waves % split == 0
        and schedule.tile_m % (step_columns(schedule) * split) == 0
        and tile_rows(schedule) % (step_rows(schedule) * (waves // split)) == 0
    ]


def division(schedule: GpuSchedule) -> Division:
    """Return the division in which a wave's tile is as square as it can be, rather longer along M.

    Raises ValueError if the waves divide the tile in no way.
    """
    found = divisions(schedule)
    if not found:
        tile = f"{schedule.tile_m} tokens x {tile_rows(schedule)} rows"
        raise ValueError(
            f"{schedule.warps} waves do not divide a tile of {tile} in {schedule.split_k} slices of K"
        )

    def excess(each: Division) -> tuple[int, int]:
        wave = schedule.tile_m // each.m_waves + tile_rows(schedule) // each.row_waves
        return wave, each.m_waves

    return min(found, key=excess)


def row_blocks(schedule: GpuSchedule) -> int:
    """Return the 32-row blocks of a wave."""
    return tile_rows(schedule) // STEP_ROWS // division(schedule).row_waves


def joins_waves(schedule: GpuSchedule) -> bool:
    """Whether sums of several waves or lanes are added up through LDS."""
    return schedule.pipeline == "dot" or schedule.split_k > 1


def parts(schedule: GpuSchedule) -> int:
    """Return the partial sums of an output within a block: dot products leave four in a wave."""
    return schedule.split_k * (4 if schedule.pipeline == "dot" else 1)


def stage_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of LDS of a stage of x, ``tile_k`` for each slice; weights go to registers."""
    return schedule.tile_m * schedule.tile_k * schedule.split_k * lane_of(gemm.activation) // 8


def leaves_offsets(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether operands are raw numbers, of which gain and offset are left to the sums.

    That takes sums of x, for which matrix cores have time where M is small. It spares bfloat16 its
    way through float32; float16 would gain little, by subnormal operands.
    """
    few = schedule.pipeline == "mfma" and schedule.split_k > 1 and schedule.placement == "accumulator"
    return few and gemm.activation == "bfloat16" and gemm.zero == "none"


def part_words(schedule: GpuSchedule) -> int:
    """Return the words between partial sums of the same output, a quarter of the banks beyond a multiple.

    Dot products leave eight rows in eight lanes, the next eight 16 rows on: those of another part fill
    the banks between them.
    """
    return schedule.tile_m * tile_rows(schedule) + BANKS // 4


def lds_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the LDS of a block; partial sums reuse that of x."""
    sums = 4 * parts(schedule) * part_words(schedule)
    return max(schedule.stages * stage_bytes(gemm, schedule), sums if joins_waves(schedule) else 0)


def wave_registers(gemm: Gemm, schedule: GpuSchedule, *, promoted: bool) -> int:
    """Estimate the registers of a lane: sums, operands, words of two stages, pieces of x on their way.

    ``promoted``: whether partial sums move to a second set.
    """
    lanes = schedule.warps * WAVE
    blocks, tiles = row_blocks(schedule), schedule.tile_k // TILE
    tokens = schedule.tile_m // division(schedule).m_waves
    held = 2 * tokens if schedule.pipeline == "dot" else STEP_ROWS * tokens // WAVE
    sums = blocks * held * (1 + promoted)
    operands = 8 * blocks + 4 * (tokens // step_columns(schedule))
    words = 2 * get_type(gemm.weight).elem_bits * blocks * tiles
    pieces = -(-stage_bytes(gemm, schedule) // 16 // lanes) * 4
    granules = max(1, TILE // packed_group(gemm.group_size, gemm.k)) if gemm.group_size < gemm.k else 1
    rows = 4 if promoted and schedule.pipeline != "dot" else 2
    groups = 2 * blocks * tiles * rows * granules if gemm.scale else 0
    many = promoted and granules > 1 and schedule.pipeline != "dot"
    ends = GRANULE_REGISTERS if many and gemm.scale else 0
    return sums + operands + words + pieces + groups + ends + SPARE_REGISTERS
