"""Shipped kernels compute the matmul, with nothing to find: schedules that the policy chooses, and others."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
from gemm_cases import CASES, NUMPY
from hardware.configurations import Measured, load
from problems import SimulatedKernel, bound_of, emitted, gemm, gemv, problem_of, require_right, run, wgmma

from ladder.ir.gemm import Gemm
from ladder.lower.build import emit
from ladder.simulate.machine import ORDERS
from schedules.policy import make_plan
from schedules.tuning import TuningDatabase
from targets import get_device

PROBLEMS = {
    "int4": gemm(weight="int4", group_size=128, scale=True, output="float16", n=203, k=450),
    "uint4 zeros bfloat16": gemm(
        activation="bfloat16", group_size=64, scale=True, zero="integer", output="bfloat16", n=130, k=330
    ),
    "nf4 bias": gemm(weight="nf4", group_size=64, scale=True, output="float16", bias=True, n=131, k=200),
    "uint3 real zeros": gemm(weight="uint3", group_size=32, scale=True, zero="float", n=67, k=200),
    "fp4 bfloat16": gemm(weight="fp4_e2m1", activation="bfloat16", group_size=32, scale=True, n=67, k=330),
    "ternary": gemm(weight="ternary", output="float16", n=203, k=200),
    "int8 by int4": gemm(
        weight="int4", activation="int8", group_size=128, scale=True, token_scale=True, n=130, k=450
    ),
    "int8 by int8": gemm(weight="int8", activation="int8", token_scale=True, n=67, k=330),
    "fp8 blocks": gemm(
        weight="fp8_e4m3", activation="fp8_e4m3", group_size=128, scale=True, token_scale=True,
        token_group=128, n=203, k=450,
    ),
    "fp8 e5m2": gemm(weight="fp8_e5m2", activation="fp8_e5m2", n=67, k=200),
    "fp8 by fp4": gemm(weight="fp4_e2m1", activation="fp8_e4m3", group_size=32, scale=True, n=67, k=330),
    "relu": gemm(weight="int2", group_size=64, scale=True, epilogue=("relu",), n=130, k=200),
    "functions": gemm(
        weight="int4", group_size=64, scale=True, output="float16", bias=True, n=130,
        epilogue=("gelu", "silu"),
    ),
}  # fmt: skip
"""Types, with remainders in every dimension."""

TOKENS = (1, 16, 64, 129)


@cache
def _chosen(name: str, arch: str, m: int) -> Any:
    """Return the kernel that the policy chooses."""
    problem, device = PROBLEMS[name], get_device(f"cuda/{arch}")
    plan = make_plan(problem, device, TuningDatabase(None))
    return emit(problem, device, plan.entries[plan.index(m)][1], "chosen")


@pytest.mark.parametrize("m", TOKENS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_chosen_schedules(name: str, m: int) -> None:
    require_right(_chosen(name, "sm_90a", m), PROBLEMS[name], m)


@pytest.mark.parametrize("name", ["int4", "int8 by int4", "uint3 real zeros"])
@pytest.mark.parametrize("m", [1, 64])
def test_chosen_schedules_of_ampere(name: str, m: int) -> None:
    require_right(_chosen(name, "sm_80", m), PROBLEMS[name], m)


LARGE = {"tile_n": 128, "tile_k": 128, "warps": 8, "persistent": True, "placement": "accumulator"}
PARTED = {**LARGE, "tile_m": 256, "stages": 4}
FEW, FEW_WITH_TAILS = 2, 3
"""Multiprocessors of the device that large tiles are emitted for, so that a block has several."""


def fp8(**fields: Any) -> Gemm:
    """Return a small product of floats of 8 bits."""
    return gemm(activation="fp8_e4m3", weight="fp8_e4m3", **fields)


def fp8_in_one_group(k: int, **fields: Any) -> Gemm:
    """Return one whose group is all of K."""
    return fp8(k=k, group_size=k, **fields)


WGMMA = {
    "persistent clusters": (
        gemm(group_size=64, scale=True, n=300, output="float16"),
        {"cluster": 2, "persistent": True},
        70,
    ),
    "split K over four blocks": (
        gemm(bias=True, k=500, n=260),
        {"split_k": 4, "warps": 8, "tile_n": 256},
        16,
    ),
    "split K and clusters": (
        gemm(k=500, n=130, output="float16"),
        {"split_k": 2, "cluster": 2, "tile_m": 32},
        33,
    ),
    "zeros, two slabs": (gemm(group_size=64, scale=True, zero="integer"), {"tile_k": 128, "tile_m": 32}, 33),
    "fp8 in small groups": (
        gemm(activation="fp8_e4m3", weight="fp8_e5m2", group_size=32, scale=True, k=700),
        {"tile_k": 128, "placement": "accumulator", "tile_n": 128},
        16,
    ),
    "fp8, three row tiles of a warpgroup": (
        fp8(n=400, k=1100),
        {"tile_k": 256, "placement": "accumulator", "tile_n": 192, "tile_m": 8, "split_k": 4},
        7,
    ),
    "fp8 sums that carry": (
        fp8_in_one_group(n=264, k=2200, token_scale=True),
        PARTED,
        270,
    ),
    "fp8 sums that carry in three warpgroups": (
        fp8_in_one_group(n=264, k=2200, token_scale=True, output="float16"),
        {**LARGE, "tile_m": 112, "tile_n": 192, "warps": 12, "stages": 5, "persistent": False},
        200,
    ),
    "fp8 sums that carry, in clusters": (
        fp8_in_one_group(n=264, k=300),
        {**PARTED, "cluster": 2},
        140,
    ),
    "tokens in two parts, by turns": (
        gemm(activation="fp8_e4m3", weight="int4", group_size=64, scale=True, n=200, k=700, token_scale=True),
        PARTED,
        300,
    ),
    "integers in two parts, in clusters": (
        gemm(activation="int8", weight="uint4", group_size=128, scale=True, zero="integer", n=264, k=700),
        {**PARTED, "cluster": 2},
        300,
    ),
    "forty tokens": (
        gemm(group_size=64, scale=True, output="bfloat16", activation="bfloat16"),
        {"tile_m": 40},
        90,
    ),
    "80 tokens by sixteens": (gemm(weight="int4", group_size=64, scale=True, bias=True), {"tile_m": 80}, 83),
    "112 tokens in clusters, split K": (
        gemm(weight="int4", k=500, n=130, output="float16"),
        {"cluster": 2, "split_k": 2, "tile_m": 112},
        150,
    ),
    "112 tokens, of which four blocks finish unlike numbers": (
        gemm(
            weight="int4",
            group_size=64,
            scale=True,
            bias=True,
            epilogue=("silu",),
            n=203,
            k=600,
            output="float16",
        ),
        {"tile_m": 112, "tile_n": 192, "tile_k": 64, "warps": 12, "split_k": 4},
        120,
    ),
    "tokens of two row tiles of a warpgroup, finished by two blocks": (
        gemm(weight="nf4", group_size=64, scale=True, n=260, k=450, output="float32"),
        {"tile_m": 40, "tile_n": 128, "split_k": 2},
        50,
    ),
    "fp8 tokens, finished by four blocks": (
        fp8_in_one_group(n=264, k=2200, token_scale=True),
        {"tile_m": 96, "tile_n": 128, "tile_k": 128, "warps": 8, "placement": "accumulator", "split_k": 4},
        100,
    ),
    "K dealt to two blocks, which finish tokens each": (
        gemm(weight="int4", group_size=128, scale=True, n=130, k=1500, output="float16"),
        {"tile_m": 32, "tile_k": 128, "split_k": 2, "deal": 4},
        33,
    ),
    "208 tokens, shared evenly": (
        gemm(weight="nf4", group_size=64, scale=True, k=600, n=200, output="float16"),
        {"tile_m": 208, "persistent": True, "stream_k": True},
        230,
    ),
    "four tiles for three blocks, one with a tail": (
        gemm(weight="int4", group_size=64, scale=True, k=700, n=70, bias=True),
        {"tile_m": 16, "persistent": True, "stream_k": True, "tails": True},
        24,
    ),
    "tails of several tiles by one block": (
        gemm(weight="int4", group_size=64, scale=True, k=700, n=300),
        {"tile_m": 16, "persistent": True, "stream_k": True, "tails": True},
        16,
    ),
    "208 tokens of fp8, with tails": (
        fp8_in_one_group(n=520, k=1300, token_scale=True),
        {**PARTED, "tile_m": 208, "stream_k": True, "tails": True},
        201,
    ),
    "fp8 copied by turns of two sizes": (
        fp8_in_one_group(n=264, k=300, token_scale=True, output="bfloat16", bias=True),
        {**PARTED, "tile_m": 176},
        700,
    ),
    "copied in clusters": (
        gemm(activation="fp8_e5m2", weight="fp8_e5m2", n=328, output="bfloat16", epilogue=("silu",)),
        {**LARGE, "tile_m": 144, "cluster": 2},
        300,
    ),
    "fewer tokens than a tile, copied where N allows": (
        fp8(n=204, output="float16"),
        {**LARGE, "tile_m": 80},
        37,
    ),
    "96 tokens of fp8": (
        gemm(weight="int4", activation="fp8_e4m3", group_size=128, scale=True, n=130, k=400),
        {"tile_m": 96, "tile_k": 128, "placement": "accumulator"},
        100,
    ),
    "208 tokens of fp8 in two parts": (
        gemm(weight="fp4_e2m1", activation="fp8_e4m3", group_size=32, scale=True, n=130, k=400),
        {"tile_m": 208, "tile_n": 128, "tile_k": 128, "warps": 8, "placement": "accumulator"},
        215,
    ),
    "208 tokens of fp8, shared evenly": (
        fp8_in_one_group(n=264, k=2200, token_scale=True),
        {**PARTED, "tile_m": 208, "stream_k": True},
        201,
    ),
    "80 tokens of fp8, shared evenly": (
        fp8(n=264, k=1100),
        {**LARGE, "tile_m": 80, "stream_k": True},
        75,
    ),
    "96 tokens of fp8 by int4, shared evenly": (
        gemm(weight="int4", activation="fp8_e4m3", group_size=64, scale=True, n=264, k=700, token_scale=True),
        {**LARGE, "tile_m": 96, "stream_k": True},
        90,
    ),
    "208 tokens of fp8 by int4, in two parts, by turns, shared evenly": (
        gemm(weight="int4", activation="fp8_e4m3", group_size=128, scale=True, n=264, k=1100),
        {**PARTED, "tile_m": 208, "stream_k": True},
        201,
    ),
    "K dealt to four blocks": (
        gemm(weight="int4", group_size=128, scale=True, n=130, k=700, output="float16"),
        {"tile_m": 16, "tile_k": 64, "split_k": 4, "deal": 4},
        16,
    ),
    "K dealt to one block": (
        gemm(weight="int4", group_size=128, scale=True, n=300, k=1500, output="float16"),
        {"tile_m": 48, "tile_n": 128, "tile_k": 128, "warps": 8, "persistent": True, "deal": 4},
        90,
    ),
    "K dealt to two blocks, four slices each": (
        gemm(weight="int4", group_size=128, scale=True, n=130, k=2700, output="float16"),
        {"tile_m": 16, "tile_n": 128, "warps": 8, "tile_k": 256, "split_k": 2, "deal": 8},
        16,
    ),
    "zero points dealt to eight blocks": (
        gemm(weight="uint4", group_size=64, scale=True, zero="integer", n=67, k=1100, output="float16"),
        {"tile_m": 8, "tile_k": 256, "split_k": 8, "deal": 8},
        7,
    ),
    "exponents dealt to one block": (
        gemm(weight="fp4_e2m1", group_size=32, scale=True, power_scales=True, n=130, k=1100),
        {"tile_m": 32, "tile_k": 64, "deal": 8},
        33,
    ),
    "units that do not go round": (
        gemm(weight="int5", group_size=128, scale=True, n=203, k=450),
        {"tile_k": 128, "tile_n": 192, "tile_m": 32, "warps": 12, "split_k": 8},
        1,
    ),
}


@pytest.mark.parametrize(
    ("name", "order"), [*product(WGMMA, ORDERS[::3]), *zip(WGMMA, ORDERS[1:] * 2, strict=False)]
)
def test_wgmma_in_orders_of_warps(name: str, order: str) -> None:
    problem, _, m = WGMMA[name]
    require_right(_wgmma(name), problem, m, order=order, seed=3)


@cache
def _wgmma(name: str) -> Any:
    problem, fields, _ = WGMMA[name]
    device = get_device("cuda/sm_90a")
    few = {**fields, **LARGE} == fields or "stream_k" in fields
    units = FEW_WITH_TAILS if "tails" in fields else FEW
    device = replace(device, units=units) if few else device
    return emit(problem, device, wgmma(**fields), "simulated")


@pytest.mark.parametrize("case", CASES)
def test_cases(case: str) -> None:
    arch, problem, schedule, sizes = CASES[case]
    kernel = SimulatedKernel(emitted(problem, schedule, arch))
    for m in sizes:
        assert problem_of(problem, m).run(kernel) <= bound_of(problem)


@pytest.mark.parametrize("case", list(CASES)[::12])
def test_cases_in_reverse(case: str) -> None:
    arch, problem, schedule, sizes = CASES[case]
    kernel = SimulatedKernel(emitted(problem, schedule, arch))
    assert problem_of(problem, sizes[0]).run(kernel, reverse=True) <= bound_of(problem)


def _agreement(measured: Measured) -> float:
    """Return by how much of the largest output the simulator and the GPU may differ.

    float32 outputs differ by how tensor cores truncate sums; narrower ones also by one rounding.
    """
    fp8 = measured.gemm.activation.startswith("fp8") and measured.schedule.pipeline == "wgmma"
    return max(5e-4 if fp8 else 2e-6, {"float16": 2.0**-10, "bfloat16": 2.0**-7}.get(measured.gemm.output, 0))


def _agrees(measured: Measured) -> None:
    """Simulate a configuration: nothing to find, right, and as the GPU computed it."""
    problem = measured.gemm
    result = require_right(emitted(problem, measured.schedule), problem, measured.m)
    found = result.y.reshape(-1)[measured.places].astype(np.float64)
    difference = np.abs(found - measured.values).max() / np.abs(measured.values).max()
    assert difference <= _agreement(measured)


@pytest.mark.parametrize("index", range(0, 50, 10))
def test_configurations_agree_with_the_gpu(index: int) -> None:
    _agrees(load()[index])


@pytest.mark.parametrize("index", [i for i in range(50) if i % 10])
def test_all_configurations_agree_with_the_gpu(index: int) -> None:
    _agrees(load()[index])


def test_a_sample_of_blocks() -> None:
    problem = gemm(n=300, k=200, group_size=64, scale=True)
    function = emitted(problem, wgmma())
    result, _ = run(function, problem, 64, blocks=3)
    assert result.blocks == (3, 20)
    assert not result.findings
    assert 0 < np.isfinite(result.y).sum() < result.y.size


WIDENED = {
    "int4": {"weight": "int4", "group_size": 128, "scale": True, "token_scale": True, "n": 130, "k": 450},
    "ternary e5m2": {"weight": "ternary", "activation": "fp8_e5m2", "n": 67, "k": 330},
    "uint1": {"weight": "uint1", "n": 67, "k": 200},
    "fp4, groups of x": {
        "weight": "fp4_e2m1", "group_size": 64, "scale": True, "token_scale": True, "token_group": 128,
        "k": 330,
    },
}  # fmt: skip


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", WIDENED)
def test_widened_operands(name: str, cluster: int) -> None:
    """Products of 8-bit floats on Hopper's float16 core are exact, so sums are those of float32."""
    problem = gemm(**{"activation": "fp8_e4m3", **WIDENED[name]})
    kernel = emitted(problem, gemv(placement="accumulator", tile_m=16, warp_rows=32, cluster=cluster))
    assert "ladder_widen_" in str(kernel)
    for m in (1, 17):
        result, error = run(kernel, problem, m)
        assert not result.findings, result.report()
        assert error <= 1e-6


@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_widening_keeps_every_code(name: str) -> None:
    from ladder.simulate.nvidia.helpers import widen

    codes = np.arange(256, dtype=np.uint32)
    words = widen(codes | codes[::-1] << np.uint32(8), name, "0")
    halves = [(words >> np.uint32(shift) & np.uint32(0xFFFF)).astype(np.uint16) for shift in (0, 16)]
    with np.errstate(all="ignore"):
        values = codes.astype(np.uint8).view(NUMPY[name]).astype(np.float64)
    for half, expected in zip(halves, (values, values[::-1]), strict=True):
        assert np.array_equal(half.view(np.float16).astype(np.float64), expected, equal_nan=True)
        assert np.array_equal(
            np.signbit(half.view(np.float16))[expected == 0], np.signbit(expected)[expected == 0]
        )
