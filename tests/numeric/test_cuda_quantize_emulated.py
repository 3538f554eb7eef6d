"""Quantising kernels round rows as defined: generated CUDA, run thread by thread on the host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cuda_emulator
import ml_dtypes
import numpy as np
import pytest

from ladder.lower.build import emit_quantizer
from ladder.lower.gpu.quantize import Quantization
from targets import get_device
from tile_types.errors import ConversionError, DTypeError, ScheduleError

pytestmark = pytest.mark.skipif(bool(cuda_emulator.missing_tools()), reason=cuda_emulator.missing_tools())

NUMPY = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "float32": np.float32,
    "int8": np.int8,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
}

CASES = {
    "one warp": (Quantization("float16", "int8", threads=32, chunks=1), 64),
    "rows longer than the registers": (Quantization("bfloat16", "fp8_e4m3", threads=64, chunks=1), 2000),
    "odd K": (Quantization("float16", "fp8_e5m2", threads=64, chunks=2), 1003),
    "float32": (Quantization("float32", "int8", threads=96, chunks=2), 1000),
    "groups of 128": (Quantization("bfloat16", "fp8_e4m3", 128, 64), 1096),
    "groups of 128, odd K": (Quantization("float32", "int8", 128, 32), 261),
}


def _expected(x: Any, plan: Quantization) -> tuple[Any, Any]:
    """Return codes as float64 and scales, in float32 arithmetic as the kernel defines it."""
    wide = x.astype(np.float32)
    group = plan.group or x.shape[1]
    padded = np.zeros((x.shape[0], -(-x.shape[1] // group), group), np.float32)
    padded.reshape(x.shape[0], -1)[:, : x.shape[1]] = wide
    largest = np.abs(padded).max(axis=2)
    scale = np.maximum(largest / np.float32(plan.limit), np.float32(2.0**-126))
    units = padded * (np.float32(1) / scale)[..., None]
    units = units.reshape(x.shape[0], -1)[:, : x.shape[1]]
    codes = np.rint(units) if plan.activation == "int8" else units.astype(NUMPY[plan.activation])
    return codes.astype(np.float64), scale if plan.group else scale[:, 0]


@pytest.mark.daily(3)
@pytest.mark.parametrize("case", CASES)
def test_codes_and_scales(case: str, tmp_path: Path) -> None:
    plan, k = CASES[case]
    device = get_device("cuda/sm_90a")
    kernel = cuda_emulator.Kernel(emit_quantizer(plan, device, "emulated"), device, tmp_path)
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(4, k)) * np.array([[1], [1e-3], [1e3], [0]])).astype(NUMPY[plan.source])
    expected, expected_scale = _expected(x, plan)
    memory = np.full(x.size + 64, 77, np.uint8)
    codes = memory[: x.size].view(NUMPY[plan.activation]).reshape(x.shape)
    scale = np.full(expected_scale.shape, np.nan, np.float32)
    kernel(x, codes, scale, reverse=True)
    assert (memory[x.size :] == 77).all(), "stored beyond the codes"
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes.astype(np.float64), expected)


@pytest.mark.daily(3)
@pytest.mark.parametrize("group", [0, 128])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_makes_the_scale_nan(group: int, value: float, tmp_path: Path) -> None:
    device = get_device("cuda/sm_90a")
    plan = Quantization("float16", "int8", group, 64)
    kernel = cuda_emulator.Kernel(emit_quantizer(plan, device, "emulated"), device, tmp_path)
    x = np.ones((3, 256), np.float16)
    x[1, 200] = value
    codes, scale = np.zeros(x.shape, np.int8), np.zeros((3, 2) if group else 3, np.float32)
    kernel(x, codes, scale)
    wrong = np.isnan(scale)
    assert wrong.sum() == 1
    assert wrong[1].any()
    assert (codes[[0, 2]] == 127).all()


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(DTypeError, match="float64"):
        Quantization("float64", "int8")
    with pytest.raises(ScheduleError, match="whole warps"):
        Quantization("float16", "int8", threads=48)
    with pytest.raises(ScheduleError, match="power of two"):
        Quantization("float16", "int8", group=96)
    with pytest.raises(ConversionError, match="fp8_e4m3"):
        emit_quantizer(Quantization("float16", "fp8_e4m3"), get_device("cuda/sm_80"), "kernel")
