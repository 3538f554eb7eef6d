"""Every gemv, digits and mma schedule that the policy proposes is one that the emitters accept."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from ladder.lower.cuda import digit_geometry, gemv_geometry, mma_geometry
from schedules.policy import GPU_BUCKETS, rank, typical_m
from schedules.schedule import GpuSchedule
from targets import get_device
from tile_types import representable
from tile_types.errors import ConversionError

SPECS = {
    "gemv": gemv_geometry.choose_spec,
    "digits": digit_geometry.choose_spec,
    "mma": mma_geometry.choose_spec,
}
"""Pipeline -> the decisions about a kernel, which check its sizes against the device's."""


def accepted(arch: str, weight: str, group: int, zero: str) -> set[str]:
    """Return the pipelines of all schedules that are proposed for an architecture, each accepted."""
    found, device = set(), get_device(f"cuda/{arch}")
    for activation in ("float16", "bfloat16", "int8", "fp8_e4m3"):
        if not representable(weight, activation, zero):
            continue  # no product has these operands
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
                SPECS[schedule.pipeline](gemm, device, schedule)
                found.add(schedule.pipeline)
    return found


@pytest.mark.costly
@pytest.mark.parametrize("arch", ["sm_70", "sm_75", "sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("weight", ["uint1", "int3", "nf4", "int8"])
@pytest.mark.parametrize(("group", "zero"), [(128, "none"), (16, "integer"), (0, "none")])
def test_emitters_accept_proposed_schedules(arch: str, weight: str, group: int, zero: str) -> None:
    accepted(arch, weight, group, zero)


def test_schedules_of_all_pipelines_are_proposed_and_accepted() -> None:
    assert accepted("sm_89", "uint1", 128, "none") == set(SPECS)
