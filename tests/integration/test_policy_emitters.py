"""Every schedule that the policy proposes is one that the emitter accepts."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from ladder.lower.cuda.wgmma_geometry import WgmmaGeometry
from schedules.policy import GPU_BUCKETS, rank, typical_m
from schedules.schedule import GpuSchedule
from targets import get_device

H200 = get_device("cuda/sm_90a")


@pytest.mark.costly
@pytest.mark.parametrize("weight", ["uint1", "int3", "int4", "nf4", "int8"])
@pytest.mark.parametrize("activation", ["float16", "int8", "fp8_e4m3"])
@pytest.mark.parametrize(("n", "k", "group"), [(8192, 8192, 128), (67, 1031, 16), (67, 1031, 0)])
def test_wgmma_accepts_proposed_schedules(weight: str, activation: str, n: int, k: int, group: int) -> None:
    gemm = Gemm(n, k, weight, activation=activation, group_size=group, scale=group > 0, zero="integer")
    for limit in GPU_BUCKETS:
        for candidate in rank(gemm, H200, typical_m(limit))[:3]:
            schedule = candidate.schedule
            assert isinstance(schedule, GpuSchedule)
            if schedule.pipeline == "wgmma":
                geometry = WgmmaGeometry(gemm, schedule)
                assert geometry.shared_bytes <= H200.shared_per_block
