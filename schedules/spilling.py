"""Schedules whose kernels were seen to spill registers when they were compiled: the next best are chosen.

No estimate tells which values a compiler moves to memory: ptxas and LLVM hoist loads until no register is
left, and then a few too many. What they report does.
"""

from __future__ import annotations

import json
from collections.abc import Collection

from ladder.ir.gemm import Gemm
from schedules.footprint import resources
from schedules.schedule import GpuSchedule
from targets import TileDevice

TRIES = 12
"""How often the next best schedule is compiled in place of one that spills."""

LONGEST_DOT = 256
"""Elements of K of a stage beyond which dot products that no slices share spill: LLVM unrolls all of it."""

_seen: dict[tuple[str, str], tuple[GpuSchedule, ...]] = {}


def seen_spilling(gemm: Gemm, device: TileDevice) -> tuple[GpuSchedule, ...]:
    """Return the schedules whose kernels spilled in this process, at any shape of such a problem."""
    return _seen.get(_kind(gemm, device), ())


def measured_beside(gemm: Gemm, device: TileDevice) -> tuple[GpuSchedule, ...]:
    """Return the schedules that spill here although they were measured, as another kernel.

    Times are those of plain products: a kernel that adds a residual, or reads windows of an image, may spill
    where the measured one did not. Of a plain product, the kernel that spills is the one that was measured.
    """
    ends = gemm.bias or gemm.epilogue or gemm.residual or gemm.factor
    return seen_spilling(gemm, device) if ends or gemm.gate or gemm.windows is not None else ()


def note_spilling(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> bool:
    """Remember that a schedule's kernel spills; return whether that is news."""
    known = seen_spilling(gemm, device)
    if schedule in known:
        return False
    _seen[_kind(gemm, device)] = (*known, schedule)
    return True


def _kind(gemm: Gemm, device: TileDevice) -> tuple[str, str]:
    return device.name, json.dumps(gemm.shape_free(), sort_keys=True)


def spills_like(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, other: GpuSchedule) -> bool:
    """Tell whether a schedule's kernel spills if another's of the same problem does.

    It does if it is the same. Threads of gemv that have no more registers have no room for as many stages of
    as many rows either.
    """
    if schedule.pipeline != "gemv" or other.pipeline != "gemv":
        return schedule == other
    holds = schedule.tile_m >= other.tile_m and schedule.warp_rows >= other.warp_rows
    if not holds or schedule.stages < other.stages:
        return False
    return _room(gemm, device, schedule) <= _room(gemm, device, other)


def _room(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> int:
    """Return the registers of a thread where as many blocks share a multiprocessor as are meant to."""
    needs = resources(gemm, device, schedule)
    return min(255, device.registers_per_unit // (max(1, needs.blocks_per_unit) * needs.threads) // 8 * 8)


def is_unrolled_too_far(schedule: GpuSchedule) -> bool:
    """Tell whether LLVM would spill what it unrolls of a stage."""
    return schedule.pipeline == "dot" and schedule.split_k == 1 and schedule.tile_k > LONGEST_DOT


def spills_like_any(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, seen: Collection[GpuSchedule]
) -> bool:
    """Tell whether a schedule's kernel spills if those of any others of the same problem do."""
    return bool(seen) and any(spills_like(gemm, device, schedule, other) for other in seen)
