"""Plans for experts and for scaled groups of tokens use pipelines that serve them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.ir.gemm import Gemm
from ladder.runtime.stored_experts import problem
from schedules import spilling
from schedules.legal import is_legal
from schedules.policy import avoid, make_plan
from schedules.rules import serves
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types.errors import ShapeError


@pytest.mark.parametrize("name", ["cuda/sm_80", "cuda/sm_89", "cuda/sm_90a"])
@pytest.mark.parametrize("activation", ["float16", "int8"])
def test_experts(name: str, activation: str) -> None:
    gemm = Gemm(8 * 4096, 4096, "int4", activation, group_size=128, experts=1)
    plan, device = make_plan(gemm, get_device(name)), get_device(name)
    assert all(is_legal(gemm, device, schedule) for _, schedule in plan.entries)
    first, last = plan.schedule_for(1), plan.schedule_for(4096)
    assert isinstance(first, GpuSchedule)
    assert isinstance(last, GpuSchedule)
    assert (first.pipeline, last.pipeline) == ("gemv", "wgmma" if name == "cuda/sm_90a" else "mma")
    assert first.placement == ("operand" if activation == "float16" else "accumulator")


@pytest.mark.parametrize("order", ["rows", "columns"])
@pytest.mark.parametrize(
    ("name", "pipeline"), [("cuda/sm_75", "mma"), ("cuda/sm_80", "mma"), ("cuda/sm_90a", "wgmma")]
)
def test_matrices_as_they_lie(name: str, pipeline: str, order: str) -> None:
    device = get_device(name)
    for k in (768, 4096):
        gemm = problem("float16", 1, 8 * 2048, k, order)
        entries = make_plan(gemm, device).entries
        assert all(is_legal(gemm, device, schedule) for _, schedule in entries)
        assert {schedule.pipeline for _, schedule in entries} == {pipeline}
        if pipeline == "wgmma":
            few = entries[0][1]
            assert (few.tile_m, few.persistent) == (16, k == 768)


def test_groups_of_tokens() -> None:
    gemm = Gemm(4096, 4096, "fp8_e4m3", "fp8_e4m3", group_size=128, token_scale=True, token_group=128)
    assert gemm.extras == ("token_group",)
    for _, schedule in make_plan(gemm, get_device("cuda/sm_90a")).entries:
        assert isinstance(schedule, GpuSchedule)
        assert serves(gemm, schedule.pipeline)


def test_what_no_problem_can_be() -> None:
    with pytest.raises(ShapeError, match="masked tokens need experts"):
        Gemm(8, 8, "int4", masked=True)
    with pytest.raises(ShapeError, match="multiple of 64"):
        Gemm(8, 8, "int4", "int8", token_scale=True, token_group=32)


def test_kernels_depend_on_how_tokens_are_found_but_not_on_how_many_experts() -> None:
    plain = Gemm(8, 8, "int4")
    assert "experts" not in plain.shape_free()
    grouped = Gemm(8, 8, "int4", experts=3), Gemm(16, 8, "int4", experts=64)
    assert grouped[0].shape_free() == grouped[1].shape_free() != plain.shape_free()
    assert Gemm(8, 8, "int4", experts=3, masked=True).shape_free() != grouped[0].shape_free()


@pytest.mark.parametrize(
    "gemm",
    [
        Gemm(2880, 2880, "fp8_e4m3", "bfloat16", experts=32),
        Gemm(512, 128, "int4", group_size=64, experts=8, slots=3, gate="silu"),
    ],
    ids=["all experts", "those of slots"],
)
def test_a_tile_of_experts_that_was_seen_to_spill_gives_way(
    monkeypatch: pytest.MonkeyPatch, gemm: Gemm
) -> None:
    monkeypatch.setattr(spilling, "_seen", {})
    device = get_device("cuda/sm_90a")
    first = make_plan(gemm, device).schedule_for(1)
    assert avoid(gemm, device, first)
    second = make_plan(gemm, device).schedule_for(1)
    assert second != first
    assert not spilling.spills_like(gemm, device, second, first)


def test_tiles_have_room_for_more_tokens_than_the_mean() -> None:
    gemm, device = (
        Gemm(1536, 2048, "int4", "bfloat16", group_size=128, experts=128),
        get_device("cuda/sm_90a"),
    )
    plan = make_plan(gemm, device)
    for mean in (1, 2, 4, 8, 16, 24, 32):
        schedule = plan.schedule_for(mean)
        assert isinstance(schedule, GpuSchedule)
        assert schedule.tile_m >= 1.25 * mean


def test_experts_of_few_tokens_scale_sums_where_that_was_faster() -> None:
    """As measured on an H200: bfloat16 with scales of whole tiles; short K takes one slice."""
    device = get_device("cuda/sm_90a")

    int4 = Gemm(2048, 2048, "int4", "bfloat16", group_size=128, experts=128)

    def chosen(gemm: Gemm, mean: int) -> tuple[str, int, int]:
        schedule = make_plan(gemm, device).schedule_for(mean)
        assert isinstance(schedule, GpuSchedule)
        return schedule.placement, schedule.split_k, schedule.warp_rows

    short, half = replace(int4, k=768), replace(int4, activation="float16")
    exponents = replace(int4, weight="fp4_e2m1", group_size=32, power_scales=True)
    assert chosen(int4, 1) == ("accumulator", 2, 32)
    assert chosen(short, 1) == ("accumulator", 1, 16)
    assert {chosen(gemm, 1) for gemm in (half, exponents)} == {("operand", 4, 32)}
    assert {chosen(gemm, 4) for gemm in (int4, short, half, exponents)} == {("operand", 1, 32)}
