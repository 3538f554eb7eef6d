"""`simulate_tokens`: the kernel that quantises tokens on a GPU, executed on the CPU and compared."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ladder.lower.gpu.arguments import tir_name
from ladder.simulate.findings import Finding
from ladder.simulate.launch import SimulationResult, simulate_launch
from ladder.simulate.operator import FAMILIES
from ladder.simulate.values import NUMPY, Array
from targets import TileDevice

OUTPUTS = ("codes", "token_scale")


def simulate_tokens(
    x: Array, activation: str, device: TileDevice, *, group: int = 0, order: str = "together"
) -> SimulationResult:
    """Execute the kernel that quantises rows of x on a GPU, and compare every code and scale.

    x: ``[M, K]``, float16, bfloat16 (of ml_dtypes) or float32.
    activation: ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
    device: A GPU that multiplies them.
    group: Elements along K that share a scale; 0: all of a row.
    order: See `simulate_launch`.
    Returns: `SimulationResult` whose outputs are codes ``[M, K]`` and scales ``[M]`` or ``[M, groups]``. What
        is not ``x / scale``, rounded once, is a finding. ``relative_error`` is that of codes times scales
        against x.
    Raises ConversionError if the device does not multiply the type.
    """
    from ladder.lower.build import emit_quantizer
    from ladder.lower.gpu.quantize import tiled
    from ladder.lower.tvm_lock import tvm_lock

    plan = tiled(str(x.dtype), activation, group, x.shape[1], device.vendor)
    with tvm_lock():
        function = emit_quantizer(plan, device, "simulated")
    expected, expected_scale = quantized(x, activation, plan.limit, group)
    codes = np.full(x.shape, 77, np.uint8).view(NUMPY[tir_name(activation)])
    scale = np.full(expected_scale.shape, np.nan, np.float32)
    result = simulate_launch(
        function, [x, codes, scale], outputs=(1, 2), names=("x", *OUTPUTS),
        calls=FAMILIES[device.kind](device.arch), order=order,
    )  # fmt: skip
    findings = list(result.findings)
    for name, found, exact in zip(OUTPUTS, (codes, scale), (expected, expected_scale), strict=True):
        wrong = int((found.astype(np.float64) != exact.astype(np.float64)).sum())
        if wrong:
            findings.append(Finding("wrong values", f"{wrong} of {found.size} {name} are not as defined"))
    each = np.repeat(scale.reshape(len(x), -1), group or x.shape[1], axis=1)[:, : x.shape[1]]
    error = np.linalg.norm(codes.astype(np.float64) * each - x.astype(np.float64))
    size = float(np.linalg.norm(x.astype(np.float64)))
    return replace(result, findings=tuple(findings), relative_error=float(error) / (size or 1.0))


def quantized(x: Array, activation: str, limit: float, group: int = 0) -> tuple[Array, Array]:
    """Return codes (as float64) and float32 scales as `ladder.lower.gpu.quantize.Quantizer` defines them."""
    rows, k = x.shape
    width = group or k
    padded: Any = np.zeros((rows, -(-k // width), width), np.float32)
    padded.reshape(rows, -1)[:, :k] = x.astype(np.float32)
    scale = np.maximum(np.abs(padded).max(axis=2) / np.float32(limit), np.float32(2.0**-126))
    units = (padded * (np.float32(1) / scale)[..., None]).reshape(rows, -1)[:, :k]
    codes = np.rint(units) if activation == "int8" else units.astype(NUMPY[tir_name(activation)])
    return codes.astype(np.float64), scale if group else scale[:, 0]
