"""Every gemv schedule that is called legal can be emitted."""

from __future__ import annotations

from itertools import product

import pytest

from ladder.ir.gemm import Gemm
from schedules.footprint import resources
from schedules.legal import is_legal
from schedules.rules import RULES
from schedules.schedule import GpuSchedule
from targets import get_device

GEMMS = [
    Gemm(n=4096, k=4096, weight="int4", group_size=128, scale=True),
    Gemm(n=4096, k=4096, weight="int2", group_size=128, scale=True, zero="none"),
    Gemm(n=4096, k=4096, weight="nf4", group_size=64, scale=True),
    Gemm(n=4096, k=4096, weight="uint4", group_size=64, scale=True, zero="float"),
    Gemm(n=4096, k=4096, weight="fp4_e2m1", activation="bfloat16", group_size=32, scale=True),
    Gemm(n=4096, k=4096, weight="int2", activation="int8", output="float32"),
]


@pytest.mark.costly
@pytest.mark.parametrize("gemm", GEMMS, ids=lambda gemm: f"{gemm.weight} {gemm.activation} {gemm.zero}")
@pytest.mark.parametrize("name", ["sm_75", "sm_80", "sm_90a"])
def test_legal_schedules_have_a_geometry(gemm: Gemm, name: str) -> None:
    device, rule = get_device(f"cuda/{name}"), RULES["gemv"]
    if not device.cores_for(gemm.activation, "gemv"):
        pytest.skip(f"{name} has no core for {gemm.activation}")
    legal = 0
    for tile_m, stages, warps, split, placement, rows in product(
        rule.tile_m, rule.stages, (1, 7, 8, 12, 16, 24, 28, 32), rule.split_k, rule.placement, rule.warp_rows
    ):
        schedule = GpuSchedule(
            "gemv", tile_m, stages=stages, warps=warps, split_k=split, placement=placement, warp_rows=rows
        )
        if not is_legal(gemm, device, schedule):
            continue
        legal += 1
        geometry = geometry_of(gemm, device, schedule)
        assert geometry.unit_chunks * tile_m <= geometry.buffer_chunks
        assert geometry.resident_blocks <= max(1, resources(gemm, device, schedule).blocks_per_unit)
    assert legal > 50


def geometry_of(gemm: Gemm, device, schedule: GpuSchedule):
    from ladder.lower.cuda.gemv_geometry import GemvGeometry
    from ladder.lower.gpu.decode import make_decoder
    from ladder.lower.gpu.groups import Groups
    from ladder.lower.gpu.instructions import select_step

    decoder = make_decoder(
        gemm, device, schedule.placement, gains=True, table=device.shared_per_block // 2, offset_clocks=24
    )
    step = select_step(device, gemm.activation)
    return GemvGeometry(Groups(gemm, schedule.placement), step, device, schedule, 4 * decoder.table_words)
