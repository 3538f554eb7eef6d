"""What was seen to spill is not chosen again: the next best schedule is, in plans and for one M."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ladder import faults
from ladder.api.problem import gemm_for
from ladder.faults import LadderWarning
from ladder.runtime import compile as compiling
from ladder.runtime.build import Job, Kernel
from ladder.runtime.compile import Request, obtain, plan_for, serving
from ladder.runtime.spills import spilled
from schedules import policy, spilling
from schedules.policy import avoid, make_plan, rank
from schedules.schedule import GpuSchedule
from schedules.spilling import TRIES, spills_like
from schedules.tuning import TuningDatabase
from targets import get_device

B200 = get_device("cuda/sm_100a")
GEMM = gemm_for(8192, 8192, "int4", "float16", group_size=128)
GEMV = GpuSchedule("gemv", 16, stages=2, warps=24, split_k=4)


@pytest.fixture(autouse=True)
def _nothing_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(spilling, "_seen", {})
    yield
    policy.best_schedule.cache_clear()


def _spills_like(schedule: GpuSchedule, other: GpuSchedule = GEMV) -> bool:
    return spills_like(GEMM, B200, schedule, other)


def test_what_leaves_no_more_registers_and_holds_as_much_spills_too() -> None:
    assert _spills_like(replace(GEMV, warps=28, cluster=2))
    assert _spills_like(replace(GEMV, warp_rows=32))
    assert not _spills_like(replace(GEMV, warps=20))
    assert _spills_like(replace(GEMV, warps=16, split_k=8))  # two blocks share a multiprocessor
    assert not _spills_like(replace(GEMV, tile_m=8))
    assert not _spills_like(GpuSchedule("mma", 64, 64, 64, stages=4, warps=8))


def test_the_policy_avoids_what_spilled_at_every_shape() -> None:
    first = rank(GEMM, B200, 16)[0].schedule
    assert avoid(GEMM, B200, first)
    assert not avoid(GEMM, B200, first)  # no news
    assert first not in [each.schedule for each in rank(GEMM, B200, 16)]
    other = gemm_for(4096, 4096, "int4", "float16", group_size=128)
    assert not any(spills_like(other, B200, each.schedule, first) for each in rank(other, B200, 16))


def _found(monkeypatch: pytest.MonkeyPatch, spilling_pipeline: str) -> list[str]:
    """Have all kernels of a pipeline spill; return the schedules that were compiled."""
    asked: list[str] = []

    def find(jobs: Sequence[Job]) -> list[Kernel]:
        asked.extend(str(job.facts["schedule"]) for job in jobs)
        reports = [8 * (f"'{spilling_pipeline}'" in str(job.facts["schedule"])) for job in jobs]
        return [
            Kernel(
                Path("k.so"),
                {"entry": "k", "resources": {"main": {"registers": 72, "spill_stores": found}}},
                True,
                dict,
            )
            for found in reports
        ]

    monkeypatch.setattr(compiling, "find_or_build", find)
    return asked


def test_a_plan_has_the_next_best_where_kernels_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(GEMM, B200.name)
    before = plan_for(request)
    assert "gemv" in str(before.schedule_for(16))
    _found(monkeypatch, "gemv")
    plan, kernels = obtain(request)
    assert len(kernels) == len(plan.entries)
    assert plan.schedule_for(16) != before.schedule_for(16)
    assert obtain(request)[0] == plan
    assert serving(request, 4096).plan.schedule_for(4096) == plan.schedule_for(4096)


def test_what_was_measured_without_a_residual_is_not_chosen_where_it_spills_with_one() -> None:
    plain = gemm_for(13952, 3776, "fp8_e4m3", "fp8_e4m3")
    request = Request(replace(plain, residual=True), "cuda/sm_90a")
    before = plan_for(request).schedule_for(500)
    rows = TuningDatabase(None).measurements(request.target, plain)
    assert before in [row.schedule for row in rows]
    assert avoid(request.gemm, request.target, before)
    after = plan_for(request)
    assert before not in [schedule for _, schedule in after.entries]
    own = make_plan(plain, request.target, TuningDatabase(None)).schedule_for(500)
    assert avoid(plain, request.target, own)
    assert make_plan(plain, request.target, TuningDatabase(None)).schedule_for(500) == own


def test_tries_are_limited_and_a_plan_of_the_user_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(GEMM, B200.name)
    _found(monkeypatch, "none")
    one = serving(request, 16)
    asked = _found(monkeypatch, "gemv")
    assert obtain(one)[0] == one.plan
    assert len(asked) == 1
    serving(request, 16)
    assert len(set(asked)) <= TRIES


def test_what_compilers_report_as_spilled() -> None:
    assert spilled({"a": {"registers": 72, "spill_stores": 8, "spill_loads": 4}}) == 12
    assert spilled({"a": {"vgpr": 72, "vgpr_spills": 1}, "b": {"scratch_bytes": 16}}) == 17
    assert spilled({"a": {"registers": 255, "stack": 64}}) == 0


def test_what_was_measured_to_be_fast_spills_without_a_warning(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """Its spills are part of its times: those of 8192 x 8192 hold tiles that spill."""
    gemm = gemm_for(8192, 8192, "int4", "int8", group_size=128, output="float16")
    request = Request(gemm, "cuda/sm_90a")
    timed = {str(schedule) for schedule in compiling._timed(request)}
    monkeypatch.setattr(faults, "_warned", set())
    monkeypatch.setattr(compiling, "_spilling", {})

    def find(jobs: Sequence[Job]) -> list[Kernel]:
        counts = [40 * (str(job.facts["schedule"]) in timed) for job in jobs]
        return [
            Kernel(Path("k.so"), {"entry": "k", "resources": {"k": {"spill_stores": count}}}, True, dict)
            for count in counts
        ]

    monkeypatch.setattr(compiling, "find_or_build", find)
    plan, kernels = obtain(request)
    assert any(str(schedule) in timed for _, schedule in plan.entries)
    assert any(kernel.spilled for kernel in kernels)
    assert not [warning for warning in recwarn if issubclass(warning.category, LadderWarning)]
    assert not compiling._is_outdated(request, plan)


def test_where_all_spill_the_least_is_taken_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was tried is not tried again, whoever asks."""
    monkeypatch.setattr(faults, "_warned", set())
    monkeypatch.setattr(compiling, "_spilling", {})
    asked: list[str] = []

    def find(jobs: Sequence[Job]) -> list[Kernel]:
        asked.extend(str(job.facts["schedule"]) for job in jobs)
        counts = [4 if asked.index(str(job.facts["schedule"])) == 2 else 100 for job in jobs]
        return [
            Kernel(Path("k.so"), {"entry": "k", "resources": {"k": {"spill_stores": count}}}, True, dict)
            for count in counts
        ]

    monkeypatch.setattr(compiling, "find_or_build", find)
    request = Request(GEMM, B200.name)
    with pytest.warns(LadderWarning, match="no schedule that was tried for cuda/sm_100a is free of spills"):
        taken = serving(request, 16)
    assert str(taken.plan.schedule_for(16)) in asked[2]
    assert len(asked) == TRIES + 1
    assert serving(request, 16) == taken
    assert len(asked) == TRIES + 2
