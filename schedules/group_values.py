"""Scales and zero points of groups of K: how kernels read them, and what they take."""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from schedules.layouts import EXPONENT_GROUP, EXPONENTS, TILE, lane_of, packed_group
from schedules.schedule import GpuSchedule


def streams_exponents(gemm: Gemm) -> bool:
    """Whether kernels read exponents of group scales, four to a word, instead of the scales."""
    return (
        gemm.power_scales
        and gemm.zero == "none"
        and lane_of(gemm.activation) == 16
        and packed_group(gemm.group_size, gemm.k) == EXPONENT_GROUP
    )


def scale_span(gemm: Gemm) -> int:
    """Return the elements of K that one element of the scale array serves; 0 where one serves the row."""
    if gemm.group_size >= gemm.k:
        return 0
    return EXPONENTS * EXPONENT_GROUP if streams_exponents(gemm) else packed_group(gemm.group_size, gemm.k)


def shares_values(gemm: Gemm) -> bool:
    """Tell whether the lanes of a gemv warp load scales and zero points of two bytes for each other."""
    valued = (gemm.scale and not streams_exponents(gemm)) or gemm.zero != "none"
    small = gemm.group_size < gemm.k and packed_group(gemm.group_size, gemm.k) < TILE
    return valued and small and lane_of(gemm.activation) == 16


def value_parts(gemm: Gemm) -> tuple[int, ...]:
    """Return how many numbers of each array of a group's values belong to it: its scale, its zero point."""
    return tuple(filter(None, (int(gemm.scale), {"none": 0, "integer": 1, "float": 2}[gemm.zero])))


def value_words(gemm: Gemm, schedule: GpuSchedule) -> list[int]:
    """Return the words of each array's values that the tiles in flight of a gemv warp have."""
    groups = schedule.stages * (TILE // packed_group(gemm.group_size, gemm.k))
    return [groups * parts * schedule.warp_rows // 2 for parts in value_parts(gemm)]


def shared_value_bytes(gemm: Gemm, schedule: GpuSchedule) -> int:
    """Return the shared memory through which the lanes of a gemv block hand out values, at most."""
    return 4 * schedule.warps * sum(value_words(gemm, schedule)) if shares_values(gemm) else 0
