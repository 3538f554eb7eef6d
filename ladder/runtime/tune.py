"""Tuning: compile the candidates of each class, measure them, then try the neighbours of the winners.

While one class is measured, the next ones compile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

from ladder.ir.gemm import Gemm
from ladder.runtime.farm import Campaign, Farm, Trial, gather
from ladder.runtime.gauge import Gauge
from schedules.schedule import Schedule
from schedules.search import refinements, sample, shortlist
from schedules.tuning import Measurement, TuningDatabase, best_rows
from targets import get_device

Report = Callable[[str], None]
Measured = dict[Gemm, list[Measurement]]


@dataclass(frozen=True)
class Effort:
    """How much a tuning run may spend.

    Parameters
    ----------
    kernels
        Candidates per class in the first round.
    refined
        Neighbours of winners per class in the second round.
    seconds
        No new class is begun in the second round after this.
    """

    kernels: int = 64
    refined: int = 24
    seconds: float = float("inf")


@dataclass
class Run:
    """One tuning run.

    Parameters
    ----------
    farm
        Where kernels are compiled.
    gauge
        Where they are measured.
    effort
        Its limits.
    report
        Gets a line on each step and each failure.
    started
        When it began.
    everyone
        Quick times of all that was tried, for fitting the cost model.
    """

    farm: Farm
    gauge: Gauge
    effort: Effort
    report: Report
    started: float = field(default_factory=time.perf_counter)
    everyone: list[tuple[Gemm, Measurement]] = field(default_factory=list)

    def first_round(self, campaign: Campaign) -> list[Future[Trial | str]]:
        """Start compiling the best predicted candidates of a class."""
        device = get_device(campaign.device)
        points = [(gemm, m) for gemm in campaign.problems for m in campaign.tokens]
        choose = sample if campaign.random else shortlist
        chosen = choose(device, points, self.effort.kernels)
        return self.farm.submit(campaign.problems[0], campaign.device, chosen)

    def second_round(self, campaign: Campaign, measured: Measured) -> list[Future[Trial | str]]:
        """Start compiling neighbours of the schedules that won most points."""
        tried = [trial.schedule for trial in campaign.trials]
        chosen = refinements(get_device(campaign.device), winners(measured), tried, self.effort.refined)
        return self.farm.submit(campaign.problems[0], campaign.device, chosen)

    def note(self, text: str) -> None:
        """Report with the time since the start."""
        self.report(f"[{time.perf_counter() - self.started:5.1f} s] {text}")

    def in_time(self) -> bool:
        """Tell whether there is time for more."""
        return time.perf_counter() - self.started < self.effort.seconds


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


def tune(campaigns: Sequence[Campaign], run: Run) -> Iterator[tuple[Campaign, Measured]]:
    """Yield what was measured for each class, twice where there is time: again after the second round."""
    first = [run.first_round(campaign) for campaign in campaigns]
    measured: list[Measured] = []
    second: list[list[Future[Trial | str]]] = []
    for campaign, tasks in zip(campaigns, first, strict=True):
        campaign.trials += gather(tasks, run.note)
        run.note(f"{campaign}: {len(campaign.trials)} kernels compiled")
        measured.append(measure_all(campaign, run.gauge, run.note, run.everyone))
        run.note(f"{campaign}: measured")
        yield campaign, measured[-1]
        second.append(run.second_round(campaign, measured[-1]) if run.in_time() else [])
    for campaign, rows, tasks in zip(campaigns, measured, second, strict=True):
        if not tasks or not run.in_time():
            continue
        # Winners compete again, so that times of one point come from one contest.
        best = {schedule for _, schedule in winners(rows)}
        kept = [trial for trial in campaign.trials if trial.schedule in best]
        again = replace(campaign, trials=[*kept, *gather(tasks, run.note)])
        yield campaign, merged(rows, measure_all(again, run.gauge, run.note, run.everyone))
        run.note(f"{campaign}: refined")


def measure_all(
    campaign: Campaign, gauge: Gauge, report: Report, everyone: list[tuple[Gemm, Measurement]] | None = None
) -> Measured:
    """Return the finalists of a campaign by problem; quick times go to ``everyone``."""
    found: Measured = {}
    for timed in gauge.measure(campaign, report):
        if timed.final:
            found.setdefault(timed.gemm, []).append(timed.row)
        elif everyone is not None:
            everyone.append((timed.gemm, timed.row))
    return found


def merged(old: Mapping[Gemm, list[Measurement]], new: Mapping[Gemm, list[Measurement]]) -> Measured:
    """Return the newer contest of every point, and the older one where there is no newer."""
    result: Measured = {}
    for gemm in {**old, **new}:
        later = new.get(gemm, [])
        points = {row.m for row in later}
        result[gemm] = [*later, *(row for row in old.get(gemm, []) if row.m not in points)]
    return result


def remember(database: TuningDatabase, campaign: Campaign, measured: Measured) -> int:
    """Record the winner of every point in the user's database; return how many."""
    device, count = get_device(campaign.device), 0
    for gemm, rows in measured.items():
        for row in best_rows(rows):
            database.record(device, gemm, row.m, row.schedule, row.seconds)
            count += 1
    return count
