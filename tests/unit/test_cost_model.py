"""The GPU cost model against runs on an H200: what its first choice loses, and its absolute times.

``measured_gpu.json`` is a sample of what ``benchmarks.gpu_tune --random`` measured, as
``benchmarks.fit_cost_model --sample`` writes it: of each shape and M the six fastest schedules and
six others.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from ladder.ir.gemm import Gemm
from schedules.cost_grid import usable_units
from schedules.cost_model import predict
from schedules.legal import is_legal
from schedules.policy import rank
from schedules.schedule import GpuSchedule, parse_schedule
from targets import get_device

H200 = get_device("cuda/sm_90a")
OUTPUTS = {"int8": "float32", "fp8_e4m3": "float16"}
Point = tuple[Gemm, int]

WORST_REGRET, MEDIAN_REGRET, MEAN_REGRET = 1.45, 1.06, 1.09
"""Time of the first choice over the fastest measured."""


def _load() -> dict[Point, dict[GpuSchedule, float]]:
    """Read seconds per (problem, M) and schedule."""
    measured: dict[Point, dict[GpuSchedule, float]] = {}
    for part in json.loads((Path(__file__).parent / "measured_gpu.json").read_text())["classes"]:
        schedules = [parse_schedule(text) for text in part["schedules"]]
        fields = part["class"]
        for n, k, m, place, us in part["rows"]:
            output = OUTPUTS.get(fields["activation"], fields["activation"])
            gemm = Gemm(n, k, output=output, **{**fields, "group_size": fields["group_size"] or k})
            schedule = schedules[place]
            assert isinstance(schedule, GpuSchedule)
            if is_legal(gemm, H200, schedule):
                measured.setdefault((gemm, m), {})[schedule] = us * 1e-6
    return {point: times for point, times in measured.items() if len(times) > 3}


MEASURED = _load()


def _predicted(point: Point) -> dict[GpuSchedule, float]:
    return {schedule: predict(point[0], H200, schedule, point[1]).seconds for schedule in MEASURED[point]}


def _regret(point: Point, predicted: dict[GpuSchedule, float]) -> float:
    first = min(predicted, key=lambda schedule: predicted[schedule])
    return MEASURED[point][first] / min(MEASURED[point].values())


def test_what_was_measured_can_still_run() -> None:
    assert len(MEASURED) >= 20
    assert {schedule.pipeline for times in MEASURED.values() for schedule in times} == {"gemv", "wgmma"}


def test_first_choices_are_nearly_the_fastest() -> None:
    regrets = [_regret(point, _predicted(point)) for point in MEASURED]
    assert median(regrets) <= MEDIAN_REGRET
    assert sum(regrets) / len(regrets) <= MEAN_REGRET
    assert max(regrets) <= WORST_REGRET


def test_times_are_nearly_as_measured() -> None:
    """Issue 4 asks for a median error of at most 15 %; what is near the fastest is what gets chosen."""
    errors = [
        abs(seconds / MEASURED[point][schedule] - 1)
        for point in MEASURED
        for schedule, seconds in _predicted(point).items()
        if MEASURED[point][schedule] <= 1.5 * min(MEASURED[point].values())
    ]
    assert median(errors) <= 0.12


def test_predictions_follow_the_order_of_measured_times() -> None:
    correlations = []
    for point, times in MEASURED.items():
        ranks = [
            np.argsort(np.argsort(list(values))) for values in (_predicted(point).values(), times.values())
        ]
        correlations.append(float(np.corrcoef(ranks[0], ranks[1])[0, 1]))
    assert median(correlations) >= 0.55


def test_clusters_leave_multiprocessors_idle() -> None:
    assert [usable_units(H200, size) for size in (1, 2, 4, 8)] == [132, 132, 120, 120]


@pytest.mark.parametrize(("n", "k", "m", "longer"), [(5120, 25600, 24, True), (2880, 2880, 80, False)])
def test_long_steps_of_k_pay_where_there_are_many(n: int, k: int, m: int, longer: bool) -> None:
    """H200: 28.5 and 29.7 microseconds, 6.2 and 5.9: more barriers against a later first product."""
    gemm = Gemm(n, k, "int4", "fp8_e4m3", group_size=128, output="float16")
    rows, tile_n = (32, 192) if longer else (80, 64)
    long = GpuSchedule("wgmma", rows, tile_n, 256, split_k=4 if longer else 2, placement="accumulator")
    short = replace(long, tile_k=128, stages=8)
    times = [predict(gemm, get_device("cuda/sm_90a"), each, m).seconds for each in (long, short)]
    assert (times[0] < times[1]) == longer


@pytest.mark.parametrize(("n", "k", "m", "tile_m"), [(13824, 5120, 1500, 256), (6144, 6144, 1500, 192)])
def test_fp8_blocks_that_follow_one_another_cost_more_than_a_grid_that_stays(
    n: int, k: int, m: int, tile_m: int
) -> None:
    """An H100 took 1.085 and 1.041 times as long, and as long with one block for each multiprocessor."""
    gemm = Gemm(n, k, "fp8_e4m3", "fp8_e4m3")
    stays = GpuSchedule("wgmma", tile_m, 128, 128, warps=8, persistent=True, placement="accumulator")
    follows = replace(stays, persistent=False)
    many, one = (
        predict(gemm, H200, follows, rows).seconds / predict(gemm, H200, stays, rows).seconds
        for rows in (m, tile_m)
    )
    assert 1.01 <= many <= 1.1
    assert one <= 1.01


@pytest.mark.parametrize("weight", ["uint1", "int3", "nf4", "int8", "float16"])
@pytest.mark.parametrize(("n", "k"), [(1511, 2003), (4096, 14336)])
def test_time_grows_with_tokens(weight: str, n: int, k: int) -> None:
    group = 128 if weight != "float16" else k
    gemm = Gemm(n, k, weight, group_size=group, scale=group < k)
    seconds = [rank(gemm, H200, m)[0].cost.seconds for m in (16, 64, 256, 1024, 4096)]
    assert seconds == sorted(seconds)
    assert seconds[0] > predict(gemm, H200, rank(gemm, H200, 16)[0].schedule, 16).bytes / 4.8e12
