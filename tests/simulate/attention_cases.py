"""Runs attention kernels on the simulator, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from ladder.ir.attention import AXES, CODES, Attention
from ladder.lower.build import ATTENTION, resolve
from ladder.simulate import SimulationResult, simulate_launch
from schedules.attention import AnySchedule
from targets import get_device

NUMPY: dict[str, Any] = {
    "float16": np.float16, "bfloat16": ml_dtypes.bfloat16, "float32": np.float32, "int8": np.int8,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2, "uint8": np.uint8,
    "int64": np.int64, "int32": np.int32,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2,
}  # fmt: skip


BOUNDS = {"float16": 5e-4, "bfloat16": 3e-3}
"""Type of q -> relative error of a result."""


def reference(
    form: Attention, given: dict[str, np.ndarray], batch: int, tokens: int, keys: int
) -> np.ndarray:
    """Return the result ``[batch, heads, tokens, size]`` in float64; rows that see no key are 0, or NaN."""
    q, k, v = (given[name].astype(np.float64) for name in "qkv")
    if form.stored in CODES:
        k, v = k * given["k_scale"], v * given["v_scale"]
    k, v = (np.nan_to_num(np.repeat(value, form.group, axis=1)) for value in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) * form.scale
    seen = np.ones((batch, 1, tokens, keys), bool)
    if form.causal:
        seen &= np.tril(np.ones((tokens, keys), bool))
    if form.position:
        limit = np.broadcast_to(given["position"], (batch, tokens)) + form.reach
        seen = seen & (np.arange(keys) < limit[:, None, :, None])
    if form.mask == "bool":
        seen = seen & given["mask"].astype(bool)
    elif form.mask:
        scores = scores + given["mask"].astype(np.float64)
    scores = np.where(seen, scores, -np.inf)
    top = np.maximum(scores.max(-1, keepdims=True, initial=-np.inf), -1e300)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    unseen = np.nan if form.strict and keys else 0.0
    return np.where(total > 0, weights @ v / np.where(total > 0, total, 1), unseen)


def draw(
    form: Attention, batch: int, tokens: int, keys: int, seed: int = 0, **given: Any
) -> dict[str, np.ndarray]:
    """Return arguments; ``given`` replaces some."""
    rng = np.random.default_rng(seed)
    stored = (batch, form.kv_heads, keys, form.size)
    q = rng.standard_normal((batch, form.heads, tokens, form.size)).astype(NUMPY[form.ttype])
    found: dict[str, np.ndarray] = {"q": q}
    for name in "kv":
        values = rng.standard_normal(stored)
        if form.stored in CODES:
            codes = values * (30 if form.stored == "int8" else 1)
            found[name] = (np.rint(codes) if form.stored == "int8" else codes).astype(NUMPY[form.stored])
            found[f"{name}_scale"] = rng.uniform(0.01, 0.05, (*stored[:3], 1)).astype(np.float32)
            found[f"{name}_scale"] *= 1 if form.stored == "int8" else 30
        else:
            found[name] = values.astype(NUMPY[form.stored])
    if form.mask == "bool":
        found["mask"] = (rng.uniform(size=(batch, 1, tokens, keys)) < 0.7).astype(np.uint8)
    elif form.mask:
        found["mask"] = rng.standard_normal((batch, 1, tokens, keys)).astype(NUMPY[form.mask])
    if form.position:
        found["position"] = rng.integers(0, keys, (batch, tokens)).astype(NUMPY[form.position])
    return found | given


def run(
    form: Attention, schedule: AnySchedule, batch: int, tokens: int, keys: int, *,
    given: dict[str, np.ndarray] | None = None, **options: Any,
) -> tuple[SimulationResult, float]:  # fmt: skip
    """Simulate a kernel; return what was found and the relative error (absolute for a zero result)."""
    given = draw(form, batch, tokens, keys) if given is None else given
    found, got = simulate(form, schedule, batch, tokens, keys, given, **options)
    exact = reference(form, given, batch, tokens, keys)
    if not np.array_equal(np.isnan(got), np.isnan(exact)):
        return found, math.inf
    norm = np.linalg.norm(np.nan_to_num(exact))
    return found, float(np.linalg.norm(np.nan_to_num(got - exact)) / (norm or 1.0))


def require_right(form: Attention, schedule: AnySchedule, *sizes: int, **options: Any) -> SimulationResult:
    """Simulate a kernel as `run`: nothing is found, and the error is one that rounding explains."""
    found, error = run(form, schedule, *sizes, **options)
    assert not found.findings, found.report()
    assert error < BOUNDS[form.ttype], f"error {error:.1e}"
    return found


def simulate(
    form: Attention, schedule: AnySchedule, batch: int, tokens: int, keys: int,
    given: dict[str, np.ndarray], *, target: str = "cuda/sm_90a", token_major: bool = False,
    change: Callable[[Any], Any] = lambda function: function, **options: Any,
) -> tuple[SimulationResult, np.ndarray]:  # fmt: skip
    """Simulate a kernel, changed before; return what was found and the result."""
    device = get_device(target)
    function = change(resolve(ATTENTION, "target kind", device.kind)(form, device, schedule, "simulated"))
    result = np.full((batch, form.heads, tokens, form.size), np.nan, NUMPY[form.ttype])
    arrays: dict[str, np.ndarray] = {}
    numbers: dict[str, int] = {"batch": batch, "tokens": tokens, "keys": keys}
    for name in form.tensors():
        array = result if name == "out" else given[name]
        if token_major and name in ("q", "out"):
            array = np.ascontiguousarray(array.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
        for axis, extent, stride in zip(AXES[name], array.shape, array.strides, strict=False):
            numbers[f"{name}_{axis}"] = 0 if extent == 1 else stride // array.itemsize
        order = np.argsort(array.strides, kind="stable")[::-1]
        arrays[name] = array.transpose(order).reshape(-1)
    values = [*(numbers[name] for name in form.numbers()), *arrays.values()]
    found = simulate_launch(function, values, target=device, **options)
    got = arrays["out"].astype(np.float64)
    if token_major:
        got = got.reshape(batch, tokens, form.heads, form.size).transpose(0, 2, 1, 3)
    return found, got.reshape(result.shape)
