"""Kernels of schedules drawn from all that is legal: nothing to find, and right, on NVIDIA and AMD.

The choice covers what `schedules.rules.RULES` allows (`drawn.draw`), so that an extent that no kernel of
record has is simulated nevertheless.
"""

from __future__ import annotations

import os

import pytest
from drawn import Drawn, draw, pipelines_of
from problems import bound_of, problem_of, run

from ladder.ir.gemm import Gemm
from ladder.simulate.machine import ORDERS
from schedules.rules import AXES, RULES
from schedules.schedule import GpuSchedule
from targets import get_device

DAY = int(os.environ["LADDER_TEST_DAY"])

COUNTS = {
    "cuda/sm_90a": 40,
    "cuda/sm_100a": 12,
    "cuda/sm_80": 12,
    "rocm/gfx942": 24,
    "rocm/gfx90a": 12,
    "rocm/gfx950": 9,
    "rocm/gfx1100": 9,
    "rocm/gfx1201": 9,
}
"""Target -> draws of a seed."""

SEEDS = range(2, 27)
"""Seeds of ``--long``; a normal run takes the one before."""

RARE = frozenset({("gemv", "warps"), ("digits", "warps"), ("digits", "split_k"), ("gemv", "split_k")})
"""Axes with more values than the draws of a normal run."""

ZEROS_SLACK = 1.2
"""Real zero points by bfloat16: code and zero times scale both round (3.4e-3 were measured on an H200)."""

LARGE = {
    *(("wgmma", "tile_m", rows) for rows in RULES["wgmma"].tile_m if rows & (rows - 1) or rows > 64),
    ("mfma", "tile_m", 256),
}
"""Extents that few types fit, or that are too many for the draws of a normal run."""


def check(drawn: Drawn, order: str) -> None:
    """Simulate a draw in an order of warps: no findings, and the error that rounding explains."""
    result, error = run(drawn.function(), drawn.gemm, drawn.m, drawn.target, order=order)
    assert not result.findings, (drawn.name, result.report())
    assert not (drawn.target.startswith("rocm") and result.bank_conflicts), (drawn.name, result.report())
    slack = ZEROS_SLACK if (drawn.gemm.zero, drawn.gemm.activation) == ("float", "bfloat16") else 1
    bound = bound_of(drawn.gemm) * slack * problem_of(drawn.gemm, drawn.m, drawn.target).cancellation
    assert error <= bound, (drawn.name, error)


def check_seed(target: str, seed: int, part: slice = slice(None)) -> None:
    draws = [(drawn, ORDERS[at % len(ORDERS)]) for at, drawn in enumerate(draw(COUNTS[target], seed, target))]
    for drawn, order in draws[part]:
        check(drawn, order)


@pytest.mark.costly
@pytest.mark.parametrize("target", COUNTS)
def test_drawn_schedules(target: str) -> None:
    """Every third draw of a seed, others every day."""
    check_seed(target, SEEDS.start - 1, slice(DAY % 3, None, 3))


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("target", COUNTS)
def test_many_drawn_schedules(target: str, seed: int, long_test: None) -> None:
    check_seed(target, seed)


@pytest.mark.parametrize("activation", ["float16", "bfloat16"])
def test_slices_of_k_sum_x_without_conflicts(activation: str) -> None:
    """Lanes of a pass write the sums of x over a group of each slice."""
    gemm = Gemm(67, 1027, "int4", activation, group_size=64, scale=True)
    schedule = GpuSchedule("mfma_groups", 1, 64, 64, 2, 4, 4, placement="accumulator", warp_rows=64)
    check(Drawn(gemm, schedule, 1, "rocm/gfx942"), ORDERS[0])


@pytest.mark.costly
@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_draws_reach_every_extent(target: str) -> None:
    allowed = {
        (name, axis, value)
        for name in pipelines_of(get_device(target))
        for axis in AXES
        for value in getattr(RULES[name], axis)
        if (name, axis) not in RARE
    }
    missing = allowed - LARGE
    for seed in SEEDS:
        missing -= {feature for drawn in draw(COUNTS[target], seed, target) for feature in drawn.features}
        if not missing:
            break
    assert not missing
