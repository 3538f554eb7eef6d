"""The model and plans for 65 to 2048 rows beside an H200, at shapes most of which no tuning row names.

``measured_middle.json`` holds the finals of contests: the fastest few of about eleven schedules, and those
that plans chose before and after the model was fitted to other shapes.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.fit_cost_model import judge, read
from benchmarks.gpu_gemm import Case, problem
from schedules.policy import make_plan
from schedules.schedule import GpuSchedule
from targets import get_device

MEASURED = str(Path(__file__).parent / "measured_middle.json")
CONTESTS = read([MEASURED], "cuda/sm_90a")
MEAN_REGRET, WORST_REGRET = 1.02, 1.15
MOST_PADDING = 1.25


@pytest.mark.parametrize("weight", sorted({contest.gemm.weight for contest in CONTESTS}))
def test_first_choices_are_nearly_the_fastest(weight: str) -> None:
    some = [contest for contest in CONTESTS if contest.gemm.weight == weight]
    assert len(some) >= 35
    quality = judge(some, "cuda/sm_90a")
    assert np.exp(np.log(quality.regrets).mean()) <= MEAN_REGRET
    assert max(quality.regrets) <= WORST_REGRET
    assert np.median(quality.errors) <= 0.1


@pytest.mark.parametrize(("n", "k"), [(5120, 25600), (17088, 12160)])
def test_tiles_follow_the_rows(n: int, k: int) -> None:
    plan = make_plan(problem(Case("int4", "float16", 128), n, k), get_device("cuda/sm_90a"))
    for m in (80, 96, 128, 160, 200, 256):
        schedule = plan.schedule_for(m)
        assert isinstance(schedule, GpuSchedule)
        assert -(-m // schedule.tile_m) * schedule.tile_m <= MOST_PADDING * m
