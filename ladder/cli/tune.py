"""``ladder tune``: measure schedules for some shapes and keep the fastest for later plans."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder.cli.console import Progress
from ladder.cli.problem import Problem, as_here, why_not_here
from ladder.runtime.compile import tuning_database
from ladder.runtime.compile_pool import MANIFEST, Campaign, CompilePool, at_shapes, load, save
from ladder.runtime.gauge import Gauge
from ladder.runtime.tune import Effort, Run, compile_campaigns, finals, measure_all, remember, tune
from schedules.search import TOKENS
from schedules.tuning import Measurement, best_rows
from targets import get_device
from tile_types.errors import DeviceError, ParseError, UnknownNameError
from tile_types.files import require_writable

COLUMNS = ("N", "K", "M", "us", "schedule")


@dataclass(frozen=True)
class Tuned:
    """Result of a tuning run.

    winners: The fastest schedule of every shape and M.
    kernels: How many kernels were compiled or timed.
    folder: Where trials or winners went.
    """

    winners: tuple[Measurement, ...]
    kernels: int
    folder: str

    def as_json(self) -> dict[str, Any]:
        rows = [
            {"n": w.n, "k": w.k, "m": w.m, "us": round(w.seconds * 1e6, 3), "schedule": str(w.schedule)}
            for w in self.winners
        ]
        return {"kernels": self.kernels, "folder": self.folder, "winners": rows}

    def as_rows(self) -> list[tuple[str, ...]]:
        """Return the cells of a table with `COLUMNS`."""
        return [
            (str(w.n), str(w.k), str(w.m), f"{w.seconds * 1e6:.2f}", str(w.schedule)) for w in self.winners
        ]


def campaign_for(problem: Problem, shapes: str, tokens: str) -> Campaign:
    """Return what is tuned together.

    problem: Its class; its N and K are the only shape if ``shapes`` is empty.
    shapes: ``NxK``, separated by commas.
    tokens: M, separated by commas; empty: `schedules.search.TOKENS`.
    Raises ParseError if a shape or an M is no number.
    Raises UnknownNameError if the target is no GPU: CPUs have a measured table of their own.
    """
    if not problem.device.is_gpu:
        raise UnknownNameError(
            f"{problem.device.name} is no GPU and needs no tuning; choose one, e.g. --target cuda/sm_90a"
        )
    extents = [_shape(text) for text in shapes.split(",")] if shapes else [(problem.n, problem.k)]
    counts = [_positive(text) for text in tokens.split(",")] if tokens else list(TOKENS)
    return Campaign(at_shapes(problem.gemm, extents), counts, as_here(problem.device).name)


def _shape(text: str) -> tuple[int, int]:
    n, _, k = text.partition("x")
    return _positive(n), _positive(k)


def _positive(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise ParseError(f"{text!r} is no positive number; shapes are NxK,NxK and tokens are M,M")
    return value


def compile_only(campaign: Campaign, folder: Path, effort: Effort, workers: int, step: Progress) -> Tuned:
    """Compile candidates into a folder: needs no GPU.

    Raises ArtifactError, before compiling, if nothing can be written there.
    """
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    require_writable(folder / MANIFEST)
    with CompilePool(workers) as pool:
        compile_campaigns([campaign], Run(pool, Gauge(), effort, step))
    return Tuned((), save([campaign], folder), str(folder))


def measure_folder(folder: Path, step: Progress) -> Tuned:
    """Measure what `compile_only` wrote, on the machine with the GPU, and keep the winners."""
    campaigns = load(folder)
    for campaign in campaigns:
        _require_gpu(campaign)
        campaign.device = as_here(get_device(campaign.device)).name
    with CompilePool() as pool, Gauge() as gauge:
        run = Run(pool, gauge, Effort(), step)
        for campaign in campaigns:
            measure_all(campaign, run)
    return _kept(campaigns, run)


def run_tune(campaign: Campaign, effort: Effort, workers: int, step: Progress) -> Tuned:
    """Compile and measure here, and keep the winners."""
    _require_gpu(campaign)
    with CompilePool(workers) as pool, Gauge() as gauge:
        run = Run(pool, gauge, effort, step)
        tune([campaign], run)
    return _kept([campaign], run)


def _require_gpu(campaign: Campaign) -> None:
    reason = why_not_here(get_device(campaign.device))
    if reason:
        raise DeviceError(f"{reason}; `ladder tune --compile-only --output DIR` prepares trials for it")


def _kept(campaigns: Iterable[Campaign], run: Run) -> Tuned:
    """Put the winners into the user's database."""
    database, measured = tuning_database(), finals(run.timed)
    for name in {campaign.device for campaign in campaigns}:
        remember(database, get_device(name), measured)
    kernels = len({event.row.schedule for event in run.timed})
    winners = [row for rows in measured.values() for row in best_rows(rows)]
    return Tuned(tuple(winners), kernels, str(database.directory))


def parse_effort(kernels: int, seconds: float) -> Effort:
    """Return the limits of a run: a third as many neighbours of winners as first candidates."""
    return Effort(kernels, kernels // 3, seconds)
