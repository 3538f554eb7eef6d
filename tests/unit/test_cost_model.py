"""The GPU cost model against runs on an H200: what its first choice loses, and its absolute times."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import numpy as np
import pytest

from ladder.ir.gemm import Gemm
from schedules.cost_model import predict, usable_units
from schedules.legal import placement_for, resources
from schedules.policy import rank
from schedules.schedule import GpuSchedule
from targets import get_device

H200 = get_device("cuda/sm_90a")
Point = tuple[str, int, int, int]

WORST_REGRET, MEDIAN_REGRET = 1.15, 1.05
"""Time of the first choice over the fastest measured."""


def _gemm(point: Point) -> Gemm:
    activation, n, k, _ = point
    output = "float32" if activation == "int8" else activation
    return Gemm(n, k, "int4", activation=activation, output=output, group_size=128)


def _schedule(gemm: Gemm, words: list[str]) -> GpuSchedule:
    tile_m, tile_n, tile_k, stages, warps, split_k, persistent = map(int, words[1:])
    return GpuSchedule(
        words[0],
        tile_m,
        tile_n,
        tile_k,
        stages,
        warps,
        split_k,
        bool(persistent),
        placement=placement_for(gemm),
    )


def _load() -> dict[Point, dict[GpuSchedule, float]]:
    """Read microseconds per (activation, N, K, M) and schedule."""
    rows = json.loads((Path(__file__).parent / "measured_gpu.json").read_text())["rows"]
    measured = {}
    for name, lines in rows.items():
        activation, *extents = name.split()
        n, k, m = map(int, extents)
        gemm = _gemm((activation, n, k, m))
        split = [line.rsplit(" ", 1) for line in lines]
        measured[(activation, n, k, m)] = {_schedule(gemm, s.split()): float(us) for s, us in split}
    return measured


MEASURED = _load()


def _choice(point: Point) -> tuple[GpuSchedule, float, float]:
    """Return the schedule ranked first among those measured, its time, and the predicted one."""
    times = MEASURED[point]
    for candidate in rank(_gemm(point), H200, point[3]):
        schedule = candidate.schedule
        if isinstance(schedule, GpuSchedule) and schedule in times:
            return schedule, times[schedule], candidate.cost.seconds * 1e6
    raise AssertionError(f"no ranked schedule was measured at {point}")


@pytest.mark.parametrize("point", MEASURED, ids=lambda point: "-".join(map(str, point)))
def test_first_choice_is_nearly_the_fastest(point: Point) -> None:
    _, measured, predicted = _choice(point)
    assert measured / min(MEASURED[point].values()) <= WORST_REGRET
    assert predicted == pytest.approx(measured, rel=0.25)


def test_first_choices_on_the_whole() -> None:
    chosen = {point: _choice(point) for point in MEASURED}
    assert median(us / min(MEASURED[p].values()) for p, (_, us, _) in chosen.items()) <= MEDIAN_REGRET
    assert median(abs(predicted / us - 1) for _, us, predicted in chosen.values()) <= 0.10


def test_predictions_follow_the_order_of_measured_times() -> None:
    correlations = []
    for point, times in MEASURED.items():
        predicted = [predict(_gemm(point), H200, s, point[3]).seconds for s in times]
        ranks = [np.argsort(np.argsort(values)) for values in (predicted, list(times.values()))]
        correlations.append(float(np.corrcoef(ranks[0], ranks[1])[0, 1]))
    assert median(correlations) >= 0.85
    assert min(correlations) >= 0.4


def test_nearly_first_is_ranked_not_far_down() -> None:
    """A search that measures the eight best predicted finds a schedule within 4 % of the fastest."""
    for point, times in MEASURED.items():
        ranked = sorted(times, key=lambda s: predict(_gemm(point), H200, s, point[3]).seconds)
        assert min(times[s] for s in ranked[:8]) <= 1.04 * min(times.values()), point


def test_persistence_pays_as_much_as_measured() -> None:
    point = ("float16", 4096, 4096, 4096)
    once = GpuSchedule("wgmma", 256, 128, 64, stages=4, warps=8)
    walking = GpuSchedule("wgmma", 256, 128, 64, stages=4, warps=8, persistent=True)
    seconds = [predict(_gemm(point), H200, s, 4096).seconds for s in (once, walking)]
    measured = MEASURED[point][once] / MEASURED[point][walking]
    assert seconds[0] / seconds[1] == pytest.approx(measured, rel=0.1)


def test_clusters_leave_multiprocessors_idle() -> None:
    assert [usable_units(H200, size) for size in (1, 2, 4, 8)] == [132, 132, 120, 96]


def test_gemv_buffers_of_tokens_limit_residency() -> None:
    """Two buffers of 8 stages x 4 slices x 8 tokens x 128 bytes: 64 KiB, so three blocks of 228 KiB."""
    gemm = Gemm(8192, 8192, "int4", group_size=128)
    needs = resources(gemm, H200, GpuSchedule("gemv", 8, stages=8, warps=4, split_k=4))
    assert (needs.shared, needs.blocks_per_unit) == (64 << 10, 3)


@pytest.mark.parametrize("weight", ["uint1", "int3", "nf4", "int8", "float16"])
@pytest.mark.parametrize(("n", "k"), [(1511, 2003), (4096, 14336)])
def test_time_grows_with_tokens(weight: str, n: int, k: int) -> None:
    group = 128 if weight != "float16" else k
    gemm = Gemm(n, k, weight, group_size=group, scale=group < k)
    seconds = [rank(gemm, H200, m)[0].cost.seconds for m in (16, 64, 256, 1024, 4096)]
    assert seconds == sorted(seconds)
    assert seconds[0] > predict(gemm, H200, rank(gemm, H200, 16)[0].schedule, 16).bytes / 4.8e12
