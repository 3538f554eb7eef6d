"""Kernels that deal K add in one order: a row of their results has the same bits on the simulator."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from problems import emitted, gemm, gemv, problem_of, wgmma

from ladder.simulate import simulate_launch
from schedules.policy import order_of_sums
from schedules.schedule import GpuSchedule
from targets import get_device

PROBLEMS = {
    "int4": gemm(weight="int4", group_size=128, scale=True, n=67, k=1100, output="float32"),
    "zero points": gemm(
        weight="uint4", activation="bfloat16", group_size=64, scale=True, zero="integer", n=67, k=1100
    ),
    "fp8": gemm(weight="fp8_e4m3", activation="fp8_e4m3", n=67, k=1100, output="float32"),
    "exponents": gemm(weight="fp4_e2m1", group_size=32, scale=True, power_scales=True, n=67, k=1100),
}

STREAMED = gemv(placement="operand", stages=2, warps=16, split_k=8, warp_rows=32)

DEALT = {
    "eight blocks": wgmma(tile_m=8, tile_k=256, split_k=8, deal=8),
    "two blocks": wgmma(tile_m=16, tile_n=128, tile_k=256, warps=8, split_k=2, deal=8),
    "two blocks that finish rows of x": wgmma(tile_m=32, tile_k=128, split_k=2, deal=8),
    "four blocks": wgmma(tile_m=8, tile_k=64, split_k=4, deal=8),
    "one block": wgmma(tile_m=32, tile_k=128, deal=8),
}


def results(name: str, schedule: GpuSchedule, m: int) -> np.ndarray[Any, Any]:
    """Return what a kernel makes of the first rows of a problem's x."""
    problem = PROBLEMS[name]
    x, *weights = problem_of(problem, 9).arrays
    y = np.full((m, problem.n), np.nan, np.float32)
    found = simulate_launch(emitted(problem, schedule), [x[:m], *weights, y], outputs=(-1,))
    assert not found.findings, found.report()
    return y


@pytest.mark.costly
@pytest.mark.parametrize("name", [name for name in PROBLEMS if name != "fp8"])
@pytest.mark.parametrize("blocks", DEALT)
def test_rows_keep_their_bits(name: str, blocks: str) -> None:
    device = get_device("cuda/sm_90a")
    orders = {order_of_sums(PROBLEMS[name], device, each) for each in (STREAMED, DEALT[blocks])}
    assert orders == {("dealt", 8)}
    few, many = results(name, STREAMED, 3), results(name, DEALT[blocks], 9)
    assert np.array_equal(few.view(np.uint32), many[:3].view(np.uint32))


@pytest.mark.parametrize("tile", [(32, 64, 128, 4), (16, 128, 256, 8), (128, 64, 128, 4)])
def test_sums_of_fp8_products_are_widened_after_the_same_columns(tile: tuple[int, int, int, int]) -> None:
    problem, device = PROBLEMS["fp8"], get_device("cuda/sm_90a")
    least = wgmma(tile_m=8, tile_k=256, placement="accumulator")
    tile_m, tile_n, tile_k, warps = tile
    other = wgmma(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, warps=warps, placement="accumulator")
    orders = {order_of_sums(problem, device, each) for each in (least, other)}
    assert orders == {("wgmma", "accumulator", 1, 512)}
    few, many = results("fp8", least, 3), results("fp8", other, 9)
    assert np.array_equal(few.view(np.uint32), many[:3].view(np.uint32))


@pytest.mark.parametrize(
    ("least", "other"),
    [
        (wgmma(tile_m=64), wgmma(tile_m=192)),  # sums that carry
        (wgmma(tile_m=64), wgmma(tile_m=64, tile_n=128)),  # two row tiles of a warpgroup
    ],
)
def test_tiles_that_widen_elsewhere_have_another_order(least: GpuSchedule, other: GpuSchedule) -> None:
    device = get_device("cuda/sm_90a")
    orders = [order_of_sums(PROBLEMS["fp8"], device, each) for each in (least, other)]
    assert orders[0] != orders[1]
