"""The tuning database keeps what was measured, and never trusts a damaged entry."""

from __future__ import annotations

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ladder.ir.gemm import Gemm
from schedules.policy import make_plan
from schedules.schedule import GpuSchedule
from schedules.tuning import TuningDatabase, tuning_key, write_json
from targets import get_device
from tile_types.errors import CacheError

H200 = get_device("sm_90a")
GEMM = Gemm(4096, 4096, "int4", group_size=128)
SCHEDULE = GpuSchedule("wgmma", 64, 128, 128, stages=3, warps=8, split_k=2)


def test_recorded_entries_outlive_the_process(tmp_path: Path) -> None:
    TuningDatabase(tmp_path).record(H200, GEMM, 64, SCHEDULE, 9e-6)
    fresh = TuningDatabase(tmp_path)
    assert fresh.lookup(H200, GEMM, 64) == SCHEDULE
    assert next(iter(fresh.entries().values())).seconds == 9e-6
    assert not list(tmp_path.glob("*.part"))


def test_key_holds_all_that_matters(tmp_path: Path) -> None:
    database = TuningDatabase(tmp_path)
    database.record(H200, GEMM, 64, SCHEDULE, 1.0)
    assert database.lookup(get_device("sm_80"), GEMM, 64) is None
    assert database.lookup(H200, GEMM, 128) is None
    assert TuningDatabase(tmp_path, version="9.9").lookup(H200, GEMM, 64) is None
    changes = ({"n": 4095}, {"k": 4097}, {"weight": "nf4"}, {"activation": "bfloat16"}, {"zero": "integer"})
    for change in changes:
        assert database.lookup(H200, replace(GEMM, **change), 64) is None, change


@pytest.mark.parametrize(
    "damage", ["", "{", "[]", '{"key": 1}', '{"key": {}, "schedule": "rm", "seconds": 1}']
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
    author = TuningDatabase(tmp_path / "author", shipped=shipped)
    author.record(H200, GEMM, 64, SCHEDULE, 2.0)
    author.record(H200, GEMM, 128, SCHEDULE, 2.0)
    assert author.export(shipped / "sm_90a.json") == 2
    database = TuningDatabase(user, shipped=shipped)
    assert database.lookup(H200, GEMM, 64) == SCHEDULE
    better = replace(SCHEDULE, stages=4)
    database.record(H200, GEMM, 64, better, 1.0)
    fresh = TuningDatabase(user, shipped=shipped)
    assert fresh.lookup(H200, GEMM, 64) == better
    assert fresh.lookup(H200, GEMM, 128) == SCHEDULE
    assert len(fresh.entries()) == 2


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
    assert len(TuningDatabase(tmp_path).entries()) == 4


def test_unwritable_directory_is_named(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(CacheError, match="LADDER_CACHE_DIR"):
        write_json(blocker / "entry.json", {})


def test_key_is_canonical_json() -> None:
    key = tuning_key(H200, GEMM, 64, "0.1.0")
    assert json.dumps(json.loads(key), sort_keys=True) == key


def test_plan_uses_measured_schedules_that_still_fit(tmp_path: Path) -> None:
    database = TuningDatabase(tmp_path)
    database.record(H200, GEMM, 64, SCHEDULE, 1.0)
    database.record(H200, GEMM, 128, replace(SCHEDULE, stages=8, tile_k=256), 1.0)  # does not fit
    plan = make_plan(GEMM, H200, database)
    assert plan.schedule_for(64) == SCHEDULE
    assert plan.schedule_for(128) == make_plan(GEMM, H200).schedule_for(128)
