"""Every gemv and mma schedule that the policy proposes is one that the emitters accept."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from ladder.lower.cuda import gemv_geometry, mma_geometry
from ladder.lower.gpu.groups import Groups
from ladder.lower.gpu.instructions import select_step
from schedules.policy import GPU_BUCKETS, rank, typical_m
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types.errors import ConversionError

GEOMETRIES = {"gemv": gemv_geometry.GemvGeometry, "mma": mma_geometry.MmaGeometry}


@pytest.mark.costly
@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("weight", ["uint1", "int3", "nf4", "int8"])
@pytest.mark.parametrize(("group", "zero"), [(128, "none"), (16, "integer"), (0, "none")])
def test_emitters_accept_proposed_schedules(arch: str, weight: str, group: int, zero: str) -> None:
    device = get_device(f"cuda/{arch}")
    for activation in ("float16", "bfloat16", "int8", "fp8_e4m3"):
        gemm = Gemm(1031, 2048, weight, activation, group_size=group, scale=group > 0, zero=zero)
        for limit in GPU_BUCKETS:
            try:
                candidates = rank(gemm, device, typical_m(limit))[:3]
            except ConversionError:
                continue  # this generation has no core for the activation
            assert candidates
            for candidate in candidates:
                schedule = candidate.schedule
                assert isinstance(schedule, GpuSchedule)
                step = select_step(device, activation)
                groups = Groups(gemm, schedule.placement)
                geometry = GEOMETRIES[schedule.pipeline](groups, step, device, schedule)
                assert geometry.shared_bytes <= device.shared_per_block
