"""Kernels of verified graphs: candidates by a model, built side by side, checked against float64, timed."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ladder.api.tensor_program import decoded
from ladder.ir.graph import Graph
from ladder.runtime.build import BUILD_THREADS, Kernel, find_or_build
from ladder.runtime.cache import source_digest
from ladder.runtime.fused import Fused, Lowering, constants_of
from ladder.runtime.packed import PackedWeight
from ladder.superopt.generator import Database, Found, Report, instantiate
from ladder.superopt.generator.choose import tilings
from ladder.superopt.generator.stored import identity
from ladder.superopt.verifier import SLACK
from tile_types.errors import LadderError, ScheduleError

if TYPE_CHECKING:
    import torch

    from ladder.lower.blocks import BlockSchedule
    from ladder.lower.blocks.candidates import Grid, Ranked
    from ladder.superopt.generator import Program
    from targets import TileDevice

Progress = Callable[[str, float | None], None]

TILES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Extents of a split dimension in a tile that are tried."""

STRUCTURES = 4
"""Verified graphs, cheapest first, that are lowered; the next ones only if none of these can be."""

TILINGS = 12
"""Choices of tiles, best first with a few schedules, of which all schedules are considered."""

WORTHWHILE = 8
"""Choices of tiles from which on processes share them."""

INDISTINCT = 0.03
"""Relative difference of predicted times that says nothing."""

SPARE = 32
"""Candidates beside those that are built: some cannot be emitted after all."""

FOLLOWING_SECONDS = 3e-6
"""What a kernel costs that waits for the one before it, and has the next program wait for it, on an H200."""

PER_GRAPH = 2
"""Schedules of one graph at one choice of tiles that are among them."""

TOLERANCE: Mapping[str, float] = {"float32": 2e-5, "float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7}
"""Largest relative Frobenius error against float64, or `SLACK` times the function's own: of halves four units
in the last place, of float32 what sums of thousands add up to."""

REPEATS = 7
"""Timings of which the median is taken."""

COLD_BYTES, MOST_COPIES = 200 << 20, 24
"""On a GPU calls take turns with copies of the inputs that L2 cannot hold together, up to so many."""


@dataclass(frozen=True)
class Trial:
    """A lowering, the graph it comes from, and what is known of its speed.

    Parameters
    ----------
    lowering
        Kernels and schedules.
    found
        The verified graph.
    factors
        Its tiles: a number for each factor of its mapping.
    predicted
        Seconds by the model.
    measured
        Seconds on this machine, if it was timed.
    error
        Relative Frobenius error against float64 on the inputs given, if it ran.
    """

    lowering: Lowering
    found: Found
    factors: Mapping[str, int]
    predicted: float
    measured: float | None = None
    error: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what a report shows."""
        return {
            "schedules": [str(plan) for plan in self.lowering.schedules], "tiles": dict(self.factors),
            "predicted": self.predicted, "measured": self.measured, "error": self.error,
        }  # fmt: skip


def candidates_of(
    report: Report, device: TileDevice, count: int, constants: tuple[str, ...] = ()
) -> list[Trial]:
    """Return lowerings of the verified graphs at all tiles, best first by the model.

    Parameters
    ----------
    count
        Kernels that are wanted.
    constants
        As of `Lowering`.

    Raises
    ------
    DeviceError
        If block graphs are not lowered to the device.
    ScheduleError
        If there is none, with a reason.
    """
    from ladder.lower.blocks import emitter_for
    from ladder.lower.blocks.candidates import ALL, FEW

    emitter_for(device)
    program, workers = report.program, report.limits.workers
    best: list[Choice] = []
    reasons = ["no tiles divide its sizes"]
    for first in range(0, len(report.found), STRUCTURES):
        choices = [
            Choice(found, program, factors, device, constants)
            for found in report.found[first : first + STRUCTURES]
            for factors in tilings(found.structure.mapping, program, (1, *TILES))
        ]
        few = _each(choices, FEW, workers)
        known = [(choices[n].order(t[0]), n) for n, t in enumerate(few) if isinstance(t, list)]
        reasons += [why for why in few if isinstance(why, str)]
        best = [choices[number] for _, number in sorted(known)[:TILINGS]]
        if best:
            break
    found = [
        (choice.order(trial), trial)
        for choice, trials in zip(best, _each(best, ALL, workers), strict=True)
        if isinstance(trials, list)
        for trial in trials
    ]
    if not found:
        raise ScheduleError(
            f"no verified graph of {program.name} can be lowered to {device.name}: {reasons[-1]}"
        )
    return [trial for _, trial in sorted(found, key=lambda pair: pair[0])[: count + SPARE]]


@dataclass(frozen=True)
class Choice:
    """A verified graph at some tiles."""

    found: Found
    program: Program
    factors: Mapping[str, int]
    device: TileDevice
    constants: tuple[str, ...]

    def trials(self, grid: Grid) -> list[Trial] | str:
        """Return its best schedules, fastest first by the model; or why there is none."""
        from ladder.lower.blocks.candidates import ranked

        try:
            graph = _kernels(self.found, self.program, self.factors)
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
                seconds = sum(e.seconds for e in estimates) + FOLLOWING_SECONDS * (len(plans) - 1)
                trials.append(Trial(lowering, self.found, self.factors, seconds))
            return sorted(trials, key=self.order) or _why_not(graph, self.device)
        except LadderError as error:
            return str(error)

    def _best(self, body: Graph, estimates: Sequence[Ranked]) -> list[Ranked]:
        def order(estimate: Ranked) -> tuple[int, int]:
            return _class_of(estimate.seconds), -self._threads(body, estimate.schedule)

        return sorted(estimates, key=order)[:PER_GRAPH]

    def order(self, trial: Trial) -> tuple[int, int, float]:
        """Return by what trials are sorted: predicted time, then threads, where the model has no opinion."""
        pairs = zip(trial.lowering.blocks, trial.lowering.schedules, strict=True)
        threads = sum(self._threads(node.body, plan) for node, plan in pairs if node.body is not None)
        return _class_of(trial.predicted), -threads, trial.predicted

    def _threads(self, body: Graph, plan: BlockSchedule) -> int:
        """Return the threads of a block graph without a loop that run at once: the model ignores those."""
        if body.loops:
            return 0
        blocks = math.prod(int(axis.extent) for axis in body.grid) * plan.cluster
        return min(blocks, self.device.units) * plan.threads


def _class_of(seconds: float) -> int:
    """Return a number that times within a few percent of each other mostly share."""
    return math.floor(math.log(seconds) / math.log(1 + INDISTINCT))


def _each(choices: Sequence[Choice], grid: Grid, workers: int) -> list[list[Trial] | str]:
    """Return the trials of each choice; in processes, if there is work for them."""
    if workers <= 1 or len(choices) < WORTHWHILE:
        return [choice.trials(grid) for choice in choices]
    with ProcessPoolExecutor(workers) as pool:
        return list(pool.map(Choice.trials, choices, itertools.repeat(grid)))


def _why_not(graph: Graph, device: TileDevice) -> str:
    """Return why no schedule of a kernel graph is legal: what the simplest one lacks."""
    from ladder.lower.blocks import BlockSchedule
    from ladder.lower.blocks.analysis import BlockProgram
    from ladder.lower.blocks.geometry import Geometry

    try:
        for node in graph.nodes:
            if node.body is not None:
                Geometry(BlockProgram.of(node.body), device, BlockSchedule())
    except ScheduleError as error:
        return str(error)
    return "accumulators take too many registers"


def _kernels(found: Found, program: Program, factors: Mapping[str, int]) -> Graph:
    from ladder.lower.blocks.outline import outlined

    return outlined(instantiate(found.structure, program, factors, packed=True))


def built(
    candidates: Sequence[Trial], device: TileDevice, count: int, step: Progress | None = None
) -> list[tuple[Trial, list[Kernel]]]:
    """Build the first ``count`` candidates that can be emitted, side by side; for any device.

    Raises
    ------
    ScheduleError
        If none can, with a reason.
    """
    done: list[tuple[Trial, list[Kernel]]] = []
    reasons: list[str] = []
    left = list(candidates)
    with ThreadPoolExecutor(BUILD_THREADS) as pool:
        while left and len(done) < count:
            batch, left = left[: count - len(done)], left[count - len(done) :]
            tasks = [pool.submit(copy_context().run, _build, trial, device) for trial in batch]
            for trial, task in zip(batch, tasks, strict=True):
                result = task.result()
                if isinstance(result, str):
                    reasons.append(result)
                else:
                    done.append((trial, result))
                if step is not None:
                    step(f"built {len(done)} of {count} kernels", len(done) / count)
    if not done:
        raise ScheduleError(
            f"no candidate can be lowered to {device.name}: {reasons[-1] if reasons else 'there is none'}"
        )
    return done


def _build(trial: Trial, device: TileDevice) -> list[Kernel] | str:
    """Build one candidate, or return why it cannot be emitted."""
    try:
        return find_or_build(trial.lowering.jobs(device))
    except ScheduleError as error:
        return str(error)


def loaded(trials: Sequence[tuple[Trial, list[Kernel]]], device: TileDevice) -> list[tuple[Trial, Fused]]:
    """Return trials whose kernels can be called; the device must be here."""
    return [(trial, Fused(trial.lowering, device, kernels)) for trial, kernels in trials]


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
                found.append((near.seconds, replace(lowering, schedules=changed)))
    fastest = sorted(found, key=lambda pair: pair[0])[:count]
    return [
        replace(best, lowering=other, predicted=seconds, measured=None, error=None)
        for seconds, other in fastest
    ]


# ---- measuring ---------------------------------------------------------------------------------------------
def checked(
    trials: Sequence[tuple[Trial, Fused]], function: Callable[..., Any], inputs: Sequence[Any]
) -> list[tuple[Trial, Fused]]:
    """Return the trials with their errors against float64 on some inputs; those that are right are timed.

    Parameters
    ----------
    function
        What they compute, of tensors (quantized inputs decoded).
    """
    import torch

    with torch.no_grad():
        exact = function(*decoded(inputs, torch.float64)).double()
        own = _relative_error(function(*decoded(inputs)), exact)
    result = []
    for trial, fused in trials:
        given = fused.packed(inputs)
        error = _relative_error(fused(*given), exact)
        right = error <= max(TOLERANCE[trial.lowering.operand], SLACK * own)
        result.append(
            (replace(trial, error=error, measured=_seconds(fused, given) if right else None), fused)
        )
    return result


def _relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    error = float((y.double() - exact).norm()) / (float(exact.norm()) or 1.0)
    return error if math.isfinite(error) else math.inf


def _seconds(fused: Fused, inputs: Sequence[Any]) -> float:
    """Return the median seconds of a call; on a GPU within a CUDA graph, inputs from device memory."""
    import torch

    where = inputs[0].device
    if where.type != "cuda":
        fused(*inputs)
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            fused(*inputs)
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    copies = _copies(inputs)
    fused(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for given in copies:
            fused(*given)
    events: Any = torch.cuda.Event
    times = []
    for _ in range(1 + REPEATS):
        begin, end = events(enable_timing=True), events(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e-3 / len(copies))
    return statistics.median(times[1:])


def _copies(inputs: Sequence[Any]) -> list[list[Any]]:
    """Return the inputs, and copies of them elsewhere."""
    count = min(MOST_COPIES, -(-COLD_BYTES // sum(x.nbytes for x in inputs)))
    return [list(inputs), *([_clone(x) for x in inputs] for _ in range(count - 1))]


def _clone(x: Any) -> Any:
    if not isinstance(x, PackedWeight):
        return x.clone()
    return PackedWeight(x.gemm, x.family, {name: array.clone() for name, array in x.arrays.items()})


# ---- the database ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrialCache:
    """The trials of a search on a device, in a database.

    Parameters
    ----------
    database, report
        Where, and of which search.
    device
        That was built for.
    count
        Kernels that were asked for.
    constants
        As of `Lowering`.
    """

    database: Database
    report: Report
    device: TileDevice
    count: int
    constants: tuple[str, ...]

    @property
    def _facts(self) -> dict[str, Any]:
        found = identity(self.report.program, self.report.limits)
        return {
            **found, "device": self.device.name, "trials": self.count, "constants": self.constants,
            "lowering": source_digest(),
        }  # fmt: skip

    def read(self) -> list[Trial] | None:
        """Return the trials, fastest first; None if there are none."""
        return self.database.read(self._facts, lambda stored: [self._trial(entry) for entry in stored])

    def write(self, trials: Sequence[Trial]) -> None:
        """Keep trials of a complete search."""
        if self.report.complete:
            self.database.write(self._facts, [self._entry(trial) for trial in trials])

    def _entry(self, trial: Trial) -> dict[str, Any]:
        return {
            "found": self.report.found.index(trial.found), "factors": dict(trial.factors),
            "schedules": [asdict(plan) for plan in trial.lowering.schedules], "predicted": trial.predicted,
            "measured": trial.measured, "error": trial.error,
        }  # fmt: skip

    def _trial(self, entry: Mapping[str, Any]) -> Trial:
        found = self.report.found[entry["found"]]
        graph = _kernels(found, self.report.program, entry["factors"])
        plans: tuple[BlockSchedule, ...] = tuple(_schedule(plan) for plan in entry["schedules"])
        known = (entry[name] for name in ("factors", "predicted", "measured", "error"))
        return Trial(Lowering(graph, plans, self.constants), found, *known)


def _schedule(plan: Mapping[str, Any]) -> BlockSchedule:
    from ladder.lower.blocks import BlockSchedule

    return BlockSchedule(**plan)
