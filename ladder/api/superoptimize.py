"""`superoptimize`: from a torch function to kernels that are searched, proved, built, checked and timed."""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ladder.api.tensor_program import program_of
from ladder.ir.graph import Graph
from ladder.runtime.compile import target_of
from ladder.runtime.fused import Fused, Lowering
from ladder.superopt.generator import Found, Limits, Program, Report, instantiate, search
from ladder.superopt.generator.choose import tilings
from ladder.superopt.verifier import Certificate, Stability, verify_equal
from tile_types.errors import DeviceError, LadderError, ScheduleError, VerificationError

if TYPE_CHECKING:
    import torch

    from ladder.lower.blocks.candidates import Grid
    from targets import TileDevice

Progress = Callable[[str, float | None], None]

TILES = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Extents of a split dimension in a tile that are tried."""

STRUCTURES = 4
"""Verified graphs, cheapest first, that are lowered."""

TRIALS = 16
"""Kernels that are built and timed."""

TILINGS = 12
"""Choices of tiles, best first with a few schedules, of which all schedules are considered."""

SPARE = 4
"""Candidates per kernel that is built: some cannot be emitted after all."""

PER_GRAPH = 2
"""Schedules of one graph at one choice of tiles that are among them."""

TOLERANCE = 2e-2
"""Largest relative Frobenius error against float64 that a kernel may have, or twice the function's own."""

REPEATS = 7

WITHOUT_GPU = Limits()
"""Search limits where there is no shared memory to respect: those of an H200."""


@dataclass(frozen=True)
class Trial:
    """A lowering, the graph it comes from, and what is known of its speed.

    Parameters
    ----------
    lowering
        Kernels and schedules.
    found
        The verified graph.
    predicted
        Seconds by the model.
    measured
        Seconds on this machine, if it was timed.
    error
        Relative Frobenius error against float64 on the inputs given, if it ran.
    """

    lowering: Lowering
    found: Found
    predicted: float
    measured: float | None = None
    error: float | None = None


@dataclass(frozen=True)
class Superoptimized:
    """A function as fused kernels.

    Parameters
    ----------
    program
        What was optimised.
    report
        Of the search: states, pruned, candidates, verified, rejected.
    trials
        What was built, fastest first.
    run
        The fastest, loaded.
    """

    program: Program
    report: Report
    trials: tuple[Trial, ...]
    run: Callable[..., Any]

    def __call__(self, *inputs: torch.Tensor) -> Any:
        """Run the fastest kernels; takes contiguous tensors of the shapes that were optimised for."""
        return self.run(*inputs)

    @property
    def best(self) -> Trial:
        """The trial that `__call__` runs."""
        return self.trials[0]

    @property
    def graph(self) -> Graph:
        """The kernel graph that `__call__` runs."""
        return self.best.lowering.graph

    @property
    def certificate(self) -> Certificate:
        """The proof that it equals the function, with the bound on its error."""
        return self.best.found.certificate

    @property
    def stability(self) -> Stability:
        """Its floating-point behaviour, against float64."""
        return self.best.found.stability

    def as_json(self) -> dict[str, Any]:
        """Return what a report shows."""
        counts = self.report.counts
        return {
            "program": self.program.name, "sizes": dict(self.program.sizes), "delta": self.certificate.delta,
            "verified": len(self.report.found), "states": counts.states, "pruned": counts.pruned,
            "rejected": counts.rejected, "seconds": self.report.seconds,
            "certificate": self.certificate.as_json(), "graph": str(self.graph),
            "trials": [
                {"schedules": [str(plan) for plan in trial.lowering.schedules], "predicted": trial.predicted,
                 "measured": trial.measured, "error": trial.error}
                for trial in self.trials
            ],
        }  # fmt: skip


def superoptimize(
    function: Callable[..., Any],
    inputs: Sequence[torch.Tensor],
    *,
    limits: Limits | None = None,
    target: str | None = None,
    trials: int = TRIALS,
    checkpoint: Path | None = None,
    seed: int | None = None,
    step: Progress | None = None,
) -> Superoptimized:
    """Search, prove, build and time fused kernels for a function.

    Parameters
    ----------
    function
        Takes the tensors and returns one: matrix products, element-wise operators, sums, maxima,
        softmax, root mean squares.
    inputs
        Examples: kernels are made for their shapes, types and device.
    limits
        Of the search; by default those of the device.
    target
        Device to build for, if not that of the inputs: nothing is run or timed then.
    trials
        Kernels that are built, best first by a model; the fastest is taken.
    checkpoint
        File from which an interrupted search goes on.
    seed
        Of the proofs; by default fresh entropy.
    step
        Told what is being done.

    Returns
    -------
    Superoptimized
        A callable with its certificate.

    Raises
    ------
    ConversionError
        Names what of the function block graphs cannot express.
    VerificationError
        Names what of it is outside LAX, so that equality cannot be decided.
    ScheduleError
        If no graph was found, or none can be lowered.
    """
    from targets import get_device

    here = target_of(inputs[0].device)
    device = get_device(target or here)
    program = program_of(function, inputs)
    require_provable(program)
    limits = limits or (Limits().on(device.name) if device.is_gpu else WITHOUT_GPU)
    report = search(program, limits, checkpoint=checkpoint, step=step, seed=seed)
    if not report.found:
        why = "in the time given" if not report.complete else f"of up to {limits.operators} operators"
        raise ScheduleError(f"no block graph {why} equals {program.name}; allow more operators or seconds")
    candidates = candidates_of(report, device, trials)
    built = _built(candidates, device, trials, step)
    if device.name != here:
        order = tuple(trial for trial, _ in built)
        return Superoptimized(program, report, order, _elsewhere(device.name))
    timed = [_measured(trial, fused, function, inputs) for trial, fused in built]
    good = sorted(
        (
            (trial, fused)
            for trial, (_, fused) in zip(timed, built, strict=True)
            if trial.measured is not None
        ),
        key=lambda pair: float(pair[0].measured or 0.0),
    )
    if not good:
        errors = [f"{trial.error:.1e}" for trial in timed if trial.error is not None]
        raise VerificationError(
            f"no kernel of {program.name} is accurate: relative errors {', '.join(errors)}"
        )
    return Superoptimized(program, report, tuple(trial for trial, _ in good), good[0][1])


def require_provable(program: Program) -> None:
    """Check that equality with a program can be decided at all.

    Raises
    ------
    VerificationError
        Names what is outside LAX.
    """
    small = program.graph(dict.fromkeys(program.sizes, 2))
    certificate = verify_equal(small, small, seed=0)
    if certificate.verdict == "refused":
        raise VerificationError(f"{program.name} is not optimised: {certificate.reason}")


def candidates_of(report: Report, device: TileDevice, count: int) -> list[Trial]:
    """Return lowerings of the verified graphs at all tiles, best first by the model.

    Raises
    ------
    ScheduleError
        If there is none, with a reason.
    """
    from ladder.lower.blocks.candidates import ALL, FEW

    tiled: list[tuple[float, int, Found, Graph]] = []
    reason = "no tiles divide its sizes"
    for graph in report.found[:STRUCTURES]:
        for factors in tilings(graph.structure.mapping, report.program, (1, *TILES)):
            try:
                kernels = instantiate(graph.structure, report.program, factors)
                best = min((t.predicted for t in _lowerings(graph, kernels, device, FEW)), default=math.inf)
                tiled.append((best, len(tiled), graph, kernels))
            except LadderError as error:
                reason = str(error)
    found: list[Trial] = []
    for _, _, graph, kernels in sorted(tiled, key=lambda entry: entry[:2])[:TILINGS]:
        found += _lowerings(graph, kernels, device, ALL)
    if not found:
        raise ScheduleError(
            f"no verified graph of {report.program.name} can be lowered to {device.name}: {reason}"
        )
    return sorted(found, key=lambda trial: trial.predicted)[: SPARE * count]


def _lowerings(found: Found, graph: Graph, device: TileDevice, grid: Grid) -> list[Trial]:
    """Return the best schedules of a kernel graph."""
    from ladder.lower.blocks.candidates import ranked

    per_block = []
    for node in graph.nodes:
        if node.body is not None:
            per_block.append(ranked(node.body, device, grid)[:PER_GRAPH])
    trials = []
    for estimates in itertools.product(*per_block):
        plans = tuple(estimate.schedule for estimate in estimates)
        trials.append(Trial(Lowering(graph, plans), found, sum(e.seconds for e in estimates)))
    return trials


def _built(
    candidates: Sequence[Trial], device: TileDevice, count: int, step: Progress | None
) -> list[tuple[Trial, Fused]]:
    """Build the first ``count`` candidates; those that cannot be emitted after all are passed over."""
    from ladder.runtime.build import find_or_build

    built: list[tuple[Trial, Fused]] = []
    reason = ""
    for trial in candidates:
        if len(built) == count:
            break
        try:
            kernels = find_or_build(trial.lowering.jobs(device))
            built.append((trial, Fused(trial.lowering, device, kernels)))
        except ScheduleError as error:
            reason = str(error)
        if step is not None:
            step(f"built {len(built)} of {count} kernels", len(built) / count)
    if not built:
        raise ScheduleError(f"no candidate can be lowered to {device.name}: {reason}")
    return built


def _measured(
    trial: Trial, fused: Fused, function: Callable[..., Any], inputs: Sequence[torch.Tensor]
) -> Trial:
    """Check a trial against float64, and time it if it is right."""
    import torch

    with torch.no_grad():
        exact = function(*(x.double() for x in inputs)).double()
        own = _relative_error(function(*inputs), exact)
    error = _relative_error(fused(*inputs), exact)
    if not error <= max(TOLERANCE, 2 * own):
        return replace(trial, error=error)
    return replace(trial, error=error, measured=_seconds(lambda: fused(*inputs), inputs[0].device.type))


def _relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    error = float((y.double() - exact).norm() / exact.norm())
    return error if math.isfinite(error) else math.inf


def _seconds(call: Callable[[], Any], where: str) -> float:
    """Return the median seconds of a call; on a GPU, within a CUDA graph."""
    import torch

    if where != "cuda":
        call()
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        return statistics.median(times)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    events: Any = torch.cuda.Event
    marks = [events(enable_timing=True) for _ in range(2)]
    graph.replay()
    marks[0].record()
    graph.replay()
    marks[1].record()
    torch.cuda.synchronize()
    return float(marks[0].elapsed_time(marks[1])) * 1e-3 / REPEATS


def _elsewhere(device: str) -> Callable[..., Any]:
    def run(*inputs: torch.Tensor) -> Any:
        raise DeviceError(f"these kernels were built for {device}, which is not here; superoptimize there")

    return run
