"""Compile many schedules in parallel processes; carry them to a machine that has the GPU.

A folder of trials holds one ``.so`` per kernel and ``trials.json``: what was compiled, for which
problems and which M. Measuring it needs the runtime alone (`ladder.runtime.measure`).
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from ladder.forks import follow_parent
from ladder.ir.gemm import Gemm
from ladder.runtime.compile import ANY_M, Request, obtain
from ladder.runtime.cores import usable_cores
from ladder.runtime.packed import gemm_from_dict
from schedules.schedule import Plan, Schedule, parse_schedule
from schedules.tuning import write_json
from tile_types.errors import ArtifactError

MANIFEST = "trials.json"
FORMAT = 1


@dataclass(frozen=True)
class Trial:
    """A compiled schedule.

    schedule: What was compiled.
    library, entry: The ``.so`` and the function in it.
    """

    schedule: Schedule
    library: Path
    entry: str


@dataclass
class Campaign:
    """Problems that are tuned together: those of one class, which share kernels.

    problems: The same `Gemm` at all its extents.
    tokens: The M to measure.
    device: Name of the target.
    trials: What has been compiled.
    random: Whether trials are a random sample, to fit the cost model with; else the best predicted.
    """

    problems: Sequence[Gemm]
    tokens: Sequence[int]
    device: str
    trials: list[Trial] = field(default_factory=list)
    random: bool = False

    def __str__(self) -> str:
        gemm = self.problems[0]
        group = f" g{gemm.group_size}" if gemm.scale else ""
        return f"{gemm.weight}{group} x {gemm.activation}"


class CompilePool:
    """Worker processes that compile; use it in a ``with`` block.

    workers: How many; by default one per core.
    """

    def __init__(self, workers: int = 0) -> None:
        # Spawned: a process that has initialised CUDA must not be forked.
        context = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(
            workers or usable_cores(), mp_context=context, initializer=follow_parent
        )

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def submit(self, gemm: Gemm, device: str, schedules: Iterable[Schedule]) -> list[Future[Trial | str]]:
        """Start compiling; a result is a `Trial`, or the text of what went wrong."""
        return [self._pool.submit(compile_one, gemm, device, schedule) for schedule in schedules]


def compile_one(gemm: Gemm, device: str, schedule: Schedule) -> Trial | str:
    """Build one schedule into the kernel cache."""
    try:
        kernel = obtain(Request(gemm, device, Plan(((ANY_M, schedule),))))[1][0]
    except Exception as error:  # one broken candidate does not end the search
        return f"{schedule}: {type(error).__name__}: {error}"
    return Trial(schedule, kernel.library, kernel.entry)


def gather(tasks: Iterable[Future[Trial | str]], complain: Callable[[str], None]) -> Iterator[Trial]:
    """Yield the trials that compiled; say what did not."""
    for task in tasks:
        result = task.result()
        if isinstance(result, Trial):
            yield result
        else:
            complain(result)


def save(campaigns: Sequence[Campaign], folder: Path) -> int:
    """Write campaigns with their kernels to a folder; return the number of kernels."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for campaign in campaigns:
        kernels = []
        for trial in campaign.trials:
            name = f"{trial.entry}.so"
            shutil.copyfile(trial.library, folder / name)
            kernels.append({"schedule": str(trial.schedule), "library": name, "entry": trial.entry})
        problems = [asdict(gemm) for gemm in campaign.problems]
        fields = {
            "problems": problems,
            "tokens": list(campaign.tokens),
            "device": campaign.device,
            "random": campaign.random,
        }
        rows.append({**fields, "kernels": kernels})
    write_json(folder / MANIFEST, {"format": FORMAT, "campaigns": rows})
    return sum(len(campaign.trials) for campaign in campaigns)


def load(folder: Path) -> list[Campaign]:
    """Read what `save` wrote.

    Raises
    ------
    ArtifactError
        If the folder is no such folder, or of another format.
    """
    try:
        content = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if content["format"] != FORMAT:
            raise ValueError(f"format {content['format']}, this Ladder reads {FORMAT}")
        return [
            Campaign(
                [gemm_from_dict(fields) for fields in row["problems"]],
                row["tokens"],
                row["device"],
                [
                    Trial(parse_schedule(k["schedule"]), folder / Path(k["library"]).name, k["entry"])
                    for k in row["kernels"]
                ],
                row["random"],
            )
            for row in content["campaigns"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(
            f"{folder} holds no trials ({error}); make it with `ladder tune --compile-only --output`"
        ) from error


def at_shapes(gemm: Gemm, shapes: Iterable[tuple[int, int]]) -> list[Gemm]:
    """Return the problem at other extents; a scale per row stays one."""
    grouped = gemm.group_size < gemm.k
    return [replace(gemm, n=n, k=k, group_size=gemm.group_size if grouped else k) for n, k in shapes]
