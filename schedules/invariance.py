"""Batch invariance: kernels that add the terms of a sum in one order, whatever the number of rows."""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from schedules.footprint import SLICED, WARPGROUPS, slice_columns
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, Schedule, TransformList

Order = tuple[object, ...]

WARP_TILE = 4
"""Slices up to which the sums of a row tile's warps go to the same slices' blocks in every tile of N."""


def order_of_sums(gemm: Gemm, schedule: Schedule) -> Order | None:
    """Return what decides in which order a kernel adds the terms of one result.

    Kernels of the same order give a row the same bits. The tile of activation rows, the depth of pipelining
    and the way through the grid are no part of it, but where fp8 products leave the tensor core for wider
    sums depends on the tile. Slices of K are whole turns of a loop, whose length depends on the stage; the
    block that adds them begins with its own, and which one that is may depend on the rows of a block.

    Returns: None where the order depends on the number of rows: a stream-K grid cuts K wherever a share ends.
    """
    if isinstance(schedule, TransformList):
        return ("cpu", schedule.instruction)
    assert isinstance(schedule, GpuSchedule)
    if schedule.stream_k:
        return None
    order: Order = (schedule.pipeline, schedule.placement, schedule.split_k)
    if schedule.pipeline not in WARPGROUPS:  # warps or the blocks of a cluster take turns along K
        order += (schedule.tile_k, schedule.warps, schedule.cluster, schedule.warp_rows)
        if schedule.pipeline in SLICED:  # by runs of as many tiles as are in flight and x has room for
            order += (schedule.stages, schedule.tile_m)
    elif schedule.split_k > 1:
        rows = schedule.tile_n if schedule.tile_n // TILE % (schedule.split_k // WARP_TILE or 1) else 0
        order += (slice_columns(gemm, schedule), rows)
    if gemm.activation.startswith("fp8"):
        order += (schedule.tile_m, schedule.tile_n, schedule.tile_k)
    return order
