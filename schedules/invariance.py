"""Batch invariance: kernels that add the terms of a sum in one order, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ladder.ir.gemm import Gemm
from schedules.codes import table_bytes
from schedules.footprint import DEALT_COLUMNS, SLICED, WARPGROUPS, slice_columns
from schedules.gemv_runs import buffer_chunks, gemv_blocks, gemv_run
from schedules.layouts import TILE, lane_of
from schedules.legal import is_legal
from schedules.rules import DEALS
from schedules.schedule import GpuSchedule, Schedule, TransformList
from targets import TileDevice

Order = tuple[object, ...]

TILE_CHUNKS = 8
"""16-byte chunks of a row of 16-bit x that belong to a packed tile."""


def order_of_sums(gemm: Gemm, device: TileDevice, schedule: Schedule) -> Order | None:
    """Return what decides in which order a kernel adds the terms of one result.

    Kernels of the same order give a row the same bits. The tile of activation rows, the depth of pipelining
    and the way through the grid are no part of it, but where fp8 products leave the tensor core for wider
    sums depends on the tile. Slices of K are whole turns of a loop, whose length depends on the stage.

    ``mma`` and ``wgmma`` add sixteen products to a sum alike (compared on an H200), so ``gemv`` has the order
    of ``wgmma`` where that deals K as it does.

    Returns: None where the order depends on the number of rows: a stream-K grid cuts K wherever a share ends.
    """
    if isinstance(schedule, TransformList):
        return ("cpu", schedule.instruction)
    assert isinstance(schedule, GpuSchedule)
    if schedule.stream_k:
        return None
    if slices := dealt_slices(gemm, device, schedule):
        return ("dealt", slices)
    order: Order = (schedule.pipeline, schedule.placement, schedule.split_k)
    if schedule.pipeline not in WARPGROUPS:  # warps or the blocks of a cluster take turns along K
        order += (schedule.tile_k, schedule.warps, schedule.cluster, schedule.warp_rows)
        if schedule.pipeline in SLICED:  # by runs of as many tiles as are in flight and x has room for
            order += (schedule.stages, schedule.tile_m)
    elif schedule.split_k > 1:
        order += (slice_columns(gemm, schedule),)
    if gemm.activation.startswith("fp8"):
        order += (schedule.tile_m, schedule.tile_n, schedule.tile_k)
    return order


def dealt_slices(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> int:
    """Return to how many slices a kernel deals K in runs of `DEALT_COLUMNS`; 0 if it does otherwise.

    Of ``gemv`` only what multiplies the same operands as ``wgmma``: decoded, with the scales of their groups.
    """
    if schedule.pipeline != "gemv":
        return schedule.deal if schedule.deal > 1 else 0
    same = gemm.scale and lane_of(gemm.activation) == 16 and schedule.placement == "operand"
    if not same or schedule.cluster > 1 or table_bytes(gemm):
        return 0
    chunks = buffer_chunks(device, gemv_blocks(gemm, device, schedule, 0), 0)
    run = gemv_run(schedule, chunks, TILE_CHUNKS)
    return schedule.split_k if run * TILE == DEALT_COLUMNS else 0


def dealt(gemm: Gemm, device: TileDevice, schedule: Schedule) -> Iterator[GpuSchedule]:
    """Yield the kernels that deal K but do all else as a ``wgmma`` kernel does."""
    if isinstance(schedule, GpuSchedule) and schedule.pipeline == "wgmma" and not schedule.stream_k:
        for deal in DEALS:
            other = replace(schedule, deal=deal)
            if is_legal(gemm, device, other):
                yield other
