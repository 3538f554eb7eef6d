"""No shipped kernel spills: a sample that changes from day to day; ``--long`` compiles all of them."""

from __future__ import annotations

import os
import shutil

import pytest

from benchmarks.spills import TARGETS, Shipped, compiled, kernels
from ladder.api.problem import gemm_for
from schedules.policy import rank
from targets import get_device

SAMPLES = {"rocm": 80, "cuda": 120}
"""Family -> how many problems there are for one that is compiled."""


def _target(name: str) -> str:
    if name.startswith("cuda") and shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    return name


def _check(target: str, every: int, first: int) -> None:
    outcomes = [compiled(kernel) for kernel in kernels(_target(target), every, first)]
    assert outcomes
    assert not [str(outcome) for outcome in outcomes if outcome.spilled]


@pytest.mark.daily(1)
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


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_no_shipped_kernel_spills(target: str, long_test: None) -> None:
    _check(target, 1, 0)
