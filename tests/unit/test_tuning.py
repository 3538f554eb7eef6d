"""The tuning database keeps what was measured, and never trusts a damaged entry."""

from __future__ import annotations

import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gpu_tune import write_database
from ladder.ir.gemm import Gemm
from schedules.cost_model import predict
from schedules.estimate import LEAN, UNTRIED_MIDDLE, Estimator, gemm_at, nearest
from schedules.footprint import resources
from schedules.legal import is_legal
from schedules.policy import make_plan, rank
from schedules.schedule import GpuSchedule, Plan, parse_schedule
from schedules.tuning import (
    SHIPPED,
    Measurement,
    TuningDatabase,
    class_key,
    read_shipped,
    write_json,
)
from targets import get_device
from tile_types import TType, register_type
from tile_types.errors import CacheError

H200 = get_device("sm_90a")
GEMM = Gemm(4096, 4096, "int4", group_size=256)  # a class that does not ship
DENSE = Gemm(4096, 4096, "float16", scale=False)
"""Where the model is not close, so that what was measured at other shapes corrects it."""
SCHEDULE = GpuSchedule("wgmma", 64, 128, 128, stages=3, warps=8, split_k=2)


def test_recorded_entries_outlive_the_process(tmp_path: Path) -> None:
    TuningDatabase(tmp_path).record(H200, GEMM, 64, SCHEDULE, 9e-6)
    fresh = TuningDatabase(tmp_path)
    assert fresh.lookup(H200, GEMM, 64) == SCHEDULE
    assert fresh.measurements(H200, GEMM)[0] == Measurement(4096, 4096, 64, SCHEDULE, 9e-6)
    assert not list(tmp_path.glob("*.part"))


def test_key_holds_all_that_matters(tmp_path: Path) -> None:
    database = TuningDatabase(tmp_path, shipped=tmp_path)
    database.record(H200, GEMM, 64, SCHEDULE, 1.0)
    assert database.lookup(get_device("sm_80"), GEMM, 64) is None
    assert database.lookup(H200, GEMM, 128) is None
    changes = ({"n": 4095}, {"k": 4097}, {"weight": "nf4"}, {"activation": "bfloat16"}, {"zero": "integer"})
    for change in changes:
        assert database.lookup(H200, replace(GEMM, **change), 64) is None, change
    changes = ({"bias": True}, {"epilogue": ("silu",)}, {"output": "float32"})
    for change in changes:  # what follows the product does not choose its schedule
        assert database.lookup(H200, replace(GEMM, **change), 64) == SCHEDULE, change


@pytest.mark.parametrize(
    "damage",
    [
        "",
        "{",
        "[]",
        '{"key": 1}',
        '{"classes": [{"key": 1, "schedules": ["rm"], "rows": []}]}',
        '{"classes": 1}',
    ],
)
def test_damaged_entry_is_a_miss_with_a_warning(tmp_path: Path, damage: str) -> None:
    database = TuningDatabase(tmp_path)
    database.record(H200, GEMM, 64, SCHEDULE, 1.0)
    (entry,) = tmp_path.glob("*.json")
    entry.write_text(damage)
    fresh = TuningDatabase(tmp_path)
    with pytest.warns(UserWarning, match="damaged tuning entry"):
        assert fresh.lookup(H200, GEMM, 64) is None
    fresh.record(H200, GEMM, 64, SCHEDULE, 1.0)
    assert TuningDatabase(tmp_path).lookup(H200, GEMM, 64) == SCHEDULE


def test_truncation_at_every_length_never_raises(tmp_path: Path) -> None:
    TuningDatabase(tmp_path).record(H200, GEMM, 64, SCHEDULE, 1.0)
    (entry,) = tmp_path.glob("*.json")
    text = entry.read_text()
    for length in range(0, len(text), 17):
        entry.write_text(text[:length])
        with pytest.warns(UserWarning, match="damaged"):
            assert TuningDatabase(tmp_path).lookup(H200, GEMM, 64) is None


def test_user_entries_win_over_shipped(tmp_path: Path) -> None:
    shipped, user = tmp_path / "shipped", tmp_path / "user"
    slower = replace(SCHEDULE, stages=4)
    rows = [Measurement(4096, 4096, m, SCHEDULE, 2.0) for m in (64, 128)]
    rows.append(Measurement(4096, 4096, 64, slower, 3.0))
    assert write_database(shipped / "h200.json", H200, {GEMM: rows}) == 3
    database = TuningDatabase(user, shipped=shipped)
    assert database.lookup(H200, GEMM, 64) == SCHEDULE
    assert len(database.measurements(H200, GEMM)) == 3
    better = replace(SCHEDULE, stages=2)
    database.record(H200, GEMM, 64, better, 1.0)
    fresh = TuningDatabase(user, shipped=shipped)
    assert fresh.lookup(H200, GEMM, 64) == better
    assert fresh.lookup(H200, GEMM, 128) == SCHEDULE
    assert {(row.m, row.schedule) for row in fresh.measurements(H200, GEMM)} == {
        (64, better),
        (128, SCHEDULE),
    }


def test_without_a_directory_it_remembers_in_memory() -> None:
    database = TuningDatabase()
    database.record(H200, GEMM, 64, SCHEDULE, 1.0)
    assert database.lookup(H200, GEMM, 64) == SCHEDULE


def test_interrupted_write_leaves_the_old_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = TuningDatabase(tmp_path)
    database.record(H200, GEMM, 64, SCHEDULE, 1.0)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(KeyboardInterrupt):
        database.record(H200, GEMM, 64, replace(SCHEDULE, stages=4), 0.5)
    assert TuningDatabase(tmp_path).lookup(H200, GEMM, 64) == SCHEDULE
    assert not list(tmp_path.glob(".tuning-*"))


def test_concurrent_writers_lose_nothing(tmp_path: Path) -> None:
    def write(m: int) -> None:
        TuningDatabase(tmp_path).record(H200, GEMM, m, SCHEDULE, 1.0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, [1, 2, 4, 8] * 8))
    assert len(TuningDatabase(tmp_path, shipped=tmp_path / "none").measurements(H200, GEMM)) == 4


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CacheError, match="LADDER_CACHE_DIR"):
        write_json(blocker / "entry.json", {})


def test_key_is_canonical_json() -> None:
    key = class_key(H200, GEMM)
    assert json.dumps(json.loads(key), sort_keys=True) == key


def test_what_ships_is_whole_and_legal() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        classes = read_shipped(SHIPPED)
    for key, rows in classes.items():
        fields = json.loads(key)
        device = get_device(fields["device"])
        for n, k, m, text, seconds in rows:
            group = fields["gemm"]["group_size"] or k
            gemm = Gemm(n, k, **{**fields["gemm"], "group_size": group})
            schedule = parse_schedule(text)
            assert isinstance(schedule, GpuSchedule)
            assert is_legal(gemm, device, schedule), (key, text)
            assert seconds > 0
            assert m >= 1


def planned(rows: list[Measurement], gemm: Gemm = GEMM, measured: Gemm = GEMM) -> Plan:
    database = TuningDatabase(shipped=Path("none"))
    for row in rows:  # one per point: a later one replaces an earlier one
        at = gemm_at(measured, row.n, row.k)
        database.record(H200, at, row.m, row.schedule, row.seconds)
    return make_plan(gemm, H200, database)


def test_plan_uses_measured_schedules_that_still_fit() -> None:
    odd = GpuSchedule("wgmma", 64, 128, 64, stages=3, warps=4)
    never = replace(SCHEDULE, stages=8, tile_k=256)  # does not fit
    times = {m: predict(GEMM, H200, odd, m).seconds for m in (64, 128)}
    rows = [Measurement(4096, 4096, 64, odd, 1e-6), Measurement(4096, 4096, 128, never, 1e-6)]
    plan = planned(rows)
    assert times[64] > 1e-6
    assert plan.schedule_for(64) == odd
    assert plan.schedule_for(60) == odd
    assert plan.schedule_for(1) != odd
    assert never not in {schedule for _, schedule in plan.entries}


def test_a_measured_shape_helps_similar_ones_and_no_others() -> None:
    odd = GpuSchedule("wgmma", 64, 128, 64, stages=3, warps=4)
    points = {64: odd, 8: None, 16: None, 32: None, 48: None, 96: None, 128: None}
    schedules = {m: schedule or rank(DENSE, H200, m, wide=True)[0].schedule for m, schedule in points.items()}
    rows = [
        Measurement(4096, 4096, m, s, (0.1 if s == odd else 1.0) * predict(DENSE, H200, s, m).seconds)
        for m, s in schedules.items()
    ]
    assert planned(rows, replace(DENSE, n=5120, k=4096), DENSE).schedule_for(64) == odd
    assert planned(rows, replace(DENSE, n=28672, k=8192), DENSE).schedule_for(64) != odd
    assert planned(rows, GEMM, DENSE).schedule_for(64) != odd


def test_estimates_meet_measurements_and_lie_between_them() -> None:
    rows = [
        Measurement(4096, 4096, m, SCHEDULE, factor * predict(GEMM, H200, SCHEDULE, m).seconds)
        for m, factor in ((16, 1.5), (64, 0.5))
    ]
    estimator = Estimator(GEMM, H200, rows)
    assert [estimator.seconds(SCHEDULE, row.m) for row in rows] == pytest.approx([r.seconds for r in rows])
    ratio = {
        m: estimator.seconds(SCHEDULE, m) / predict(GEMM, H200, SCHEDULE, m).seconds for m in (1, 32, 4096)
    }
    assert ratio == pytest.approx({1: 1.5, 32: (1.5 * 0.5) ** 0.5, 4096: 0.5})
    assert estimator.knows(64)
    assert not estimator.knows(65)
    assert nearest(rows, replace(GEMM, n=65536, k=65536)) == []


def test_measurements_of_two_shapes_that_are_equally_near_are_not_mixed() -> None:
    schedule = GpuSchedule("wgmma", 128, 128, 128, stages=4, warps=8)
    rows = [Measurement(n, n, 4096, schedule, n * 1e-7) for n in (8192, 4096)]
    assert nearest(rows, replace(GEMM, n=14336, k=4096)) == rows[1:]
    assert nearest(rows, replace(GEMM, n=4096, k=14336)) == rows[:1]


def test_a_class_that_nobody_measured_takes_after_the_likest_one_for_few_rows() -> None:
    """int3 by int8 was not measured; of what was, int2 has most nearly as many bits."""
    database = TuningDatabase(None)
    unmeasured = replace(GEMM, n=8192, k=8192, weight="int3", activation="int8", output="float32")
    likest = [gemm.weight for gemm, _ in database.akin(H200, unmeasured)]
    assert not database.measurements(H200, unmeasured)
    assert likest[:2] == ["int2", "int4"]
    borrowed = Estimator(unmeasured, H200, (), database.akin(H200, unmeasured))
    alone = Estimator(unmeasured, H200)
    assert borrowed.measured
    assert not alone.measured
    schedule = borrowed.measured[0]
    assert borrowed.seconds(schedule, 32) != alone.seconds(schedule, 32)
    assert borrowed.seconds(schedule, 512) == alone.seconds(schedule, 512)
    assert not borrowed.knows(1)


def test_pipelines_compete_where_they_were_timed_near_the_rows_in_question() -> None:
    """gemv was timed at 16 rows and found to be as fast as predicted, wgmma at 64 and four times as slow."""
    streamed, decoded = GpuSchedule("gemv", 16, warps=16, split_k=4), SCHEDULE
    rows = [
        Measurement(4096, 4096, m, s, factor * predict(DENSE, H200, s, m).seconds)
        for m, s, factor in ((16, streamed, 1.0), (64, decoded, 4.0))
    ]
    estimator = Estimator(replace(DENSE, n=5120), H200, rows)
    assert estimator.compares("gemv", 32)
    assert not estimator.compares("gemv", 16)  # where it is the pipeline in any case
    assert not estimator.compares("mma", 32)
    untimed = replace(streamed, warps=24, split_k=6), replace(decoded, stages=2)
    levels = [estimator.seconds(s, 32) / predict(estimator.gemm, H200, s, 32).seconds for s in untimed]
    assert levels == pytest.approx([UNTRIED_MIDDLE, 4 * UNTRIED_MIDDLE])
    integers = replace(GEMM, weight="int4", activation="int8", output="float32")
    assert not Estimator(integers, H200, rows).compares("gemv", 32)


def test_a_ratio_measured_at_another_shape_holds_in_part() -> None:
    """Three schedules were twice, once and half as slow as predicted; at another shape less so."""
    shape = replace(DENSE, n=8192, k=8192)
    schedules = [replace(SCHEDULE, tile_k=64, stages=stages) for stages in (3, 4, 5)]
    predicted = [predict(shape, H200, schedule, 8).seconds for schedule in schedules]
    factors = (2.0, 1.0, 0.5)
    rows = [
        Measurement(8192, 8192, 8, schedule, factor * seconds)
        for schedule, factor, seconds in zip(schedules, factors, predicted, strict=True)
    ]
    other = replace(DENSE, n=10240, k=8192)
    for gemm, share in ((shape, 1.0), (other, LEAN)):
        estimator = Estimator(gemm, H200, rows)
        found = [estimator.seconds(s, 8) / predict(gemm, H200, s, 8).seconds for s in schedules]
        assert found == pytest.approx([factor**share for factor in factors])
    assert 0 < LEAN < 1


def test_what_was_timed_for_many_rows_does_not_serve_few() -> None:
    """Of a type that nobody measured: for few rows, all that is known is that others were faster."""
    database, name = TuningDatabase(None), "values_for_few_rows"
    values = tuple(map(float, np.random.default_rng(7).integers(-60, 60, 32)))
    register_type(TType(name, 5, lambda code, ops: ops.lookup(values, code)))
    gemm = replace(GEMM, n=9728, k=2560, weight=name, activation="fp8_e4m3", output="float16", group_size=64)
    estimator = Estimator(gemm, H200, (), database.akin(H200, gemm))
    many = [s for s in estimator.measured if isinstance(s, GpuSchedule) and s.pipeline == "wgmma"]
    assert many
    assert not any(estimator.tells(schedule, 8) for schedule in many)
    assert all(estimator.tells(schedule, 64) for schedule in many)
    plan = make_plan(replace(gemm, activation="bfloat16", output="bfloat16"), H200, database)
    assert {str(plan.schedule_for(m).pipeline) for m in (1, 4, 8)} == {"gemv"}


def test_another_type_tells_nothing_of_a_kernel_that_shares_a_multiprocessor() -> None:
    """Groups of 64 leave room for one block on a multiprocessor, groups of 128 for two of fewer registers.

    Measured of nf4 at 28672 x 8192, M = 1, where either has one block: 36 us, and 57 us.
    """
    database = TuningDatabase(None)
    gemm = replace(GEMM, n=28672, k=8192, weight="nf4", group_size=128)
    other = replace(gemm, group_size=64)
    timed = min(
        (row for row in nearest(database.measurements(H200, other), other) if row.m == 1),
        key=lambda row: row.seconds,
    )
    assert isinstance(timed.schedule, GpuSchedule)
    blocks = [resources(each, H200, timed.schedule).blocks_per_unit for each in (gemm, other)]
    assert blocks == [2, 1]
    assert timed.schedule not in Estimator(gemm, H200, (), database.akin(H200, gemm)).measured
    assert make_plan(gemm, H200, database).schedule_for(1) != timed.schedule


def test_what_ships_serves_other_products_with_times_of_their_own(tmp_path: Path) -> None:
    gemm = Gemm(8192, 8192, "int4", "float16", group_size=128)
    row, product = get_device("cuda/sm_90a"), get_device("cuda/sm_90a:66sm-2039gbs-50mib")
    database = TuningDatabase(tmp_path)
    rows = {device: database.measurements(device, gemm) for device in (row, product)}
    assert [r.schedule for r in rows[row]] == [r.schedule for r in rows[product]]
    assert {r.device for r in rows[row]} == {""}
    assert {r.device for r in rows[product]} == {row.name}
    known = {device: Estimator(gemm, device, rows[device]) for device in (row, product)}
    for schedule, m in ((r.schedule, r.m) for r in rows[row] if (r.n, r.k) == (8192, 8192)):
        times = {device: predict(gemm, device, schedule, m).seconds for device in (row, product)}
        slower = known[product].seconds(schedule, m) / known[row].seconds(schedule, m)
        assert slower == pytest.approx(times[product] / times[row])
        assert slower > 1

    fastest = make_plan(gemm, product, database).schedule_for(1)
    database.record(product, gemm, 1, fastest, 1e-6)  # measured here: no other product's time counts
    own = [r for r in database.measurements(product, gemm) if (r.n, r.k, r.m) == (8192, 8192, 1)]
    assert [(r.schedule, r.seconds, r.device) for r in own] == [(fastest, 1e-6, "")]
    assert database.measurements(row, gemm) == rows[row]
