"""Fused decoding: one multiply-add per register gives the correctly rounded scaled value."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.ir.gemm import Gemm
from ladder.lower.cuda.wgmma_decode import scaled_decoder
from schedules.layouts import SCALE_EXPONENT
from targets import get_device
from tile_types import get_type

H200 = get_device("cuda/sm_90a")


def gemm(weight: str, activation: str = "float16", **changes: object) -> Gemm:
    return Gemm(256, 1024, weight, activation, group_size=128, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", ["int1", "int2", "int3", "int4", "uint4", "int8", "fp4_e2m1", "fp8_e4m3"])
def test_fused_multiply_add_rounds_like_one_product(weight: str) -> None:
    decoder = scaled_decoder(gemm(weight), H200)
    assert decoder.fused
    scales = np.random.default_rng(0).uniform(0.01, 1.0, 500) * 2.0**SCALE_EXPONENT
    scales = np.append(scales.astype(np.float16).astype(np.float64), 0.0)
    values = get_type(weight).element_type.probe_values().astype(np.float64)
    for gain, offset in zip(decoder.decoder.gains, decoder.decoder.offsets, strict=True):
        raw = (values - offset) / gain
        np.testing.assert_array_equal(raw.astype(np.float16), raw)
        factors = [scales * gain, scales * offset]
        for factor in factors:
            np.testing.assert_array_equal(factor.astype(np.float16), factor)
        fused = (raw[:, None] * factors[0] + factors[1]).astype(np.float16)
        np.testing.assert_array_equal(fused, (values[:, None] * scales).astype(np.float16))


@pytest.mark.parametrize(
    "problem",
    [gemm("int4", "bfloat16"), gemm("uint4", zero="integer"), gemm("ternary", scale=False), gemm("nf4")],
)
def test_others_subtract_and_scale_apart(problem: Gemm) -> None:
    assert not scaled_decoder(problem, H200).fused
