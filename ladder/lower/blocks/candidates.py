"""Candidate schedules of a block graph, ranked by the cost model; the device measures the best ones.

Cost model of a block graph's kernel, to rank schedules before or without measuring them.

Bytes from memory, bytes from L2, bytes under way (Little's law) and the work of a warp's steps overlap;
launching, clusters and joining accumulators come on top, less what kernels one after the other do side by
side. The constants are fitted to 315 kernels of seventeen programs that ran on an H200; those of reductions,
of sums that are accumulated and of other operators to 914 of six programs, of all the graphs that were found
(the fastest, or one within 8 %, is among the first 16).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower.blocks.analysis import LOOP, BlockProgram
from ladder.lower.blocks.fragments import shape_of
from ladder.lower.blocks.geometry import BlockGeometry
from ladder.lower.blocks.schedule import BlockSchedule, releases_of
from ladder.lower.blocks.shared import CHUNK_BYTES, TileLayout
from targets import TileDevice
from tile_types.errors import ScheduleError

RESERVED_BYTES = 1024
"""Shared memory that the device keeps of each block."""

MOST_THREADS = 2048
"""Threads of a multiprocessor."""

OTHER_REGISTERS, MOST_REGISTERS = 56, 255
"""Registers of a thread beside its accumulators, about, and all of them."""

STREAMED_BYTES = 1 << 20
"""Tensors from this size on decide how well memory is read."""

REACHED_BY_CLUSTERS = 0.9
"""Share of the multiprocessors that clusters of more than two blocks fill."""

PAIR, FILLED = 2, 0.9
"""Multiprocessors of a pair (TPC), and the share of the pairs that blocks fill if an early start pays.

On an H200 64 blocks take 18.3 for 19.8 to 21.0 microseconds; 48 take 13.9 or 18.3, why is not known.
"""

CPU_STEP_SECONDS = 1.0e-6
"""Cost of a step of the loop on a CPU thread besides loading."""


@dataclass(frozen=True)
class Constants:
    """Fitted numbers; times in microseconds.

    narrow: Exponent of row bytes over a line of 128: how much of the bandwidth shorter rows reach.
    l2_bytes: Bytes per microsecond from L2.
    latency: From asking for bytes to having them, under load.
    warps: Warps of a multiprocessor that work side by side; more take turns.
    step, product, warpgroup, element, other, accumulated, reduced, chunk: A step of the loop, and in it: a
        matrix instruction of a warp, its part of one of a warpgroup, an exponential or two decoded weights of
        a lane, a result of another element-wise operator, an accumulator that no matrix instruction adds to
        or that is rescaled, an element that it reduces, a 16-byte copy of a lane.
    conflict: What a matrix instruction costs more, per access of shared memory beyond one for eight rows.
    doubling: A cluster, per doubling of its blocks.
    join: Joining the accumulators of one group.
    launch: A launch, with its first copies and last stores, after another.
    least: The least of these.
    beside: What a launch saves if all blocks of the next kernel fit beside this one's.
    early: What it saves then if the next kernel copies constants early, which take `worth` microseconds or
        more; or brings as much into L2 from the other multiprocessor of each pair.
    crowd: What it costs then if the next kernel starts at once, and competes for memory.
    alone: What it costs to let the next kernel start before the loop ends if none of its blocks fits.
    sharpness: Norm by which times that overlap are added.
    """

    narrow: float = 0.105
    l2_bytes: float = 9.0e6
    latency: float = 0.8
    warps: float = 4.24
    step: float = 0.073
    product: float = 0.0030
    warpgroup: float = 0.0010
    conflict: float = 3.9
    element: float = 0.0052
    other: float = 0.010
    accumulated: float = 0.0065
    reduced: float = 0.0023
    chunk: float = 0.0107
    doubling: float = 1.2
    join: float = 0.0011
    launch: float = 1.66
    least: float = 0.3
    beside: float = 0.70
    early: float = 0.87
    worth: float = 2.0
    crowd: float = 0.81
    alone: float = 0.29
    sharpness: float = 2.94


FITTED = Constants()

RELEASES = ("end", "asked", "begin")
"""When the next kernel may start; the first of those that are as fast is taken."""


def predicted(
    program: BlockProgram, device: TileDevice, schedule: BlockSchedule, constant: bool = False
) -> float:
    """Return the seconds that a kernel takes, by the model.

    constant: Whether the large tensors of its loop are never written, so that it copies them early.
    """
    if not device.is_gpu:
        return _on_cpu(program, device)
    return Estimate(BlockGeometry(program, device, schedule), FITTED).seconds(schedule.release, constant)


class Estimate:
    """One kernel's numbers."""

    def __init__(self, geo: BlockGeometry, constants: Constants) -> None:
        self.geo, self.c = geo, constants
        self.program, self.plan, self.device = geo.program, geo.schedule, geo.device
        self.looped = [node for node in self.program.loads if geo.is_looped(node)]
        self.step_bytes = sum(map(tile_bytes, self.looped))
        self.whole_bytes = sum(map(tile_bytes, self.program.loads)) - self.step_bytes
        self.blocks = self.program.blocks * self.plan.cluster
        fits = (self.device.shared_per_block + RESERVED_BYTES) // (geo.shared_bytes + RESERVED_BYTES)
        registers = min(MOST_REGISTERS, geo.least_registers + OTHER_REGISTERS)
        held = self.device.registers_per_unit // (registers * geo.threads)
        self.fitting = max(1, min(fits, MOST_THREADS // geo.threads, held))

    def seconds(self, release: str, constant: bool) -> float:
        """Return the sum of what overlaps and what does not."""
        return 1e-6 * (self._body + max(self.c.least, self._fixed(release, constant)))

    @cached_property
    def _body(self) -> float:
        """Return the microseconds of what overlaps."""
        power = self.c.sharpness
        memory, near = self._memory() * self._uneven, self._moved() / self.c.l2_bytes * self._uneven
        parts = (memory, near, self._under_way(), self._computing())
        return float(sum(part**power for part in parts) ** (1 / power))

    def _fixed(self, release: str, constant: bool) -> float:
        """Return the microseconds of a launch, of joining, and what the kernels around it save."""
        c, plan = self.c, self.plan
        total = c.launch + math.log2(plan.cluster) * c.doubling
        total += plan.sharers * c.join if plan.sharers > 1 else 0.0
        if len(releases_of(self.device)) == 1:
            return total
        room = self.device.units * self.fitting - self.blocks
        share = max(0.0, min(1.0, room / self.blocks))
        if release == "begin":
            return total + (c.crowd * share if self._streams else 0.0)
        total += c.alone if release == "asked" and not share else 0.0
        pairs = self.device.units // PAIR
        apart = self._streams and FILLED * pairs <= self.blocks <= pairs
        early = c.early if release == "asked" and (constant or apart) else 0.0
        ahead = plan.groups * (plan.stages - 1) * self.step_bytes * min(self.blocks, self.device.units)
        return total - share * (c.beside + early * min(1.0, ahead / self._bandwidth / c.worth))

    @property
    def _bandwidth(self) -> float:
        """Bytes per microsecond of memory."""
        dram = self.device.layer("dram")
        return float(dram.sustained_bandwidth * 1e-6)

    @cached_property
    def _streams(self) -> bool:
        """Whether the loop's tiles come from large tensors."""
        sources = [self.program.block.producer(node.inputs[0]) for node in self.looped]
        return any(tile_bytes(source) >= STREAMED_BYTES for source in sources)

    @property
    def iterations(self) -> int:
        """Steps of a group, one after the other, over all waves of blocks."""
        return self.waves * (-(-self.program.steps // self.plan.sharers) if self.geo.looped else 1)

    @property
    def places(self) -> int:
        """Blocks that the device holds at once."""
        cluster, units = self.plan.cluster, int(self.device.units)
        usable = units if cluster <= 2 else int(units * REACHED_BY_CLUSTERS) // cluster * cluster
        return usable * self.fitting

    @property
    def waves(self) -> int:
        """Times that the device is filled."""
        return -(-self.blocks // self.places)

    @property
    def _uneven(self) -> float:
        """Return by how much longer memory takes because the last wave does not fill the device."""
        return self.waves * self.places / self.blocks if self.waves > 1 else 1.0

    def _memory(self) -> float:
        tensors = [self.program.block.producer(node.inputs[0]) for node in self.program.loads]
        rows = [
            2 * self.program.shape(node.name)[1]
            for node, tensor in zip(self.program.loads, tensors, strict=True)
            if not node.tile.ttype.is_block and node in self.looped and tile_bytes(tensor) > STREAMED_BYTES
        ]
        reached: float = min(1.0, min(rows, default=128) / 128) ** self.c.narrow
        results = map(self.program.block.producer, self.program.block.outputs)
        moved = sum(map(tile_bytes, tensors)) + sum(map(tile_bytes, results))
        return moved / (self._bandwidth * reached)

    def _moved(self) -> float:
        """Return the bytes that blocks load, all together."""
        iterations = -(-self.program.steps // self.plan.sharers) if self.geo.looped else 1
        return self.blocks * (iterations * self.plan.groups * self.step_bytes + self.whole_bytes)

    def _under_way(self) -> float:
        ahead = self.plan.groups * (self.plan.stages - 1) * self.step_bytes + self.whole_bytes
        busy = min(self.blocks, self.device.units * self.fitting)
        return self._moved() / max(1, busy * ahead) * self.c.latency

    def _computing(self) -> float:
        c, plan = self.c, self.plan
        resident = min(self.fitting, -(-self.blocks // self.device.units))
        share = max(1.0, plan.warps * resident / c.warps)
        copiers = plan.group_warps * self.geo.shape.lanes
        chunks = self.step_bytes / CHUNK_BYTES / copiers if plan.copies == "lanes" else 0.0
        work = (
            self._products()
            + self._elements() * c.element
            + self._others() * c.other
            + self._accumulated() * c.accumulated
            + self._reduced() * c.reduced
            + chunks * c.chunk
        )
        return self.iterations * (c.step + work * share)

    def _products(self) -> float:
        """Return the microseconds of a warp's matrix instructions in a step."""
        c, total = self.c, 0
        for node in self.program.block.nodes:
            if node.operator == "matmul":
                rows, columns = self.program.shape(node.name)
                depth = self.program.shape(node.inputs[0])[1] // 16
                total += self.geo.row_fragments(rows) * (columns // 8 // self.plan.column_warps) * depth
        layouts = [self.geo.layouts[node.name] for node in self.looped if not self.geo.direct]
        passes = max((x.passes for x in layouts if isinstance(x, TileLayout)), default=1)
        each = c.product * (1 + c.conflict * (passes - 1))
        return total * (c.warpgroup if self.plan.products == "wgmma" else each)

    def _others(self) -> float:
        """Return the results of a lane in a step of what is no exponential, and no difference before one."""
        return sum(
            math.prod(self.program.shape(node.name)) / self.geo.shape.lanes / self.plan.row_warps
            for node in self.program.block.nodes
            if self.program.stages[node.name] == LOOP
            and get_operator(node.operator).elementwise
            and node.operator not in ("exp", "sub", "convert")
        )

    def _accumulated(self) -> float:
        """Return the accumulators of a lane that it computes in a step: of sums, and what is rescaled."""
        return 4.0 * sum(
            self.geo.fragments(self.program.shape(node.name))
            for node in self.program.accumulators
            if len(node.inputs) == 2 or self.program.block.producer(node.inputs[0]).operator != "matmul"
        )

    def _reduced(self) -> float:
        """Return the elements that a lane reduces in a step."""
        total = 0.0
        for node in self.program.block.nodes:
            if node.operator in ("reduce_sum", "reduce_max") and self.program.stages[node.name] == LOOP:
                elements = math.prod(self.program.shape(node.inputs[0]))
                total += elements / self.geo.shape.lanes / self.plan.row_warps
        return total

    def _elements(self) -> float:
        """Return the exponentials and half of the decoded weights of a lane in a step."""
        total = 0.0
        for node in self.program.block.nodes:
            if node.operator == "exp":
                total += 4 * self.geo.fragments(self.program.shape(node.name))
            if node.operator == "convert" and self.program.block.tile(node.inputs[0]).ttype.is_block:
                decoded = math.prod(self.program.shape(node.name))
                total += decoded / 2 / self.geo.shape.lanes / self.plan.column_warps
        return total


def _on_cpu(program: BlockProgram, device: TileDevice) -> float:
    """Return what loading costs where blocks share nothing, and what steps cost."""
    step = sum(tile_bytes(node) for node in program.loads if program.stages[node.name] == "loop")
    whole = sum(map(tile_bytes, program.loads)) - step
    waves = -(-program.blocks // device.units)
    dram = device.layer("dram")
    moved = program.blocks * (program.steps * step + whole)
    return moved / dram.sustained_bandwidth + waves * program.steps * CPU_STEP_SECONDS


def tile_bytes(node: Node) -> int:
    """Return the bytes of a node's tile in memory."""
    tile = node.tile
    return math.prod(tile.known_shape) * tile.ttype.elem_bits // 8


@dataclass(frozen=True)
class Grid:
    """Values of each field of a schedule that are tried."""

    groups: tuple[int, ...] = (1, 2, 3, 4, 8, 16)
    row_warps: tuple[int, ...] = (1, 2, 4, 8, 16)
    stages: tuple[int, ...] = (2, 3, 4, 5, 6, 9)
    clusters: tuple[int, ...] = (1, 2, 4, 8)
    column_warps: tuple[int, ...] = (1, 2, 4)


FULL_GRID = Grid()
COARSE_GRID = Grid((1, 2, 4), (1, 4, 16), (3,), (1, 2, 8), (1,))
"""A coarse grid that ranks choices of tiles; only the best are then searched on `FULL_GRID`."""

MOST_SUMS, REGISTERS = 192, 48 * 1024
"""Accumulator registers that a thread, and a block, may have beside all others."""


@dataclass(frozen=True)
class Ranked:
    """A schedule and the seconds that the model predicts."""

    seconds: float
    schedule: BlockSchedule


def legal_schedules(block: Graph, device: TileDevice, grid: Grid = FULL_GRID) -> Iterator[BlockGeometry]:
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
    block: Graph, device: TileDevice, grid: Grid = FULL_GRID, constants: Collection[str] = ()
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
