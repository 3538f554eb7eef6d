"""Tuning: compile the candidates of each class, measure them, then try the neighbours of the winners.

While one class is measured, the next ones compile.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ladder.ir.gemm import Gemm
from ladder.runtime.compile import tuning_database
from ladder.runtime.compile_pool import Campaign, CompilePool, Trial, gather
from ladder.runtime.gauge import Gauge
from ladder.runtime.measure import Timed
from schedules.legal import is_legal
from schedules.schedule import GpuSchedule, Schedule
from schedules.search import refinements, sample, shortlist
from schedules.tuning import Measurement, TuningDatabase, best_rows
from targets import TileDevice, get_device

Report = Callable[[str], None]
Measured = dict[Gemm, list[Measurement]]


@dataclass(frozen=True)
class Effort:
    """How much a tuning run may spend.

    kernels: Candidates per class in the first round.
    refined: Neighbours of winners per class in the second round.
    seconds: No new class is begun in the second round after this.
    """

    kernels: int = 64
    refined: int = 24
    seconds: float = float("inf")


@dataclass
class Run:
    """One tuning run.

    pool: Where kernels are compiled.
    gauge: Where they are measured.
    effort: Its limits.
    report: Gets a line on each step and each failure.
    started: When it began.
    timed: All that was measured, in order.
    """

    pool: CompilePool
    gauge: Gauge
    effort: Effort
    report: Report
    started: float = field(default_factory=time.perf_counter)
    timed: list[Timed] = field(default_factory=list)

    def first_round(self, campaign: Campaign) -> list[Future[Trial | str]]:
        """Start compiling candidates: earlier winners of this and similar classes, and the predicted best."""
        device, most = get_device(campaign.device), self.effort.kernels
        points = [(gemm, m) for gemm in campaign.problems for m in campaign.tokens]
        if campaign.random:
            chosen = sample(device, points, most)
        else:
            known = known_winners(device, campaign.problems[0])[: most // 2]
            others = [s for s in relatives_winners(device, campaign.problems[0]) if s not in known]
            tried = [*known, *others[: most // 3]]
            chosen = list(dict.fromkeys([*tried, *shortlist(device, points, most)]))[:most]
        return self.pool.submit(campaign.problems[0], campaign.device, chosen)

    def second_round(self, campaign: Campaign, measured: Measured) -> list[Future[Trial | str]]:
        """Start compiling neighbours of the schedules that won most points."""
        tried = [trial.schedule for trial in campaign.trials]
        chosen = refinements(get_device(campaign.device), winners(measured), tried, self.effort.refined)
        return self.pool.submit(campaign.problems[0], campaign.device, chosen)

    def note(self, text: str) -> None:
        """Report with the time since the start."""
        self.report(f"[{time.perf_counter() - self.started:5.1f} s] {text}")

    def in_time(self) -> bool:
        """Tell whether there is time for more."""
        return time.perf_counter() - self.started < self.effort.seconds


def known_winners(device: TileDevice, gemm: Gemm) -> list[Schedule]:
    """Return the legal schedules that won a point of the class so far, those that won most first."""
    return _most_wins(device, gemm, [tuning_database().measurements(device, gemm)])


def relatives_winners(device: TileDevice, gemm: Gemm) -> list[Schedule]:
    """Return the same of classes that move as many bytes to the same cores: what one found may suit all."""
    return _most_wins(device, gemm, tuning_database().relatives(device, gemm))


def _most_wins(device: TileDevice, gemm: Gemm, classes: Iterable[Sequence[Measurement]]) -> list[Schedule]:
    rows = [row for found in classes for row in best_rows(found)]
    wins = Counter(row.schedule for row in rows if isinstance(row.schedule, GpuSchedule))
    return [schedule for schedule, _ in wins.most_common() if is_legal(gemm, device, schedule)]


def winners(measured: Measured) -> list[tuple[Gemm, Schedule]]:
    """Return the schedules that won a point, those that won most points first."""
    wins: dict[Schedule, list[Gemm]] = {}
    for gemm, rows in measured.items():
        for row in best_rows(rows):
            wins.setdefault(row.schedule, []).append(gemm)
    ordered = sorted(wins, key=lambda schedule: -len(wins[schedule]))
    return [(wins[schedule][0], schedule) for schedule in ordered]


def compile_campaigns(campaigns: Sequence[Campaign], run: Run) -> None:
    """Compile the first round of every campaign, nothing else: for a machine without a GPU."""
    tasks = [run.first_round(campaign) for campaign in campaigns]
    for campaign, futures in zip(campaigns, tasks, strict=True):
        campaign.trials += gather(futures, run.note)
        run.note(f"{campaign}: {len(campaign.trials)} kernels")


def tune(campaigns: Sequence[Campaign], run: Run) -> None:
    """Measure every class, and again with the neighbours of its winners where there is time."""
    second: list[list[Future[Trial | str]]] = []
    with ThreadPoolExecutor(1) as planner:  # candidates are chosen while others compile and run
        first = [planner.submit(run.first_round, campaign) for campaign in campaigns]
        for campaign, planned in zip(campaigns, first, strict=True):
            campaign.trials += gather(planned.result(), run.note)
            run.note(f"{campaign}: {len(campaign.trials)} kernels compiled")
            found = measure_all(campaign, run)
            run.note(f"{campaign}: measured")
            second.append(run.second_round(campaign, found) if run.in_time() else [])
            campaign.trials[:] = _best(campaign.trials, found)
    for campaign, tasks in zip(campaigns, second, strict=True):
        if tasks and run.in_time():
            # Winners compete again, so that the times of one point come from one contest.
            campaign.trials += gather(tasks, run.note)
            measure_all(campaign, run)
            run.note(f"{campaign}: refined")


def _best(trials: Iterable[Trial], measured: Measured) -> list[Trial]:
    """Return the trials that won a point."""
    best = {schedule for _, schedule in winners(measured)}
    return [trial for trial in trials if trial.schedule in best]


def measure_all(campaign: Campaign, run: Run) -> Measured:
    """Measure a campaign's trials; return the finalists by problem."""
    start = len(run.timed)
    run.timed.extend(run.gauge.measure(campaign, run.note))
    return finals(run.timed[start:])


def finals(timed: Iterable[Timed]) -> Measured:
    """Return the finalists by problem; of one schedule at one point the latest time counts."""
    found: dict[Gemm, dict[tuple[int, Schedule], Measurement]] = {}
    for event in timed:
        if event.final:
            found.setdefault(event.gemm, {})[event.row.m, event.row.schedule] = event.row
    return {gemm: list(rows.values()) for gemm, rows in found.items()}


def remember(database: TuningDatabase, device: TileDevice, measured: Measured) -> int:
    """Record the winner of every point in the user's database; return how many."""
    count = 0
    for gemm, rows in measured.items():
        for row in best_rows(rows):
            database.record(device, gemm, row.m, row.schedule, row.seconds)
            count += 1
    return count
