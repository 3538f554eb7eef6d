"""Candidate schedules of a block graph, ranked by the cost model; the device measures the best ones."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ladder.ir.graph import Graph
from ladder.lower.blocks.analysis import LOOP, BlockProgram
from ladder.lower.blocks.fragment_shape import shape_of
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.model import FITTED, RELEASES, STREAMED_BYTES, Estimate, predicted, tile_bytes
from ladder.lower.blocks.schedule import BlockSchedule, releases_of
from targets import TileDevice
from tile_types.errors import ScheduleError


@dataclass(frozen=True)
class Grid:
    """Values of each field of a schedule that are tried."""

    groups: tuple[int, ...] = (1, 2, 3, 4, 8, 16)
    row_warps: tuple[int, ...] = (1, 2, 4, 8, 16)
    stages: tuple[int, ...] = (2, 3, 4, 5, 6, 9)
    clusters: tuple[int, ...] = (1, 2, 4, 8)
    column_warps: tuple[int, ...] = (1, 2, 4)


ALL = Grid()
FEW = Grid((1, 2, 4), (1, 4, 16), (3,), (1, 2, 8), (1,))
"""Enough to tell good tiles from bad ones."""

MOST_SUMS, REGISTERS = 192, 48 * 1024
"""Accumulator registers that a thread, and a block, may have beside all others."""


@dataclass(frozen=True)
class Ranked:
    """A schedule and the seconds that the model predicts."""

    seconds: float
    schedule: BlockSchedule


def legal_schedules(block: Graph, device: TileDevice, grid: Grid = ALL) -> Iterator[BlockGeometry]:
    """Yield every schedule of a grid of choices that fits, as the geometry of a GPU's kernel."""
    program = BlockProgram.of(block)
    looped = any(stage == LOOP for stage in program.stages.values())
    copies = ("lanes", "tensor") if looped and "tma" in device.features else ("lanes",)
    clusters = grid.clusters if looped and "cluster" in device.features else (1,)
    shape = shape_of(device)
    several = looped and not shape.through_registers
    groups, stages = grid.groups if looped else (1,), grid.stages if several else (2,)
    least = sum(tile_bytes(node) for node in program.loads if program.stages[node.name] == LOOP)
    for warps in itertools.product(groups, grid.row_warps, grid.column_warps):
        if math.prod(warps) * shape.lanes > shape.most_threads:
            continue
        for held, cluster, copy in itertools.product(stages, clusters, copies):
            if warps[0] * held * least > device.shared_per_block or warps[0] * cluster > program.steps:
                continue
            plan = BlockSchedule(warps[0], warps[1], held, cluster, warps[2], copy)
            for products in ("mma", "wgmma") if _suits_warpgroups(program, device, plan) else ("mma",):
                geo = _legal(program, device, replace(plan, products=products))
                if geo is not None:
                    yield geo


def _suits_warpgroups(program: BlockProgram, device: TileDevice, plan: BlockSchedule) -> bool:
    """Whether products of warpgroups are worth a look: `BlockGeometry` then says whether they are legal."""
    products = [node for node in program.block.nodes if node.operator == "matmul"]
    rows = {program.shape(node.name)[0] for node in products}
    return "wgmma" in device.features and plan.copies == "tensor" and rows == {16 * plan.row_warps}


def _legal(program: BlockProgram, device: TileDevice, schedule: BlockSchedule) -> BlockGeometry | None:
    """Return the geometry of a schedule, or None if it does not fit."""
    try:
        geo = BlockGeometry(program, device, schedule)
        registers = geo.least_registers
    except ScheduleError:
        return None
    if registers > MOST_SUMS or registers * geo.threads > REGISTERS:
        return None
    return geo


def ranked(
    block: Graph, device: TileDevice, grid: Grid = ALL, constants: Collection[str] = ()
) -> list[Ranked]:
    """Return all legal schedules of a grid of choices, fastest first by the model.

    constants: Inputs of the block graph that no kernel writes while it may run.
    """
    program = BlockProgram.of(block)
    if not device.is_gpu:
        plan = BlockSchedule()
        return [Ranked(predicted(program, device, plan), plan)]
    constant = _constant(block, constants)
    found = [_released(geo, constant) for geo in legal_schedules(block, device, grid)]
    return sorted(found, key=lambda estimate: (estimate.seconds, str(estimate.schedule)))


def _constant(block: Graph, constants: Collection[str]) -> bool:
    """Return whether the large inputs are constants."""
    large = {x.name for x in block.inputs if tile_bytes(x) >= STREAMED_BYTES}
    return bool(large) and large <= set(constants)


def _released(geo: BlockGeometry, constant: bool) -> Ranked:
    """Return a schedule with the best time for the next kernel to start."""
    estimate = Estimate(geo, FITTED)
    allowed = [release for release in RELEASES if release in releases_of(geo.device)]
    seconds = {release: estimate.seconds(release, constant) for release in allowed}
    best = min(allowed, key=seconds.__getitem__)
    return Ranked(seconds[best], replace(geo.schedule, release=best))


def neighbours(
    block: Graph, device: TileDevice, schedule: BlockSchedule, constants: Collection[str] = ()
) -> list[Ranked]:
    """Return legal schedules that differ from one in one choice, fastest first by the model; of a GPU.

    Their seconds are what they take more than that one. What the model does not tell apart is varied, too,
    such as how early the next kernel starts.
    """
    program = BlockProgram.of(block)
    if not device.is_gpu:
        return []
    constant = _constant(block, constants)
    own = predicted(program, device, schedule, constant)
    found = {}
    for change in _changes(schedule):
        geo = _legal(program, device, replace(schedule, **change))
        if geo is not None and geo.schedule != schedule:
            found[geo.schedule] = Estimate(geo, FITTED).seconds(geo.schedule.release, constant) - own
    return sorted((Ranked(time, plan) for plan, time in found.items()), key=lambda estimate: estimate.seconds)


def _changes(plan: BlockSchedule) -> Iterator[dict[str, Any]]:
    """Yield what may differ, most promising first."""
    yield from ({"release": release, "lead": 0} for release in RELEASES)
    yield from ({"release": "asked", "lead": lead} for lead in (2, 4))
    yield from ({"stages": stages} for stages in range(plan.stages - 1, plan.stages + 3))
    for more in (2, 4):
        yield {"groups": plan.groups * more, "stages": max(2, plan.stages // more)}
        if plan.groups % more == 0:
            wider = {"groups": plan.groups // more, "stages": plan.stages * more}
            yield from (wider, {**wider, "column_warps": plan.column_warps * more})
    yield from ({"column_warps": count} for count in (1, 2, 4))
    yield from ({"row_warps": count} for count in (1, 2, 4, 8))
    yield from ({"cluster": count} for count in (1, 2, 4))
