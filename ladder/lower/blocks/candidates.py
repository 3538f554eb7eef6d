"""Schedules of a block graph that are worth building, best first by `model`: who has the device measures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ladder.ir.graph import Graph
from ladder.lower.blocks.analysis import LOOP, BlockProgram
from ladder.lower.blocks.geometry import Geometry
from ladder.lower.blocks.model import predicted
from ladder.lower.blocks.schedule import BlockSchedule
from targets import TileDevice
from tile_types.errors import ScheduleError

GROUPS = (1, 2, 4, 8)
ROW_WARPS = (1, 2, 4, 8, 16)
COLUMN_WARPS = (1, 2, 4)
STAGES = (2, 3, 4, 6)
CLUSTERS = (1, 2, 4, 8)

MOST_SUMS, REGISTERS = 192, 48 * 1024
"""Accumulator registers that a thread, and a block, may have beside all others."""

CROWDED_BYTES = 113 * 1024
"""Shared memory from which on one block fills a multiprocessor: the next kernel had better wait then."""


@dataclass(frozen=True)
class Estimate:
    """A schedule and the seconds that the model predicts."""

    seconds: float
    schedule: BlockSchedule


def legal_schedules(block: Graph, device: TileDevice) -> Iterator[BlockSchedule]:
    """Yield every schedule of the grid of choices that fits."""
    program = BlockProgram.of(block)
    if not device.is_gpu:
        yield BlockSchedule()
        return
    looped = any(stage == LOOP for stage in program.stages.values())
    copies = ("lanes", "tensor") if looped and "tma" in device.features else ("lanes",)
    clusters = CLUSTERS if looped and "cluster" in device.features else (1,)
    groups, stages = (GROUPS, STAGES) if looped else ((1,), (2,))
    for choice in itertools.product(groups, ROW_WARPS, stages, clusters, COLUMN_WARPS, copies):
        schedule = _legal(program, device, choice)
        if schedule is not None:
            yield schedule


def _legal(program: BlockProgram, device: TileDevice, choice: tuple[object, ...]) -> BlockSchedule | None:
    """Return the schedule of a choice, or None if it does not fit."""
    schedule = BlockSchedule(*choice)  # type: ignore[arg-type]
    try:
        geo = Geometry(program, device, schedule)
        registers, crowded = geo.least_registers, geo.shared_bytes > CROWDED_BYTES
    except ScheduleError:
        return None
    if registers > MOST_SUMS or registers * geo.schedule.threads > REGISTERS:
        return None
    return replace(schedule, release="never" if crowded else "begin")


def ranked(block: Graph, device: TileDevice) -> list[Estimate]:
    """Return all legal schedules, fastest first by the model."""
    program = BlockProgram.of(block)
    found = [
        Estimate(predicted(program, device, schedule), schedule)
        for schedule in legal_schedules(block, device)
    ]
    return sorted(found, key=lambda estimate: (estimate.seconds, str(estimate.schedule)))
