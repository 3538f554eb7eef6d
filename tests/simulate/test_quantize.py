"""Quantising kernels round rows as defined, executed by the simulator."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from problems import NUMPY, SimulatedKernel
from rewriting import argument, remove, rewrite, stored

from ladder.lower.build import emit_quantizer
from ladder.simulate import simulate_launch
from ladder.simulate.machine import ORDERS
from ladder.simulate.operator import simulate_tokens
from schedules.quantization import Quantization, tiled
from targets import get_device
from tile_types.errors import ConversionError, DTypeError, ScheduleError

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


def _row(plan: Quantization, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return x and poisoned outputs."""
    rng = np.random.default_rng(3)
    x = (rng.normal(size=(4, k)) * np.array([[1], [1e-3], [1e3], [0]])).astype(NUMPY[plan.source])
    codes = np.full(x.shape, 77, np.uint8).view(NUMPY[plan.activation])
    return x, codes, np.full(_expected(x, plan)[1].shape, np.nan, np.float32)


TARGETS = ("cuda/sm_90a", "rocm/gfx90a", "rocm/gfx942", "rocm/gfx950", "rocm/gfx1100", "rocm/gfx1201")


def _kernels() -> list[tuple[str, str]]:
    """Return every case on every target that multiplies its codes."""
    return [
        (case, target)
        for case, (plan, _) in CASES.items()
        for target in TARGETS
        if get_device(target).cores_for(plan.activation)
    ]


@pytest.mark.parametrize(("case", "target"), _kernels())
def test_codes_and_scales(case: str, target: str) -> None:
    plan, k = CASES[case]
    device = get_device(target)
    plan = replace(plan, threads=-(-plan.threads // device.warp) * device.warp)
    x, codes, scale = _row(plan, k)
    SimulatedKernel(emit_quantizer(plan, device, "simulated"), (1, 2), target)(x, codes, scale)
    expected, expected_scale = _expected(x, plan)
    np.testing.assert_array_equal(scale, expected_scale)
    np.testing.assert_array_equal(codes.astype(np.float64), expected)


@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("group", [0, 128])
def test_what_is_not_finite_makes_the_scale_nan(target: str, group: int) -> None:
    device = get_device(target)
    x = np.ones((3, 256), np.float16)
    x[0, 3], x[1, 200] = np.inf, np.nan
    codes, scale = np.zeros(x.shape, np.int8), np.zeros((3, 2) if group else 3, np.float32)
    plan = tiled("float16", "int8", group, 256, device.vendor)
    SimulatedKernel(emit_quantizer(plan, device, "simulated"), (1, 2), target)(x, codes, scale)
    wrong = np.isnan(scale).reshape(3, -1)
    assert wrong.any(axis=1).tolist() == [True, True, False]
    assert wrong.sum() == 2
    assert (codes[2] == 127).all()


@pytest.mark.parametrize("order", ORDERS)
def test_the_kernels_that_users_get(order: str) -> None:
    x = np.random.default_rng(5).normal(size=(3, 5000)).astype(np.float16)
    for activation, group in (("int8", 0), ("fp8_e4m3", 128)):
        result = simulate_tokens(x, activation, get_device("rocm/gfx942"), group=group, order=order)
        assert not result.findings, result.report()
        assert result.relative_error < 0.04
        assert not result.bank_conflicts


def test_rows_of_amd_kernels_are_whole_waves() -> None:
    with pytest.raises(ScheduleError, match="whole waves"):
        emit_quantizer(Quantization("float16", "int8", threads=96), get_device("rocm/gfx942"), "simulated")
    with pytest.raises(ConversionError, match="fp8_e4m3"):
        emit_quantizer(Quantization("float16", "fp8_e4m3"), get_device("rocm/gfx90a"), "simulated")
    assert tiled("float16", "int8", 0, 28672, "amd").threads == 256


@pytest.mark.parametrize(
    ("target", "barrier"),
    [("cuda/sm_90a", "tirx.cuda.cta_sync"), ("rocm/gfx942", "tirx.tvm_storage_sync")],
)
def test_the_barrier_matters(target: str, barrier: str) -> None:
    device, (plan, k) = get_device(target), CASES["rows longer than the registers"]
    plan = replace(plan, threads=2 * device.warp)
    function = rewrite(emit_quantizer(plan, device, "simulated"), remove(barrier, 0))
    assert "race" in simulate_launch(function, _row(plan, k), target=device, outputs=(1, 2)).kinds()


def _beyond(e: Any) -> Any:
    return e + 8 if type(e).__name__ != "Ramp" else type(e)(e.base + 8, e.stride, e.lanes)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda: stored("global", "int8", index=_beyond), "out of bounds"),
        (lambda: stored("global", "float32", index=lambda e: e + 1), "out of bounds"),
    ],
)
def test_mutants_of_amd_kernels_are_caught(change: Any, kind: str) -> None:
    device, plan = get_device("rocm/gfx942"), Quantization("float16", "int8", threads=64, chunks=1)
    function = emit_quantizer(plan, device, "simulated")
    mutant = rewrite(function, change())
    assert mutant.script() != function.script()
    assert kind in simulate_launch(mutant, _row(plan, 64), target=device, outputs=(1, 2)).kinds()


def test_stores_beyond_the_row() -> None:
    from tvm import tirx

    plan, k = CASES["one warp"]

    def later(e: tirx.Expr) -> tirx.Expr:
        load = e.args[0]
        row, column = load.indices
        from tvm import ir

        return ir.Call(e.op, [load.source.vload([row, column + 8])], e.attrs, e.ty_args, e.span, e.ty)

    function = emit_quantizer(plan, get_device("cuda/sm_90a"), "simulated")
    changed = rewrite(function, argument("tirx.ptx.st_vec", 0, later))
    result = simulate_launch(changed, _row(plan, k), outputs=(1, 2))
    assert {"out of bounds", "unwritten"} <= result.kinds()


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(DTypeError, match="float64"):
        Quantization("float64", "int8")
    with pytest.raises(ScheduleError, match="whole warps"):
        Quantization("float16", "int8", threads=48)
    with pytest.raises(ScheduleError, match="power of two"):
        Quantization("float16", "int8", group=96)
    with pytest.raises(ConversionError, match="fp8_e4m3"):
        emit_quantizer(Quantization("float16", "fp8_e4m3"), get_device("cuda/sm_80"), "kernel")
