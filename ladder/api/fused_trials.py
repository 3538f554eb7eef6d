"""Kernels of verified graphs: built side by side, checked against float64, timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from ladder.api.tensor_program import decoded
from ladder.lower.blocks import BlockSchedule
from ladder.runtime.build import BUILD_THREADS, Kernel, find_or_build
from ladder.runtime.cache import source_digest
from ladder.runtime.fused import Fused, Lowering
from ladder.runtime.packed import PackedWeight
from ladder.runtime.recording import recorded
from ladder.runtime.spills import refuse_spills
from ladder.runtime.trials import Trial, kernels_at
from ladder.superopt.generator import Database, Report
from ladder.superopt.generator.stored import identity
from ladder.superopt.verifier import SLACK
from tile_types.errors import ScheduleError
from tile_types.quantized import QuantizedTensor

if TYPE_CHECKING:
    import torch

    from targets import TileDevice

Progress = Callable[[str, float | None], None]

TOLERANCE: Mapping[str, float] = {"float32": 2e-5, "float16": 4 * 2.0**-10, "bfloat16": 4 * 2.0**-7}
"""Largest relative Frobenius error against float64, or `SLACK` times the function's own: of halves four units
in the last place, of float32 what sums of thousands add up to."""

REPEATS, LEAST_SECONDS = 7, 1e-3
"""Timings of which the median is taken, each of a CUDA graph of so many seconds."""

COLD_BYTES, MOST_COPIES = 240 << 20, 128
"""On a GPU calls take turns with copies of the inputs that L2 cannot hold together, up to so many."""

FINALISTS, FINALIST_SLOWER, TURNS = 6, 1.1, 3
"""Kernels that are timed again by turns, how much slower than the fastest they may be, and how often."""


def built(
    candidates: Sequence[Trial], device: TileDevice, count: int, step: Progress | None = None
) -> list[tuple[Trial, list[Kernel]]]:
    """Build the first ``count`` candidates that can be emitted, side by side; for any device.

    Raises ScheduleError if none can, with a reason.
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
    """Build one candidate, or return why it cannot be emitted or is not wanted."""
    try:
        return refuse_spills(find_or_build(trial.lowering.jobs(device)), device)
    except ScheduleError as error:
        return str(error)


def loaded(trials: Sequence[tuple[Trial, list[Kernel]]], device: TileDevice) -> list[tuple[Trial, Fused]]:
    """Return trials whose kernels can be called; the device must be here."""
    return [(trial, Fused(trial.lowering, device, kernels)) for trial, kernels in trials]


# ---- measuring ---------------------------------------------------------------------------------------------
def checked(
    trials: Sequence[tuple[Trial, Fused]], function: Callable[..., Any], inputs: Sequence[Any]
) -> list[tuple[Trial, Fused]]:
    """Return the trials with their errors against float64 on some inputs; those that are right are timed.

    Nothing is compared where the function, in float64 or its own types, gives infinity or NaN.

    function: What they compute, of tensors (quantized inputs decoded).
    """
    import torch

    with torch.no_grad():
        exact = function(*decoded(inputs, torch.float64)).double()
        theirs = function(*decoded(inputs))
    finite = exact.isfinite() & theirs.isfinite()
    own = _relative_error(theirs[finite], exact[finite])
    result = []
    for trial, fused in trials:
        given = fused.packed(inputs)
        error = _relative_error(fused(*given)[finite], exact[finite])
        right = error <= max(TOLERANCE[trial.lowering.operand], SLACK * own)
        result.append(
            (replace(trial, error=error, measured=_seconds(fused, given) if right else None), fused)
        )
    return result


def in_turns(trials: Sequence[tuple[Trial, Fused]], inputs: Sequence[Any]) -> list[tuple[Trial, Fused]]:
    """Return timed trials, fastest first: the nearly fastest are timed again, and their medians count.

    Each time copies lie elsewhere in memory, which alone changes some kernels' times by 5 % (H200): the least
    would be that of a lucky place.
    """
    most = FINALIST_SLOWER * seconds_of(trials[0])
    finals = [pair for pair in trials if seconds_of(pair) <= most][:FINALISTS]
    times = [[seconds_of(pair)] for pair in finals]
    for _ in range(TURNS if len(finals) > 1 else 0):
        for each, (_, fused) in zip(times, finals, strict=True):
            each.append(_seconds(fused, fused.packed(inputs)))
    timed = [
        (replace(trial, measured=statistics.median_low(each)), fused)
        for each, (trial, fused) in zip(times, finals, strict=True)
    ]
    return sorted(timed, key=seconds_of) + list(trials[len(finals) :])


def seconds_of(pair: tuple[Trial, Fused]) -> float:
    """Return what a timed trial takes."""
    assert pair[0].measured is not None
    return pair[0].measured


def _relative_error(y: torch.Tensor, exact: torch.Tensor) -> float:
    error = float((y.double() - exact).norm()) / (float(exact.norm()) or 1.0)
    return error if math.isfinite(error) else math.inf


def torch_seconds(function: Callable[..., Any], inputs: Sequence[Any]) -> float:
    """Return the median seconds of a call without gradients; infinity if inputs are quantized."""
    import torch

    if any(isinstance(given, QuantizedTensor) for given in inputs):
        return math.inf  # torch has no products of these: it would decode them in every call
    with torch.no_grad():
        return _seconds(function, inputs)


def _seconds(fused: Callable[..., Any], inputs: Sequence[Any]) -> float:
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
    once = len(copies) * statistics.median(_replayed(fused, copies, 1))
    return statistics.median(_replayed(fused, copies * math.ceil(LEAST_SECONDS / once), REPEATS))


def _replayed(fused: Callable[..., Any], calls: Sequence[Sequence[Any]], repeats: int) -> list[float]:
    """Return the seconds of a call in a CUDA graph of several, of each replay after the first."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with recorded(graph):
        for given in calls:
            fused(*given)
    events: Any = torch.cuda.Event
    times = []
    for _ in range(1 + repeats):
        begin, end = events(enable_timing=True), events(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(float(begin.elapsed_time(end)) * 1e-3 / len(calls))
    return times[1:]


def _copies(inputs: Sequence[Any]) -> list[list[Any]]:
    """Return the inputs, and copies of them elsewhere."""
    count = min(MOST_COPIES, -(-COLD_BYTES // sum(x.nbytes for x in inputs)))
    return [list(inputs), *([_clone(x) for x in inputs] for _ in range(count - 1))]


def _clone(x: Any) -> Any:
    if not isinstance(x, PackedWeight):
        return x.clone()
    return replace(x, arrays={name: array.clone() for name, array in x.arrays.items()})


# ---- the database ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TrialCache:
    """The trials of a search on a device, in a database.

    database, report: Where, and of which search.
    device: That was built for.
    count: Kernels that were asked for.
    constants: As of `Lowering`.
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

    def read(self) -> tuple[list[Trial], float] | None:
        """Return the trials, fastest first, and what torch takes; None if there are none."""
        return self.database.read(
            self._facts,
            lambda stored: ([self._trial(entry) for entry in stored["trials"]], float(stored["torch"])),
        )

    def write(self, trials: Sequence[Trial], torch: float) -> None:
        """Keep trials of a complete search, and the seconds that torch takes."""
        if self.report.complete:
            entries = [self._entry(trial) for trial in trials]
            self.database.write(self._facts, {"trials": entries, "torch": torch})

    def _entry(self, trial: Trial) -> dict[str, Any]:
        return {
            "found": self.report.found.index(trial.found), "factors": dict(trial.factors),
            "schedules": [asdict(plan) for plan in trial.lowering.schedules], "predicted": trial.predicted,
            "measured": trial.measured, "error": trial.error,
        }  # fmt: skip

    def _trial(self, entry: Mapping[str, Any]) -> Trial:
        found = self.report.found[entry["found"]]
        graph = kernels_at(found, self.report.program, entry["factors"])
        plans: tuple[BlockSchedule, ...] = tuple(_schedule(plan) for plan in entry["schedules"])
        known = (entry[name] for name in ("factors", "predicted", "measured", "error"))
        return Trial(Lowering(graph, plans, self.constants), found, *known)


def _schedule(plan: Mapping[str, Any]) -> BlockSchedule:
    return BlockSchedule(**plan)
