"""Kernels of verified graphs: tiles and schedules, ranked by a model of the device."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ladder.forks import follow_parent
from ladder.ir.graph import Graph
from ladder.lower.blocks import BlockSchedule, emitter_for
from ladder.lower.blocks.analysis import BlockProgram
from ladder.runtime.fused import Lowering, constants_of
from ladder.superopt.generator import Report, VerifiedGraph, instantiate
from ladder.superopt.generator.choose import tilings
from tile_types.errors import LadderError, ScheduleError

if TYPE_CHECKING:
    from ladder.lower.blocks.candidates import Grid, Ranked
    from ladder.superopt.generator import Program
    from targets import TileDevice

TILES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Extents of a split dimension in a tile that are tried."""

TILINGS = 20
"""Best choices of tiles, as ranked with a few schedules, for which all schedules are considered."""

WORTHWHILE = 8
"""Least number of choices of tiles that is divided among processes."""

INDISTINCT = 0.03
"""Relative difference of predicted times below which schedules count as equally fast."""

SPARE_CANDIDATES = 32
"""Candidates beside those that are built: some cannot be emitted after all."""

FOLLOWING_SECONDS = 3e-6
"""Cost of a kernel that waits for the one before it, and has the next program wait for it, on an H200."""

PER_GRAPH = 2
"""Schedules of one graph at one choice of tiles that are among them."""


@dataclass(frozen=True)
class Trial:
    """A lowering, the graph it comes from, and what is known of its speed.

    lowering: Kernels and schedules.
    factors: Its tiles: a number for each factor of its mapping.
    predicted: Seconds by the model.
    measured: Seconds on this machine, if it was timed.
    error: Relative Frobenius error against float64 on the inputs given, if it ran.
    slowest: Number of the kernel that takes longest by the model.
    """

    lowering: Lowering
    found: VerifiedGraph
    factors: Mapping[str, int]
    predicted: float
    measured: float | None = None
    error: float | None = None
    slowest: int = 0

    def as_json(self) -> dict[str, Any]:
        return {
            "schedules": [str(plan) for plan in self.lowering.schedules], "tiles": dict(self.factors),
            "predicted": self.predicted, "measured": self.measured, "error": self.error,
        }  # fmt: skip


def candidates_of(
    report: Report, device: TileDevice, count: int, constants: tuple[str, ...] = (), choices: int = TILINGS
) -> list[Trial]:
    """Return lowerings of the verified graphs at all tiles, best first by the model.

    count: Kernels that are wanted.
    constants: As of `Lowering`.
    choices: Choices of tiles of which all schedules are considered.
    Raises DeviceError if block graphs are not lowered to the device.
    Raises ScheduleError if there is none, with a reason.
    """
    from ladder.lower.blocks.candidates import COARSE_GRID, FULL_GRID

    emitter_for(device)
    program, workers = report.program, report.limits.workers
    tiles = TILES if program.multiplies else (1, *TILES)
    every = [
        Choice(found, program, factors, device, constants)
        for found in report.found
        for factors in tilings(found.structure.mapping, program, tiles)
    ]
    few = _each(every, COARSE_GRID, workers)
    known = [(every[n].order(t[0]), n) for n, t in enumerate(few) if isinstance(t, list)]
    reasons = ["no tiles divide its sizes", *(why for why in few if isinstance(why, str))]
    best = [every[number] for _, number in sorted(known)[:choices]]
    found = [
        (choice.order(trial), trial)
        for choice, trials in zip(best, _each(best, FULL_GRID, workers), strict=True)
        if isinstance(trials, list)
        for trial in trials
    ]
    if not found:
        raise ScheduleError(
            f"no verified graph of {program.name} can be lowered to {device.name}: {reasons[-1]}"
        )
    return _various([trial for _, trial in sorted(found, key=lambda pair: pair[0])])[
        : count + SPARE_CANDIDATES
    ]


def _various(trials: Sequence[Trial]) -> list[Trial]:
    """Return trials with those last that hardly differ from one before.

    They have its tiles, the schedule of its slowest kernel, and its predicted time.
    """
    first: dict[object, Trial] = {}
    for trial in trials:
        slowest = trial.lowering.schedules[trial.slowest]
        first.setdefault((*sorted(trial.factors.items()), slowest, _class_of(trial.predicted)), trial)
    chosen = set(map(id, first.values()))
    return [*first.values(), *(trial for trial in trials if id(trial) not in chosen)]


@dataclass(frozen=True)
class Choice:
    """A verified graph at some tiles."""

    found: VerifiedGraph
    program: Program
    factors: Mapping[str, int]
    device: TileDevice
    constants: tuple[str, ...]

    def trials(self, grid: Grid) -> list[Trial] | str:
        """Return its best schedules, fastest first by the model; or why there is none."""
        from ladder.lower.blocks.candidates import ranked

        try:
            graph = kernels_at(self.found, self.program, self.factors)
            per_block = [
                self._best(
                    node.body, ranked(node.body, self.device, grid, constants_of(node, self.constants))
                )
                for node in graph.nodes
                if node.body is not None
            ]
            trials = []
            for estimates in itertools.product(*per_block):
                plans = tuple(estimate.schedule for estimate in estimates)
                lowering = Lowering(graph, plans, self.constants)
                each = [estimate.seconds for estimate in estimates]
                seconds = sum(each) + FOLLOWING_SECONDS * (len(plans) - 1)
                slowest = each.index(max(each))
                trials.append(Trial(lowering, self.found, self.factors, seconds, slowest=slowest))
            return sorted(trials, key=self.order) or _why_not(graph, self.device)
        except LadderError as error:
            return str(error)

    def _best(self, body: Graph, estimates: Sequence[Ranked]) -> list[Ranked]:
        def order(estimate: Ranked) -> tuple[int, int]:
            return _class_of(estimate.seconds), -self._warps(body, estimate.schedule)

        return sorted(estimates, key=order)[:PER_GRAPH]

    def order(self, trial: Trial) -> tuple[int, int, float]:
        """Return by what trials are sorted: predicted time, then threads, where the model has no opinion."""
        pairs = zip(trial.lowering.blocks, trial.lowering.schedules, strict=True)
        threads = sum(self._warps(node.body, plan) for node, plan in pairs if node.body is not None)
        return _class_of(trial.predicted), -threads, trial.predicted

    def _warps(self, body: Graph, plan: BlockSchedule) -> int:
        """Return the warps of a block graph without a loop that run at once: the model ignores those."""
        if body.loops:
            return 0
        blocks = math.prod(int(axis.extent) for axis in body.grid) * plan.cluster
        return min(blocks, self.device.units) * plan.warps


def _class_of(seconds: float) -> int:
    """Return a number that times within a few percent of each other mostly share."""
    return math.floor(math.log(seconds) / math.log(1 + INDISTINCT))


def _each(choices: Sequence[Choice], grid: Grid, workers: int) -> list[list[Trial] | str]:
    """Return the trials of each choice; in processes, if there is work for them."""
    if workers <= 1 or len(choices) < WORTHWHILE:
        return [choice.trials(grid) for choice in choices]
    with ProcessPoolExecutor(workers, initializer=follow_parent) as pool:
        return list(pool.map(Choice.trials, choices, itertools.repeat(grid)))


def _why_not(graph: Graph, device: TileDevice) -> str:
    """Return why no schedule of a kernel graph is legal: what the simplest one lacks."""
    from ladder.lower.blocks.geometry import BlockGeometry

    try:
        for node in graph.nodes:
            if node.body is not None:
                BlockGeometry(BlockProgram.of(node.body), device, BlockSchedule())
    except ScheduleError as error:
        return str(error)
    return "accumulators take too many registers"


def kernels_at(found: VerifiedGraph, program: Program, factors: Mapping[str, int]) -> Graph:
    """Return the kernel graph of a verified graph at some tiles, all operators in block graphs."""
    from ladder.lower.blocks.outline import outlined

    return outlined(instantiate(found.structure, program, factors, packed=True))


def variants(best: Trial, known: Sequence[Trial], device: TileDevice, count: int) -> list[Trial]:
    """Return trials that differ from the fastest in one choice of one schedule, and are not known yet."""
    from ladder.lower.blocks.candidates import neighbours

    lowering, found = best.lowering, []
    tried = {trial.lowering.schedules for trial in known if trial.lowering.graph == lowering.graph}
    for number, node in enumerate(lowering.blocks):
        body, plans = node.body, lowering.schedules
        assert body is not None
        for near in neighbours(body, device, plans[number], constants_of(node, lowering.constants)):
            changed = (*plans[:number], near.schedule, *plans[number + 1 :])
            if changed not in tried:
                found.append((best.predicted + near.seconds, replace(lowering, schedules=changed)))
    fastest = sorted(found, key=lambda pair: pair[0])[:count]
    return [
        replace(best, lowering=other, predicted=seconds, measured=None, error=None)
        for seconds, other in fastest
    ]
