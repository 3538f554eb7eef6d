"""Measuring survives kernels that hang or take their process down."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

from ladder.ir.gemm import Gemm
from ladder.runtime.compile_pool import Campaign, Trial
from ladder.runtime.gauge import Gauge
from ladder.runtime.measure import Begin, Dropped, Event, PointDone, Progress, Timed
from schedules.schedule import GpuSchedule
from schedules.tuning import Measurement

GEMM = Gemm(4096, 4096, "int4", group_size=128)
TOKENS = (1, 16, 64)
GOOD, WRONG, HANGS, BREAKS = (GpuSchedule("wgmma", 64, stages=stages) for stages in (2, 3, 4, 5))


def run_trials(campaign: Campaign, done: Progress) -> Iterator[Event]:
    """Do as `ladder.runtime.measure.measure` does, without a GPU; the schedule says how it ends."""
    for m in campaign.tokens:
        if (GEMM, m) in done.points:
            continue
        for trial in campaign.trials:
            yield Begin(trial)
            if trial.schedule == WRONG and m == 1:
                yield Dropped(trial, "is wrong")
            elif trial.schedule == WRONG:
                continue
            elif trial.schedule == HANGS and m == 16:
                time.sleep(60)
            elif trial.schedule == BREAKS and m == 64:
                os._exit(1)
            else:
                yield Timed(GEMM, Measurement(4096, 4096, m, trial.schedule, 1e-6), final=True)
        yield PointDone(GEMM, m)


def break_at_once(campaign: Campaign, done: Progress) -> Iterator[Event]:
    os._exit(1)
    yield PointDone(GEMM, 1)


def campaign_of(*schedules: GpuSchedule) -> Campaign:
    return Campaign([GEMM], TOKENS, "cuda/sm_90a", [Trial(s, Path(str(s)), "entry") for s in schedules])


def test_what_hangs_or_breaks_costs_only_itself() -> None:
    said: list[str] = []
    with Gauge(run_trials, patience=1.0) as gauge:
        rows = [timed.row for timed in gauge.measure(campaign_of(GOOD, WRONG, HANGS, BREAKS), said.append)]
        again = list(gauge.measure(campaign_of(GOOD), said.append))
    assert {row.m for row in rows if row.schedule == GOOD} == set(TOKENS)
    assert {row.m for row in rows if row.schedule == HANGS} == {1}
    assert {row.m for row in rows if row.schedule == BREAKS} == {1, 16}
    assert not [row for row in rows if row.schedule == WRONG]
    assert len(again) == len(TOKENS)
    told = "\n".join(said)
    assert told.count("is wrong") == 1
    assert told.count("hangs or breaks") == 2
    assert "given up" not in told


def test_a_process_that_never_begins_is_given_up() -> None:
    said: list[str] = []
    with Gauge(break_at_once) as gauge:
        assert list(gauge.measure(campaign_of(GOOD), said.append)) == []
    assert "given up" in said[-1]
