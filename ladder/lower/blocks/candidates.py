"""Schedules of a block graph that are worth building, best first by `model`: who has the device measures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ladder.ir.graph import Graph
from ladder.lower.blocks.analysis import LOOP, BlockProgram
from ladder.lower.blocks.geometry import Geometry
from ladder.lower.blocks.model import STREAMED_BYTES, predicted, tile_bytes
from ladder.lower.blocks.schedule import BlockSchedule
from targets import TileDevice
from tile_types.errors import ScheduleError


@dataclass(frozen=True)
class Grid:
    """Values of each field of a schedule that are tried."""

    groups: tuple[int, ...] = (1, 2, 4, 8)
    row_warps: tuple[int, ...] = (1, 2, 4, 8, 16)
    stages: tuple[int, ...] = (2, 3, 4, 6)
    clusters: tuple[int, ...] = (1, 2, 4, 8)
    column_warps: tuple[int, ...] = (1, 2, 4)


ALL = Grid()
FEW = Grid((1, 4, 8), (1, 4, 16), (3,), (1, 8), (1,))
"""Enough to tell good tiles from bad ones."""

MOST_SUMS, REGISTERS = 192, 48 * 1024
"""Accumulator registers that a thread, and a block, may have beside all others."""

CROWDED_BYTES = 113 * 1024
"""Shared memory from which on one block fills a multiprocessor.

The next kernel had better start at the end of the loop then, not at once: 15.1 instead of 16.5 us for RMSNorm
and a product on an H200; so it had where large tensors are streamed: 13.9 instead of 17.9 us.
"""


@dataclass(frozen=True)
class Estimate:
    """A schedule and the seconds that the model predicts."""

    seconds: float
    schedule: BlockSchedule


def legal_schedules(block: Graph, device: TileDevice, grid: Grid = ALL) -> Iterator[BlockSchedule]:
    """Yield every schedule of a grid of choices that fits."""
    program = BlockProgram.of(block)
    if not device.is_gpu:
        yield BlockSchedule()
        return
    looped = any(stage == LOOP for stage in program.stages.values())
    copies = ("lanes", "tensor") if looped and "tma" in device.features else ("lanes",)
    clusters = grid.clusters if looped and "cluster" in device.features else (1,)
    groups, stages = (grid.groups, grid.stages) if looped else ((1,), (2,))
    for choice in itertools.product(groups, grid.row_warps, stages, clusters, grid.column_warps, copies):
        plan = BlockSchedule(*choice)
        for products in ("mma", "wgmma") if _suits_warpgroups(program, device, plan) else ("mma",):
            schedule = _legal(program, device, replace(plan, products=products))
            if schedule is not None:
                yield schedule


def _suits_warpgroups(program: BlockProgram, device: TileDevice, plan: BlockSchedule) -> bool:
    """Whether products of warpgroups are worth a look: `Geometry` then says whether they are legal."""
    products = [node for node in program.block.nodes if node.operator == "matmul"]
    rows = {program.shape(node.name)[0] for node in products}
    return "wgmma" in device.features and plan.copies == "tensor" and rows == {16 * plan.row_warps}


def _legal(program: BlockProgram, device: TileDevice, schedule: BlockSchedule) -> BlockSchedule | None:
    """Return a schedule, with the time at which the next kernel may start, or None if it does not fit."""
    try:
        geo = Geometry(program, device, schedule)
        registers, crowded = geo.least_registers, geo.shared_bytes > CROWDED_BYTES
    except ScheduleError:
        return None
    if registers > MOST_SUMS or registers * geo.schedule.threads > REGISTERS:
        return None
    return replace(schedule, release="end" if crowded or _streams(program) else "begin")


def _streams(program: BlockProgram) -> bool:
    """Whether the loop's tiles come from large tensors."""
    sources = [program.block.producer(n.inputs[0]) for n in program.loads if program.stages[n.name] == LOOP]
    return any(tile_bytes(source) >= STREAMED_BYTES for source in sources)


def ranked(block: Graph, device: TileDevice, grid: Grid = ALL) -> list[Estimate]:
    """Return all legal schedules of a grid of choices, fastest first by the model."""
    program = BlockProgram.of(block)
    found = [
        Estimate(predicted(program, device, schedule), schedule)
        for schedule in legal_schedules(block, device, grid)
    ]
    return sorted(found, key=lambda estimate: (estimate.seconds, str(estimate.schedule)))
