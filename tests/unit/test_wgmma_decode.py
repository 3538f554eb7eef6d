"""Operands of the wgmma pipeline: one multiply-add per register wherever that rounds once."""

from __future__ import annotations

import pytest

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.lower.cuda.wgmma_geometry import scaled_decoder
from schedules.codes import table_bytes
from schedules.schedule import GpuSchedule
from targets import get_device

H200 = get_device("cuda/sm_90a")


def gemm(weight: str, activation: str = "float16", **changes: object) -> Gemm:
    return Gemm(256, 1024, weight, activation, group_size=128, **changes)  # type: ignore[arg-type]


FUSED = {"int1": 1, "int2": 2, "int3": 2, "int4": 2, "uint4": 1, "int8": 2, "fp4_e2m1": 1, "fp8_e4m3": 1}


@pytest.mark.parametrize(("weight", "factors"), FUSED.items())
def test_raw_operands_meet_their_scale_once(weight: str, factors: int) -> None:
    decoder = scaled_decoder(gemm(weight), H200)
    assert decoder.fold is not None
    assert decoder.factors == factors
    assert decoder.gains == (1.0, 1.0)


@pytest.mark.parametrize(
    "problem",
    [gemm("int4", "bfloat16"), gemm("uint4", zero="integer"), gemm("ternary", scale=False), gemm("nf4")],
)
def test_others_subtract_and_scale_apart(problem: Gemm) -> None:
    decoder = scaled_decoder(problem, H200, table_bytes(problem))
    assert decoder.fold is None
    assert decoder.factors == 1


def test_bfloat16_folds_the_exponent_bias_into_scales() -> None:
    assert scaled_decoder(gemm("fp4_e2m1", "bfloat16"), H200).choice.strategy == "xor, unscaled"


@pytest.mark.parametrize(("weight", "apart"), [("nf4", True), ("int4", False)])
def test_products_of_a_slab_start_before_codes_of_the_next_are_looked_up(weight: str, apart: bool) -> None:
    schedule = GpuSchedule("wgmma", tile_m=16, tile_n=64, tile_k=128, stages=3, warps=4)
    kernel = emit(gemm(weight, output="float16"), H200, schedule, "kernel")
    started = kernel.script().split("commit_group")[1]
    assert ("warp_sync" in started.split("wait_group")[0]) == apart
