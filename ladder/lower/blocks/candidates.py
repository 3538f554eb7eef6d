"""Schedules of a block graph that are worth building, best first by a model of the device.

The model counts what decides small programs on a GPU: bytes from memory, bytes from L2 into the
multiprocessors, bytes under way (Little's law), waves of blocks, and what launching and joining cost. It
ranks; whoever has the device measures.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from ladder.ir.graph import Graph, Node
from ladder.lower.blocks.analysis import LOOP, BlockProgram
from ladder.lower.blocks.geometry import Geometry
from ladder.lower.blocks.schedule import BlockSchedule
from targets import TileDevice
from tile_types.errors import ScheduleError

GROUPS = (1, 2, 4, 8)
ROW_WARPS = (1, 2, 4, 8)
COLUMN_WARPS = (1, 2, 4)
STAGES = (2, 3, 4, 6)
CLUSTERS = (1, 2, 4, 8)

RESERVED_BYTES = 1024
"""Shared memory that the device keeps of each block."""

MOST_SUMS, REGISTERS = 192, 48 * 1024
"""Accumulator registers that a thread, and a block, may have beside all others."""

MOST_THREADS = 2048
"""Threads of a multiprocessor."""

MEMORY_SECONDS = 1.0e-6
"""From asking for bytes of memory to having them, under load."""

LAUNCH_SECONDS = 2.0e-6
"""What a launch costs, its first copies and its last stores included."""

JOIN_SECONDS = 0.12e-6
"""What joining the accumulators of one more group costs."""

STEP_SECONDS = 0.15e-6
"""What a step of the loop costs a group besides waiting: barriers, addresses, latencies of instructions."""

CPU_STEP_SECONDS = 1.0e-6
"""What a step of the loop costs a CPU thread besides loading."""

L2_BYTES_PER_SECOND = 5.5e12


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
        schedule = BlockSchedule(*choice)
        try:
            geo = Geometry(program, device, schedule)
            if geo.least_registers > MOST_SUMS or geo.least_registers * schedule.threads > REGISTERS:
                continue
        except ScheduleError:
            continue
        yield schedule


def ranked(block: Graph, device: TileDevice) -> list[Estimate]:
    """Return all legal schedules, fastest first by the model."""
    program = BlockProgram.of(block)
    found = [
        Estimate(predicted(program, device, schedule), schedule)
        for schedule in legal_schedules(block, device)
    ]
    return sorted(found, key=lambda estimate: (estimate.seconds, str(estimate.schedule)))


def predicted(program: BlockProgram, device: TileDevice, schedule: BlockSchedule) -> float:
    """Return the seconds that a kernel takes, by the model."""
    if not device.is_gpu:
        return _predicted_cpu(program, device)
    geo = Geometry(program, device, schedule)
    dram = device.layer("dram")
    units, blocks = device.units, program.blocks * schedule.cluster
    resident = min(
        (device.shared_per_block + RESERVED_BYTES) // (geo.shared_bytes + RESERVED_BYTES),
        MOST_THREADS // schedule.threads,
        -(-blocks // units),
    )
    waves = -(-blocks // (units * max(resident, 1)))
    turns = -(-program.steps // schedule.sharers) if geo.looped else 1
    step = sum(_bytes(node) for node in program.loads if geo.is_looped(node))
    whole = sum(_bytes(node) for node in program.loads if not geo.is_looped(node))
    moved = blocks * (turns * schedule.groups * step + whole)
    unique = sum(_bytes(program.block.producer(node.inputs[0])) for node in program.loads)
    ahead = schedule.groups * (schedule.stages - 1) * step + whole
    busy = min(blocks, units * resident)
    rates = (
        unique / (dram.bandwidth * dram.sustained),
        moved / L2_BYTES_PER_SECOND,
        moved / max(busy * ahead, 1) * MEMORY_SECONDS,
        waves * turns * STEP_SECONDS,
    )
    return LAUNCH_SECONDS + max(rates) + JOIN_SECONDS * schedule.sharers


def _predicted_cpu(program: BlockProgram, device: TileDevice) -> float:
    """Return what loading costs where blocks share nothing, and what steps cost."""
    looped = [node for node in program.loads if program.stages[node.name] == LOOP]
    step = sum(map(_bytes, looped))
    whole = sum(map(_bytes, program.loads)) - step
    waves = -(-program.blocks // device.units)
    dram = device.layer("dram")
    moved = program.blocks * (program.steps * step + whole)
    return moved / (dram.bandwidth * dram.sustained) + waves * program.steps * CPU_STEP_SECONDS


def _bytes(node: Node) -> int:
    tile = node.tile
    count = 1
    for extent in tile.known_shape:
        count *= extent
    return count * tile.ttype.elem_bits // 8
