"""Index maps and sizes of the wgmma pipeline, evaluated with plain integers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ladder.ir.gemm import Gemm
from ladder.lower.cuda.wgmma_geometry import (
    WARP_ROWS,
    WgmmaGeometry,
    accumulator_m,
    accumulator_row,
    swizzled_run,
)
from schedules.footprint import PRODUCER_REGISTERS, launch_registers, math_registers
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types.errors import ScheduleError

H200 = get_device("cuda/sm_90a")


def schedule(**changes: object) -> GpuSchedule:
    fields = {"tile_m": 64, "tile_n": 128, "tile_k": 128, "stages": 4, "warps": 8, **changes}
    return GpuSchedule("wgmma", **fields)  # type: ignore[arg-type]


def gemm(**changes: object) -> Gemm:
    fields = {"n": 256, "k": 1024, "weight": "int4", "group_size": 128, **changes}
    return Gemm(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("tokens", [8, 64, 256])
def test_accumulators_cover_the_tile_once(tokens: int) -> None:
    seen = {
        (accumulator_row(thread // 32, thread % 32, index), accumulator_m(thread % 32, index))
        for thread in range(128)
        for index in range(tokens // 2)
    }
    assert seen == {(row, token) for row in range(64) for token in range(tokens)}


@pytest.mark.parametrize(("split_k", "tile_m", "team"), [(1, 64, 4), (4, 64, 4), (2, 64, 1), (8, 64, 1)])
def test_staged_transpose_has_no_bank_conflicts(split_k: int, tile_m: int, team: int) -> None:
    geo = WgmmaGeometry(gemm(output="float32"), schedule(split_k=split_k, tile_m=tile_m))
    assert geo.team == team
    for index in range(4):
        banks = {
            (accumulator_m(lane, index) * geo.pitch + accumulator_row(0, lane, index)) % 32
            for lane in range(32)
        }
        assert len(banks) == 32


@pytest.mark.parametrize("split_k", [1, 8])
def test_staged_halves_are_a_bijection_without_bank_conflicts(split_k: int) -> None:
    geo = WgmmaGeometry(gemm(), schedule(split_k=split_k))
    runs = geo.team * WARP_ROWS // 8
    places = {swizzled_run(token, run, runs) for token in range(geo.chunk) for run in range(runs)}
    assert places == set(range(geo.chunk * runs))
    for first in range(0, geo.chunk, 8):
        for run in range(runs):  # a phase of stmatrix: one run of eight tokens
            assert len({swizzled_run(first + token, run, runs) % 8 for token in range(8)}) == 8
    for first in range(0, geo.chunk, 8 // runs):  # a phase of a 16-byte load: all runs of some tokens
        assert len({swizzled_run(first + i // runs, i % runs, runs) % 8 for i in range(8)}) == 8


def test_registers_of_all_roles_fit_a_multiprocessor() -> None:
    for warps in (8, 12, 16):
        launch, math = launch_registers(warps + 4), math_registers(warps)
        assert launch * (warps + 4) * 32 <= 65536
        assert math * warps + PRODUCER_REGISTERS * 4 <= launch * (warps + 4)
        assert math % 8 == 0


@pytest.mark.parametrize(
    ("activation", "group", "tile_k", "step", "rows", "promotes"),
    [
        ("float16", 128, 128, 128, 1, False),
        ("float16", 64, 128, 64, 2, False),
        ("float16", 192, 128, 64, 2, False),
        ("float16", 128, 256, 128, 2, False),
        ("float16", 32, 64, 32, 2, False),
        ("float16", 16, 64, 16, 4, False),
        ("float16", 1024, 128, 128, 1, False),
        ("int8", 128, 128, 128, 1, True),
        ("int8", 64, 256, 64, 4, True),
        ("int8", 16, 128, 16, 8, True),
        ("fp8_e4m3", 192, 128, 64, 2, True),
        ("fp8_e4m3", 1024, 256, 256, 1, True),
    ],
)
def test_scale_steps_divide_group_and_stage(
    activation: str, group: int, tile_k: int, step: int, rows: int, promotes: bool
) -> None:
    problem = gemm(activation=activation, group_size=group, scale=group < 1024, output="float32")
    placement = "operand" if activation == "float16" else "accumulator"
    geo = WgmmaGeometry(problem, schedule(tile_k=tile_k, stages=3, placement=placement))
    assert (geo.scale_step, geo.scale_rows) == (step, rows)
    assert geo.promotes == promotes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"warps": 6}, "warps=6 is not one of 4, 8, 12, 16"),
        ({"tile_m": 72}, "tile_m=72 is not one of"),
        ({"tile_n": 64}, "64 rows for each of 2 warpgroups"),
        ({"tile_k": 192}, "tile_k=192 is not one of"),
        ({"split_k": 3}, "split_k=3 is not one of"),
        ({"split_k": 2, "persistent": True}, "do not split K"),
        ({"cluster": 4, "tile_m": 16}, "cannot share"),
        ({"cluster": 4, "tile_m": 80}, "cannot share"),
        ({"stream_k": True}, "of a persistent grid"),
        ({"stream_k": True, "persistent": True, "cluster": 2}, "without clusters"),
        ({"tile_k": 64, "stages": 2}, "wait for ever; use at least 3"),
        ({"tile_m": 256, "tile_n": 256, "tile_k": 64, "stages": 3}, "registers"),
    ],
)
def test_illegal_schedules_say_why(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ScheduleError, match=reason):
        check_legal(gemm(), H200, schedule(**changes))


def test_tensor_copies_store_where_a_grid_is_persistent_and_memory_holds_two_buffers() -> None:
    plain = gemm(weight="fp8_e4m3", activation="fp8_e4m3", group_size=1024, scale=False, output="float16")
    large = schedule(tile_m=224, persistent=True, placement="accumulator")
    assert WgmmaGeometry(plain, large).store_buffers(H200) == 2
    assert WgmmaGeometry(plain, replace(large, persistent=False)).store_buffers(H200) == 0
    assert WgmmaGeometry(plain, replace(large, tile_m=208, stages=5)).store_buffers(H200) == 0  # no memory
    assert WgmmaGeometry(plain, replace(large, stream_k=True)).store_buffers(H200) == 0
    for other in ({"residual": True}, {"output": "float32"}, {"experts": 4}, {"weight": "fp8_e5m2"}):
        assert WgmmaGeometry(replace(plain, **other), large).store_buffers(H200) == 0


@pytest.mark.parametrize("tokens", range(64, 257, 16))
def test_copied_rows_divide_every_turn_and_keep_the_swizzle(tokens: int) -> None:
    geo = WgmmaGeometry(gemm(output="float16"), schedule(tile_m=tokens, persistent=True))
    assert geo.copied_rows % 8 == 0
    assert not geo.chunk % geo.copied_rows
    assert not tokens % geo.chunk % geo.copied_rows
