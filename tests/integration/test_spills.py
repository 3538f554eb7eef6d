"""No shipped kernel spills: a sample that changes from day to day; ``--long`` compiles all of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.spills import TARGETS, Shipped, compiled, kernels, served
from ladder.api.problem import gemm_for
from ladder.runtime.compile import Request, serving
from schedules import policy, spilling
from schedules.footprint import carries, moves_registers, registers_per_thread
from schedules.legal import placement_for
from schedules.policy import rank
from schedules.schedule import GpuSchedule
from schedules.tilings import tilings
from targets import get_device

SAMPLES = {"rocm": 80, "cuda": 120}
"""Family -> how many problems there are for one that is compiled."""


def _target(name: str) -> str:
    if name.startswith("cuda") and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    return name


def _check(target: str, every: int, first: int) -> None:
    outcomes = [served(kernel) for kernel in kernels(_target(target), every, first)]
    assert outcomes
    assert not [str(outcome) for outcome in outcomes if outcome.spilled]


@pytest.mark.parametrize("target", TARGETS)
def test_a_sample_of_the_shipped_kernels_does_not_spill(target: str) -> None:
    every = SAMPLES[target.partition("/")[0]]
    _check(target, every, int(os.environ["LADDER_TEST_DAY"]) * 7 % every)


SHORT = (128, 320)
"""N and K of a layer that is not cut along K."""


@pytest.mark.parametrize("target", ["rocm/gfx942", "rocm/gfx950"])
def test_short_layers_do_not_spill(target: str) -> None:
    gemm = gemm_for(*SHORT, "uint4", "float16", group_size=32, zero="float")
    best = rank(gemm, get_device(target), 2)[0].schedule
    assert best.pipeline == "dot"
    assert not compiled(Shipped(gemm, target, str(best))).spilled


@pytest.mark.parametrize("pair", [False, True])
@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize(
    ("weight", "activation", "group", "tile_m", "tile_k"),
    [
        ("float16", "float16", None, 256, 64),
        ("nf4", "bfloat16", 32, 256, 128),
        ("uint7", "float16", 16, 16, 256),
        ("fp8_e5m2", "fp8_e4m3", None, 192, 128),
    ],
)
def test_kernels_of_tensor_memory_do_not_spill(
    weight: str, activation: str, group: int | None, tile_m: int, tile_k: int, warps: int, pair: bool
) -> None:
    """The widest tiles, and the most decoded at a time; estimates of registers are not exceeded."""
    target, gemm = _target("cuda/sm_100a"), gemm_for(4096, 4096, weight, activation, group_size=group)
    schedule = GpuSchedule(
        "tcgen05", max(tile_m, 32 * pair), 128, tile_k, stages=2, warps=warps, placement=placement_for(gemm),
        cluster=1 + pair, pair=pair,
    )  # fmt: skip
    outcome = compiled(Shipped(gemm, target, str(schedule)))
    assert not outcome.spilled
    assert outcome.registers <= registers_per_thread(gemm, schedule)


@pytest.mark.parametrize(("tile_m", "stages"), [(112, 6), (160, 5)])
def test_kernels_that_add_a_residual_to_plain_fp8_do_not_spill(tile_m: int, stages: int) -> None:
    """What is loaded a turn ahead takes registers beside the sums: the producer hands some over."""
    target, plain = _target("cuda/sm_90a"), gemm_for(4096, 4096, "fp8_e4m3", "fp8_e4m3")
    gemm = replace(plain, residual=True)
    schedule = GpuSchedule(
        "wgmma",
        tile_m,
        128,
        128,
        stages=stages,
        warps=8,
        placement=placement_for(gemm),
        persistent=tile_m > 128,
    )
    assert moves_registers(gemm, schedule)
    assert not compiled(Shipped(gemm, target, str(schedule))).spilled


@pytest.mark.parametrize(("tile_m", "stages"), [(96, 5), (112, 5), (128, 4)])
def test_tiles_of_three_warpgroups_of_plain_fp8_do_not_spill(tile_m: int, stages: int) -> None:
    """Beyond 96 rows totals would take too many registers: sums carry. Such blocks do not share K."""
    target, gemm = _target("cuda/sm_90a"), gemm_for(4096, 4096, "fp8_e4m3", "fp8_e4m3")
    schedule = GpuSchedule("wgmma", tile_m, 192, 128, stages=stages, warps=12, placement=placement_for(gemm))
    assert carries(gemm, schedule) == (tile_m > 96)
    found = [tile for tile in tilings(gemm, get_device(target), "wgmma", 2 * tile_m) if tile.warps == 12]
    assert schedule in found
    assert any(tile.tile_m == tile_m and tile.split_k > 1 for tile in found) == (tile_m == 96)
    assert not compiled(Shipped(gemm, target, str(schedule))).spilled


@pytest.fixture
def nothing_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No kernel was seen to spill, and none is kept."""
    monkeypatch.setenv("LADDER_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(spilling, "_seen", {})
    policy.best_schedule.cache_clear()
    yield
    policy.best_schedule.cache_clear()


@pytest.mark.parametrize(("n", "k", "m"), [(8832, 2688, 2873), (13952, 3776, 2873), (13952, 3776, 500)])
def test_a_kernel_that_does_not_spill_serves_plain_fp8_with_a_residual(
    n: int, k: int, m: int, nothing_seen: None
) -> None:
    """The policy's tiles of these shapes spill: one of 256 rows was measured, without a residual."""
    gemm = replace(gemm_for(n, k, "fp8_e4m3", "fp8_e4m3"), residual=True)
    request = serving(Request(gemm, _target("cuda/sm_90a")), m)
    assert request.plan is not None
    assert not compiled(Shipped(gemm, request.target.name, str(request.plan.schedule_for(m)))).spilled


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_shipped_kernel_spills(target: str, long_test: None) -> None:
    _check(target, 1, 0)
