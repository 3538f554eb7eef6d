"""The promoting loop's plan, evaluated with plain integers."""

from __future__ import annotations

from itertools import pairwise, product

import pytest

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.lower.cuda.wgmma8_units import STEP, Loop
from ladder.lower.cuda.wgmma_geometry import WgmmaGeometry
from schedules.footprint import FP8_INTERVAL, math_register_estimate, math_registers
from schedules.schedule import GpuSchedule
from targets import get_device

TILES = (
    *((8, 64, 4), (8, 192, 4), (64, 128, 8), (32, 128, 4), (128, 128, 8), (128, 64, 4), (256, 128, 8)),
    *((96, 128, 4), (144, 64, 4), (208, 128, 8)),
)


def plan(tile: tuple[int, int, int], activation: str, weight: str, group: int, tile_k: int = 128) -> Loop:
    tile_m, tile_n, warps = tile
    gemm = Gemm(256, 4096, weight, activation, "float32", group, scale=group < 4096)
    schedule = GpuSchedule("wgmma", tile_m, tile_n, tile_k, 3, warps, placement="accumulator")
    return Loop(WgmmaGeometry(gemm, schedule))


PLANS = [
    plan(tile, activation, weight, group, tile_k)
    for tile, (activation, weight), group, tile_k in product(
        TILES,
        (("int8", "int4"), ("int8", "int8"), ("fp8_e4m3", "int4")),
        (16, 32, 96, 128, 1024, 4096),
        (128, 256),
    )
]


@pytest.mark.parametrize("loop", PLANS, ids=str)
def test_units_cover_a_turn_once_and_alternate(loop: Loop) -> None:
    geo, units = loop.geo, loop.units()
    covered = [
        (unit.slab * geo.slab + k, unit.m, token)
        for unit in units
        for k in range(unit.start, unit.end, 16)
        for token in range(unit.first_m, unit.first_m + loop.unit_m)
    ]
    everything = product(range(0, loop.iteration, 16), range(geo.m64), range(geo.schedule.tile_m))
    assert sorted(covered) == sorted(everything)
    for before, after in pairwise(units):
        assert loop.banks == 1 or before.bank != after.bank or not before.done


@pytest.mark.parametrize("loop", PLANS, ids=str)
def test_sums_start_anew_and_end_with_their_group(loop: Loop) -> None:
    geo = loop.geo
    mine = [unit for unit in loop.units() if (unit.m, unit.first_m) == (0, 0)]
    for unit in mine:
        first = unit.slab * geo.slab + unit.start
        if geo.promotes and not loop.long:
            assert unit.fresh == (first % loop.interval == 0)
            assert unit.done == ((first + unit.extent) % loop.interval == 0)
            assert geo.groups.size % loop.interval == 0
        else:
            assert unit.fresh == (first == 0)
            assert not unit.done


def test_long_sums_of_fp8_stay_in_the_tensor_core() -> None:
    for tile in ((128, 128, 8), (64, 64, 4)):
        loop = plan(tile, "fp8_e4m3", "fp8_e4m3", 4096)
        assert loop.long
        assert loop.iterations * loop.iteration == FP8_INTERVAL
        assert math_register_estimate(loop.geo.gemm, loop.geo.schedule) <= math_registers(tile[2])
    assert not plan((128, 128, 8), "fp8_e4m3", "fp8_e4m3", 128).long
    # Products of two row tiles in turn would need two sets of sums besides the totals.
    assert not plan((32, 128, 4), "fp8_e4m3", "fp8_e4m3", 4096).long


@pytest.mark.parametrize(
    ("weight", "activation", "group"),
    [("int4", "int8", 128), ("int8", "int8", 4096), ("fp4_e2m1", "fp8_e4m3", 16), ("int4", "fp8_e4m3", 4096)],
)
def test_emitted_products_are_the_planned_ones(weight: str, activation: str, group: int) -> None:
    gemm = Gemm(256, 4096, weight, activation, "float32", group, scale=group < 4096)
    schedule = GpuSchedule("wgmma", 128, 128, 128, 3, 8, placement="accumulator")
    loop = Loop(WgmmaGeometry(gemm, schedule))
    steps = sum(max(1, unit.extent // STEP) for unit in loop.units())
    text = emit(gemm, get_device("cuda/sm_90a"), schedule, "kernel").script()
    assert text.count("mma_async") == steps
