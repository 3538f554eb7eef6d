"""What L2 holds: tiles that stream-K cuts begin anywhere in K, those of a wave keep step."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from schedules.cost import minimum_bytes, traffic_of, weight_bytes
from schedules.cost_grid import Grid, grid_of, launch_of, moved_bytes
from schedules.cost_model import predict
from schedules.schedule import GpuSchedule
from targets import get_device

H100 = get_device("cuda/sm_90a:h100")
WIDE = GpuSchedule("wgmma", 256, 128, 64, stages=5, warps=8, persistent=True, raster=32, stream_k=True)
HALF_WHOLE = GpuSchedule("wgmma", 128, 192, 128, stages=4, warps=12, persistent=True, stream_k=True)


def grid(gemm: Gemm, schedule: GpuSchedule, m: int, target: str = H100.name) -> Grid:
    """Return the blocks of a launch, spread evenly."""
    return grid_of(launch_of(gemm, get_device(target), schedule), schedule.tile_m, m, crowded=0.0)


def moved(gemm: Gemm, schedule: GpuSchedule, m: int, target: str = H100.name) -> int:
    """Return the bytes that cross DRAM."""
    blocks = grid(gemm, schedule, m, target)
    return moved_bytes(get_device(target), schedule, traffic_of(gemm, m), blocks)


def test_operands_that_fit_l2_are_read_once() -> None:
    gemm = Gemm(4096, 4096, "int4", group_size=128)
    assert moved(gemm, WIDE, 1500) == minimum_bytes(gemm, 1500)


@pytest.mark.parametrize(("schedule", "measured"), [(WIDE, 735.9e-6), (HALF_WHOLE, 576.5e-6)])
def test_two_kernels_of_long_sums_as_an_h100_ran_them(schedule: GpuSchedule, measured: float) -> None:
    gemm = Gemm(5120, 25600, "int4", group_size=128)
    assert predict(gemm, H100, schedule, 1500).seconds == pytest.approx(measured, rel=0.05)


def test_cut_tiles_read_more_the_less_l2_holds() -> None:
    gemm = Gemm(5120, 25600, "int4", group_size=128)
    bytes_of = [moved(gemm, WIDE, 1500, f"cuda/sm_90a:132sm-3352gbs-{mib}mib") for mib in (20, 50, 80, 150)]
    assert bytes_of == sorted(bytes_of, reverse=True)
    assert bytes_of[-1] == minimum_bytes(gemm, 1500)
    tiles = grid(gemm, WIDE, 1500)
    every = tiles.along_m * weight_bytes(gemm) + tiles.along_n * 1500 * gemm.k * 2
    assert bytes_of[0] < every


def test_what_is_used_often_stays() -> None:
    gemm = Gemm(5120, 25600, "int4", group_size=128)  # one tile along M: weights are used once, x 40 times
    one = GpuSchedule("wgmma", 208, 128, 64, stages=4, warps=8, persistent=True, stream_k=True)
    assert moved(gemm, one, 200) <= 1.05 * minimum_bytes(gemm, 200)
