"""How AMD blocks share their tile among waves, and what that takes.

Used by the emitters (`ladder.lower.rocm`), by legality and by cost models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

from ladder.ir.gemm import Gemm
from schedules.layouts import TILE, lane_of, packed_group
from schedules.schedule import GpuSchedule
from tile_types import get_type

WAVE = 64
"""Lanes of a wave of CDNA; those of RDNA have 32 (`Form.lanes`)."""

STEP_ROWS = 32
"""Weight rows of a wave's step: those of which two NVIDIA warps hold packed words."""

STEP_COLUMNS = 16
"""Activation rows of an MFMA step."""

DOT_LANES = 16
"""Lanes that hold sums of different rows where lanes multiply for themselves: two rows each."""

BANKS = 32
"""Banks of LDS, four bytes each."""

SPARE_REGISTERS = 40
"""Registers for addresses and values on their way, beside those that `wave_registers` counts (measured)."""

GRANULE_REGISTERS: Mapping[int, int] = {1: 120, 2: 32, 4: 60}
"""Parts of a step -> the same where several scale groups of a tile end on accumulators.

Products of many are in flight (compiled; of RDNA's waves fewer).
"""

DOT_GRANULE_REGISTERS = 90
"""The same of dot products of waves of 32 lanes, whatever scales multiply, and of 16-bit codes (compiled)."""

MOST_THREADS = 256
"""Threads of a block: TVM marks AMD kernels as having at most so many."""

MOST_REGISTERS = 252
"""Registers of a lane up to which no kernel was seen to spill, by estimate; two waves then share a SIMD."""


def narrow(schedule: GpuSchedule) -> bool:
    """Whether a block has as many rows as the waves of a slice of K take, whatever its ``tile_n``."""
    return is_dot(schedule) or schedule.warp_rows >= STEP_ROWS


def tile_rows(schedule: GpuSchedule) -> int:
    """Return the weight rows of a block."""
    waves = schedule.warps // schedule.split_k
    return schedule.warp_rows * waves if narrow(schedule) else schedule.tile_n


@dataclass(frozen=True)
class Form:
    """Extents of a pipeline's step.

    columns: Activation rows; there are always `STEP_ROWS` weight rows.
    lanes: Of a wave.
    parts: Threads' packed words that a lane decodes.
    """

    columns: int
    lanes: int = WAVE
    parts: int = 1

    @property
    def copies(self) -> int:
        """Lanes that decode the same word."""
        return self.lanes * self.parts // WAVE


FORMS: Mapping[str, Form] = {
    "mfma": Form(STEP_COLUMNS),
    "mfma_groups": Form(1),
    "dot": Form(1),
    "wmma": Form(STEP_COLUMNS, 32, 4),
    "wmma_split": Form(STEP_COLUMNS, 32, 2),
    "dot32": Form(1, 32, 2),
}
"""Steps by pipeline: ``wmma`` is RDNA3's, which both halves of a wave hold, ``wmma_split`` RDNA4's."""

GROUPS = "mfma_groups"
"""Pipeline of one activation row: the columns of a matrix instruction hold groups of K of it."""

GROUP_TILES = 4
"""Packed tiles along K of a column's group at most: sums of raw numbers and of x cancel in part."""

ZERO_WORDS = 20
"""Words of LDS of zeros, which columns read of the groups of other columns: the first four or the last."""

SLICE_SUMS = STEP_COLUMNS + 1
"""Words of LDS from the sums of x of a slice of K to the next: a pass writes a column of several slices."""

DOTS = ("dot", "dot32")
"""Pipelines of dot products within lanes."""

NARROW = ("mfma", "wmma", "wmma_split")
"""Pipelines whose blocks may have as many rows as their waves take, whatever ``tile_n``."""


def form(schedule: GpuSchedule) -> Form:
    """Return the extents of a schedule's step."""
    return FORMS[schedule.pipeline]


def is_dot(schedule: GpuSchedule) -> bool:
    """Whether lanes multiply for themselves."""
    return schedule.pipeline in DOTS


def block_lanes(schedule: GpuSchedule) -> int:
    """Return the threads of a block."""
    return schedule.warps * form(schedule).lanes


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
    most = 1 if is_dot(schedule) else waves
    return [
        Division(waves // split, split)
        for split in range(1, most + 1)
        if rest == 0
        and waves % split == 0
        and schedule.tile_m % (form(schedule).columns * split) == 0
        and tile_rows(schedule) % (STEP_ROWS * (waves // split)) == 0
    ]


def division(schedule: GpuSchedule) -> Division:
    """Return the division in which a wave's tile is as square as it can be, rather longer along M.

    Raises ValueError if the waves divide the tile in no way.
    """
    found = divisions(schedule)
    if not found:
        tile = f"{schedule.tile_m} activation rows x {tile_rows(schedule)} weight rows"
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
    return is_dot(schedule) or schedule.pipeline == GROUPS or schedule.split_k > 1


def column_tiles(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the packed tiles along K of which a column of a matrix instruction has x (`GROUPS`)."""
    group = packed_group(gemm.group_size, gemm.k) // TILE if gemm.group_size < gemm.k else GROUP_TILES
    return gcd(group, schedule.tile_k // TILE, GROUP_TILES)


def parts(schedule: GpuSchedule) -> int:
    """Return the partial sums of an output within a block: dot products leave one for each 16 lanes."""
    return schedule.split_k * (form(schedule).lanes // DOT_LANES if is_dot(schedule) else 1)


def stage_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the bytes of LDS of a stage of x, ``tile_k`` for each slice; weights go to registers."""
    return schedule.tile_m * schedule.tile_k * schedule.split_k * lane_of(gemm.activation) // 8


def leaves_offsets(gemm: Gemm, schedule: GpuSchedule) -> bool:
    """Whether operands are raw numbers, of which gain and offset are left to the sums.

    That takes sums of x, for which matrix cores have time where M is small; lanes take a dot product more for
    two. It spares bfloat16 its way through float32; float16 would gain little, by subnormal operands.
    """
    if schedule.pipeline == GROUPS:
        return True
    few = is_dot(schedule) or (schedule.pipeline in NARROW and schedule.split_k > 1)
    raw = few and schedule.placement == "accumulator"
    return raw and gemm.activation == "bfloat16" and gemm.zero == "none"


def part_words(schedule: GpuSchedule) -> int:
    """Return the words between partial sums of the same output, a quarter of the banks beyond a multiple.

    Dot products leave eight rows in eight lanes, the next eight 16 rows on: those of another part fill
    the banks between them.
    """
    return schedule.tile_m * tile_rows(schedule) + BANKS // 4


def lds_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the LDS of a block; partial sums reuse that of x."""
    sums = 4 * parts(schedule) * part_words(schedule)
    beside = 4 * (ZERO_WORDS + 2 * schedule.split_k * SLICE_SUMS) if schedule.pipeline == GROUPS else 0
    return max(schedule.stages * stage_bytes(gemm, schedule) + beside, sums if joins_waves(schedule) else 0)


def wave_registers(gemm: Gemm, schedule: GpuSchedule, *, promoted: bool) -> int:
    """Estimate the registers of a lane: sums, operands, words of two stages, pieces of x on their way.

    ``promoted``: whether partial sums move to a second set.
    """
    step, dots = form(schedule), is_dot(schedule)
    blocks, tiles = row_blocks(schedule), schedule.tile_k // TILE
    columns = schedule.tile_m // division(schedule).m_waves
    instruction = STEP_COLUMNS if schedule.pipeline == GROUPS else columns
    held = 2 * columns if dots else STEP_ROWS * instruction // step.lanes
    sums = blocks * held * (1 + promoted)
    operands = 8 * blocks * step.parts + 4 * step.parts * (columns // step.columns)
    words = 2 * get_type(gemm.weight).elem_bits * blocks * tiles * step.parts
    pieces = -(-stage_bytes(gemm, schedule) // 16 // block_lanes(schedule)) * 4
    granules = max(1, TILE // packed_group(gemm.group_size, gemm.k)) if gemm.group_size < gemm.k else 1
    rows = 2 if dots or not promoted else 4 * WAVE // step.lanes
    groups = 2 * blocks * tiles * rows * granules if gemm.scale else 0
    if schedule.pipeline == GROUPS:  # one set, of the group of the lane's column
        groups = blocks * rows if gemm.scale else 0
    many = promoted and granules > 1 and not dots
    ends = GRANULE_REGISTERS[step.parts] if many and gemm.scale else 0
    dense = get_type(gemm.weight).elem_bits == lane_of("float16")
    if dots and step.parts > 1 and (dense or (granules > 1 and gemm.scale)):
        ends = DOT_GRANULE_REGISTERS
    return sums + operands + words + pieces + groups + ends + SPARE_REGISTERS
