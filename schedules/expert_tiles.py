"""Schedules for experts with few tokens each: the fastest of those measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ladder.ir.gemm import Gemm
from schedules.footprint import k_slices
from schedules.group_values import streams_exponents
from schedules.layouts import TILE, padded
from schedules.legal import is_legal, placement_for
from schedules.schedule import GpuSchedule
from schedules.spilling import seen_spilling, spills_like_any
from targets import TileDevice

EXPERT_TILES: Mapping[int, tuple[GpuSchedule, ...]] = {
    1: (
        GpuSchedule("gemv", 8, stages=4, warps=4, split_k=2, placement="accumulator", warp_rows=32),
        GpuSchedule("gemv", 8, stages=4, warps=4, placement="accumulator"),
        GpuSchedule("gemv", 8, stages=2, warps=8, split_k=4, warp_rows=32),
        GpuSchedule("gemv", 8, stages=4, warps=4),
    ),
    4: (
        GpuSchedule("gemv", 8, stages=2, warps=8, warp_rows=32),
        GpuSchedule("gemv", 8, stages=4, warps=8),
        GpuSchedule("gemv", 8, stages=4, warps=4),
    ),
    8: (
        GpuSchedule("wgmma", 16, 64, 128, stages=6, warps=4),
        GpuSchedule("mma", 16, 128, 128, stages=4, warps=4),
    ),
    16: (
        GpuSchedule("wgmma", 32, 128, 128, stages=4, warps=8),
        GpuSchedule("mma", 16, 128, 128, stages=4, warps=4),
    ),
    24: (
        GpuSchedule("wgmma", 32, 128, 128, stages=4, warps=8),
        GpuSchedule("mma", 32, 128, 64, stages=4, warps=4),
    ),
    32: (
        GpuSchedule("wgmma", 48, 256, 128, stages=4, warps=8, persistent=True),
        GpuSchedule("wgmma", 48, 128, 128, stages=4, warps=8),
        GpuSchedule("mma", 64, 64, 128, stages=3, warps=4),
    ),
    48: (
        GpuSchedule("wgmma", 64, 128, 64, stages=6, warps=8),
        GpuSchedule("wgmma", 64, 128, 128, stages=4, warps=8),
        GpuSchedule("mma", 64, 64, 128, stages=3, warps=4),
    ),
    64: (
        GpuSchedule("wgmma", 80, 256, 64, stages=6, warps=8, persistent=True),
        GpuSchedule("wgmma", 80, 128, 128, stages=4, warps=8),
        GpuSchedule("mma", 64, 64, 128, stages=3, warps=4),
    ),
    256: (GpuSchedule("wgmma", 144, 192, 128, stages=4, warps=12, persistent=True),),
}
"""By mean tokens per expert, the fastest of those measured on an H200 and an H100, of which the first one
serves that is legal, takes `LEAST_STEPS` steps of K and was not seen to spill; those with scales on the
accumulator where `scales_sums` says so. Tokens are not spread evenly: a tile has room for more than the mean;
beyond the last, for two standard deviations of a random spread."""

STORED_TILES: Mapping[int, tuple[GpuSchedule, ...]] = {
    8: (
        GpuSchedule("wgmma", 16, 128, 128, stages=5, warps=8, persistent=True),
        GpuSchedule("wgmma", 16, 64, 128, stages=5, warps=4),
        GpuSchedule("mma", 16, 64, 128, stages=4, warps=4),
    ),
    16: (
        GpuSchedule("wgmma", 32, 64, 128, stages=4, warps=4),
        GpuSchedule("mma", 32, 64, 128, stages=3, warps=4),
    ),
    32: (
        GpuSchedule("wgmma", 48, 128, 128, stages=4, warps=8, persistent=True),
        GpuSchedule("mma", 64, 64, 64, stages=4, warps=4),
    ),
    64: (
        GpuSchedule("wgmma", 80, 256, 64, stages=4, warps=8, persistent=True),
        GpuSchedule("mma", 64, 64, 64, stages=4, warps=4),
    ),
    80: (GpuSchedule("wgmma", 112, 128, 64, stages=5, warps=8, persistent=True),),
    96: (GpuSchedule("wgmma", 128, 128, 64, stages=5, warps=8, persistent=True),),
    136: (GpuSchedule("wgmma", 160, 128, 64, stages=4, warps=8, persistent=True),),
    160: (GpuSchedule("wgmma", 192, 128, 64, stages=4, warps=8, persistent=True),),
    216: (GpuSchedule("wgmma", 256, 128, 64, stages=4, warps=8, persistent=True),),
    320: (GpuSchedule("wgmma", 128, 192, 64, stages=4, warps=12, persistent=True),),
    8192: (GpuSchedule("wgmma", 256, 128, 64, stages=4, warps=8, persistent=True),),
}
"""The same of matrices that are not packed, measured on an H200; of ``mma`` by reckoning. Memory binds up to
some hundred tokens, and a tile of all of an expert's reads its matrix once."""

FEW_COLUMNS, SHORT_STEPS = 16, 16
"""Tokens of a tile, and packed tiles along K, up to which blocks that walk over tiles are faster than one for
each, whose starts and ends show (OLMoE's 2048x1024)."""

LEAST_STEPS = 8
"""Packed tiles along K that a slice of K must have to pay (Qwen3-30B-A3B's 2048x768)."""


def scales_sums(gemm: Gemm) -> bool:
    """Tell whether few activation rows gain by scaling sums of a group rather than each weight of it.

    Cores of bfloat16 decode and scale in two instructions, those of float16 in one.
    """
    scaled = gemm.scale and gemm.zero == "none" and not streams_exponents(gemm)
    return scaled and gemm.activation == "bfloat16" and min(gemm.group_size, gemm.k) >= TILE


def tiles_of(gemm: Gemm) -> Mapping[int, tuple[GpuSchedule, ...]]:
    """Return the schedules by mean tokens per expert of a problem."""
    return STORED_TILES if gemm.stored else EXPERT_TILES


def expert_tile(gemm: Gemm, device: TileDevice, m: int) -> GpuSchedule | None:
    """Return the schedule of `tiles_of` for up to ``m`` tokens per expert, if one serves."""
    tiles = next((tiles for limit, tiles in tiles_of(gemm).items() if m <= limit), ())
    spilling, usual = seen_spilling(gemm, device), placement_for(gemm)
    for tile in tiles:
        on_sums, slices = tile.placement == "accumulator", k_slices(tile)
        steps = padded(gemm.k) // TILE
        if (on_sums and not scales_sums(gemm)) or (slices > 1 and steps // slices < LEAST_STEPS):
            continue
        if tile.persistent and tile.tile_m <= FEW_COLUMNS and steps > SHORT_STEPS:
            continue
        placed = tile if on_sums else replace(tile, placement=usual)
        if is_legal(gemm, device, placed) and not spills_like_any(gemm, device, placed, spilling):
            return placed
    return None
