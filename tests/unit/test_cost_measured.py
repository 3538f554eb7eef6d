"""The device model beside every time of record on the H200: issue 4 asks for a median error of at most 15 %.

The shipped database (`schedules/tuned/h200.json`) holds what tuning measured: the fastest few schedules of
each point. `benchmarks/results/h200_peers_2026-11-21.json` is a later run, to which nothing was fitted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks.fit_cost_model import problem
from benchmarks.gpu_gemm import problem as of_case
from benchmarks.gpu_tune import parse_case
from ladder.ir.gemm import Gemm
from schedules.cost_model import predict
from schedules.legal import is_legal
from schedules.policy import make_plan
from schedules.schedule import GpuSchedule, parse_schedule
from schedules.tilings import tilings
from schedules.tuning import SHIPPED, TuningDatabase
from targets import get_device

H200 = get_device("cuda/sm_90a")
PEERS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200_peers_2026-11-21.json"
FEW_ROWS = PEERS.parent / "h200_few_rows_2026-11-27.json"
RINGS = PEERS.parent / "h200_kernels_2026-11-27.json"
CROWDED = PEERS.parent / "h200_crowded_2026-11-27.json"
CHANGED = PEERS.parent / "h200_fp8_few_rows_2026-11-27.json"
REFIT = PEERS.parent / "h200_fp8_refit_2026-11-27.json"
STREAMED = PEERS.parent / "h200_streamed_choices_2026-11-29.json"
GROUPS = {"int4": 128, "fp4_e2m1": 32}
LARGEST, LARGEST_OF_A_CLASS = 0.15, 0.25
"""Median error of all times, and of those of one class of types or one pipeline."""


def _tuned() -> Iterator[tuple[str, str, float]]:
    """Yield the class, the pipeline and the relative error of every tuned time."""
    for part in json.loads((SHIPPED / "h200.json").read_text())["classes"]:
        schedules = [parse_schedule(text) for text in part["schedules"]]
        fields = part["key"]["gemm"]
        for n, k, m, place, us in part["rows"]:
            gemm, schedule = problem(fields, n, k), schedules[place]
            if is_legal(gemm, H200, schedule):
                error = predict(gemm, H200, schedule, m).seconds * 1e6 / us - 1
                yield f"{fields['weight']} x {fields['activation']}", schedule.pipeline, error


def _measured(row: Mapping[str, Any]) -> bool:
    """Whether a row of the peers' file times one of Ladder's kernels on its own."""
    plain = row["engine"] == "ladder" and row["label"] in ("ladder", "ladder int4")
    return plain and not row["step"] and not row.get("dynamic") and row["case"] != "host"


def _peers() -> Iterator[tuple[str, float]]:
    """Yield the case and the relative error of every product that ran with a tuned schedule."""
    database = TuningDatabase(None)
    for row in filter(_measured, json.loads(PEERS.read_text())["rows"]):
        n, k, m, group = row["n"], row["k"], row["m"], row["group_size"]
        types = row["weight"], row["activation"]
        gemm = Gemm(n, k, *types, group_size=group or k, scale=bool(group), output=row["output"])
        schedule = database.lookup(H200, gemm, m)
        if schedule is not None:
            yield row["case"], predict(gemm, H200, schedule, m).seconds * 1e6 / row["time_us"] - 1


TUNED = list(_tuned())


def test_all_tuned_times() -> None:
    assert len(TUNED) >= 1500
    assert median(abs(error) for _, _, error in TUNED) <= LARGEST


@pytest.mark.parametrize("name", sorted({name for name, _, _ in TUNED}))
def test_tuned_times_of_each_class(name: str) -> None:
    assert median(abs(error) for found, _, error in TUNED if found == name) <= LARGEST_OF_A_CLASS


@pytest.mark.parametrize("pipeline", ["gemv", "wgmma", "digits"])
def test_tuned_times_of_each_pipeline(pipeline: str) -> None:
    assert median(abs(error) for _, found, error in TUNED if found == pipeline) <= LARGEST_OF_A_CLASS


def test_times_of_another_run() -> None:
    errors = list(_peers())
    assert len(errors) >= 200
    assert median(abs(error) for _, error in errors) <= LARGEST


def _few_rows(types: str, kernels: str) -> Iterator[list[tuple[float, float]]]:
    """Yield, by point, predicted and measured microseconds of the kernels of gemv whose names match."""
    record = json.loads(FEW_ROWS.read_text())["few rows"]
    for point, times in record.items():
        where = re.fullmatch(rf"(\w+) x ({types}) (\d+)x(\d+) M=(\d+)", point)
        if where is None or where[1] not in GROUPS or int(where[5]) > 16:
            continue
        gemm = Gemm(int(where[3]), int(where[4]), where[1], where[2], group_size=GROUPS[where[1]])
        found = [
            (predict(gemm, H200, _named(name), int(where[5])).seconds * 1e6, min(seconds))
            for name, seconds in times.items()
            if re.search(kernels, name)
        ]
        if found:
            yield found


def _named(name: str) -> GpuSchedule:
    """Return the schedule that the record names."""
    pipeline = name.split(" ")[0]
    tiles = re.findall(r"(\d+)x(\d+)x(\d+), (\d+) stages, (\d+) warps", name)[0]
    tile_m, tile_n, tile_k, stages, warps = map(int, tiles)
    more = {key: int(value) for key, value in re.findall(r"(split|cluster|strips of) (\d+)", name)}
    return GpuSchedule(
        pipeline, tile_m, tile_n, tile_k, stages=stages, warps=warps, split_k=more.get("split", 1),
        placement="accumulator" if "scaled sums" in name else "operand",
        warp_rows=more.get("strips of", 16), cluster=more.get("cluster", 1),
    )  # fmt: skip


def test_kernels_of_one_order_of_sums_are_ranked_as_measured() -> None:
    """A grid that leaves room on its multiprocessors is not spread evenly: more blocks lie on some.

    Kernels begin sooner since these were timed, which costs are fitted to: one point has another best.
    """
    points = list(_few_rows("float16|bfloat16", r"gemv .* split 8(, strips of 32)?$"))
    regrets = sorted(min(point)[1] / min(measured for _, measured in point) for point in points)
    assert len(regrets) == 9
    assert regrets[-2] <= 1.12
    assert sum(regrets) / len(regrets) <= 1.05


def test_gemv_widens_fp8_where_the_chip_has_no_such_product() -> None:
    found = [each for point in _few_rows("fp8_e4m3", "^gemv .* scaled sums") for each in point]
    assert len(found) == 13
    assert median(abs(guess / measured - 1) for guess, measured in found) <= LARGEST


def _plain_fp8(n: int, k: int) -> Gemm:
    return Gemm(n, k, "fp8_e4m3", "fp8_e4m3", group_size=k, scale=False, output="float16")


def test_warpgroups_that_share_k_for_few_rows_of_fp8_take_what_was_measured() -> None:
    """What clusters cost is little beside what every launch costs, which small products show."""
    errors = []
    for point, times in json.loads(RINGS.read_text())["rings"].items():
        if where := re.fullmatch(r"fp8_e4m3 x fp8_e4m3 (\d+)x(\d+) M=(\d+)", point):
            n, k, m = map(int, where.groups())
            for name, seconds in times.items():
                schedule = replace(_named(name), placement="accumulator")
                errors.append(predict(_plain_fp8(n, k), H200, schedule, m).seconds * 1e6 / min(seconds) - 1)
    assert len(errors) >= 60
    assert median(map(abs, errors)) <= LARGEST


def test_shallow_and_deep_rings_of_fp8_are_ranked_as_measured() -> None:
    """Few stages of few bytes keep memory busy: deeper rings of wider tiles were taken to be faster."""
    points: dict[tuple[int, int, int], dict[str, float]] = {}
    for part in (part for run in json.loads(CHANGED.read_text())["runs"] for part in run):
        for n, k, m, place, us in part["rows"]:
            times = points.setdefault((n, k, m), {})
            times[part["schedules"][place]] = min(us, times.get(part["schedules"][place], us))
    right = 0
    for (n, k, m), times in points.items():
        guess = {s: predict(_plain_fp8(n, k), H200, parse_schedule(s), m).seconds for s in times}
        right += times[min(guess, key=guess.__getitem__)] <= 1.02 * min(times.values())
    assert len(points) == 44
    assert right >= 33


def test_a_small_product_of_fp8_is_not_left_to_few_blocks() -> None:
    """Tiles on a third of the multiprocessors, K undivided, took 1.10 to 1.20 times as long."""
    classes = json.loads(CROWDED.read_text())["rounds"][0]
    (part,) = (found for found in classes if found["class"]["activation"] == "fp8_e4m3")
    points: dict[tuple[int, int, int], dict[str, float]] = {}
    for n, k, m, place, us in part["rows"]:
        points.setdefault((n, k, m), {})[part["schedules"][place]] = us
    for (n, k, m), times in points.items():
        chosen = str(make_plan(_plain_fp8(n, k), H200, TuningDatabase(None)).schedule_for(m))
        assert times.get(chosen) in (None, min(times.values()))
    assert len(points) == 3


@pytest.mark.parametrize(("n", "k"), [(4608, 7168), (7168, 4224)])
def test_what_was_timed_alone_on_a_multiprocessor_does_not_serve_two_blocks(n: int, k: int) -> None:
    """A warpgroup that decodes nothing ahead was fast at the nearest tuned shape, and took 1.24 here."""
    record = json.loads(REFIT.read_text())
    times: dict[str, float] = {}
    for *point, place, us in (row for run in record["int4 x fp8"] for row in run):
        if point == [n, k, 16]:
            times[record["schedules"][place]] = us
    gemm = Gemm(n, k, "int4", "fp8_e4m3", group_size=128, output="float16")
    chosen = str(make_plan(gemm, H200, TuningDatabase(None)).schedule_for(16))
    assert times[chosen] <= 1.12 * min(times.values())


def test_fewer_warps_of_more_rows_are_ranked_as_measured() -> None:
    """Warps start one after the other: 32 of 16 rows took 1.02 to 1.15 times as long as 16 of 32 rows."""
    ratios = []
    for part in json.loads((SHIPPED / "h200.json").read_text())["classes"]:
        fields, schedules = part["key"]["gemm"], [parse_schedule(text) for text in part["schedules"]]
        times = {(n, k, m, schedules[place]): us for n, k, m, place, us in part["rows"]}
        for (n, k, m, many), us in times.items():
            if not fields["activation"].endswith("float16") or many.pipeline != "gemv" or n * k > 8192**2:
                continue
            few = replace(many, warps=many.warps // 2, warp_rows=32)
            if many.warp_rows == 16 and (n, k, m, few) in times:
                slow, fast = (predict(problem(fields, n, k), H200, one, m).seconds for one in (many, few))
                ratios.append((slow / fast, us / times[n, k, m, few]))
    assert len(ratios) >= 40
    assert min(predicted for predicted, _ in ratios) > 1.03
    assert median(predicted / measured for predicted, measured in ratios) == pytest.approx(1, abs=0.03)


@pytest.mark.parametrize("pipeline", ["gemv", "digits"])
def test_rows_of_tiles_stream_the_weights_again(pipeline: str) -> None:
    """More blocks read faster only where each reads other weights."""
    gemm = Gemm(4096, 4096, "int4", "bfloat16", group_size=128)
    for schedule in tilings(gemm, H200, pipeline, 1):
        once, twice = (predict(gemm, H200, schedule, m).seconds for m in (1, 2 * schedule.tile_m))
        assert once <= twice


def test_a_plan_takes_what_was_measured_to_be_the_fastest_of_one_row() -> None:
    """Digits were expected to take less time with two rows than with one."""
    gemm = Gemm(4096, 4096, "int4", "bfloat16", group_size=128)
    database = TuningDatabase(None)
    assert make_plan(gemm, H200, database).schedule_for(1) == database.lookup(H200, gemm, 1)


@pytest.mark.parametrize(("part", "mean"), [("fitted", 1.015), ("held out", 1.01)])
def test_first_choices_among_kernels_that_stream_small_groups(part: str, mean: float) -> None:
    """A slice's last turn takes as long as others, scales on sums take little where lanes share them."""
    record, regrets = json.loads(STREAMED.read_text()), []
    for case, n, k, m, _, _, times in record[part]:
        gemm, timed = of_case(parse_case(case), n, k), {}
        for place, us in times.items():
            schedule = parse_schedule(record["schedules"][int(place)])
            if isinstance(schedule, GpuSchedule) and schedule.pipeline == "gemv":
                timed[schedule] = us
        if gemm.activation.endswith("float16") and len(timed) > 1:
            first = min(timed, key=lambda one: predict(gemm, H200, one, m).seconds)
            regrets.append(timed[first] / min(timed.values()))
    assert len(regrets) >= 45
    assert sum(regrets) / len(regrets) <= mean
    assert max(regrets) <= 1.15
