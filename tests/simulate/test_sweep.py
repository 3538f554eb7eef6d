"""Every weight type by every activation type that a device's cores have: the kernels that users get.

Schedules are those that the policy chooses for a layer of 4096 x 4096 (tuned ones where there are), at a
shape with remainders in every dimension. A normal run simulates each pair of types at one M, which rotates
from pair to pair and from day to day, so that four days' runs have all; ``--long`` simulates all of them.
bfloat16 products are compared before their results are rounded, which alone takes half of their bound
(`drawn` has results of all types).
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from ladder.api.lowered import Lowered
from ladder.cli.operands import cancellation, make_operands
from ladder.cli.problem import Problem
from ladder.ir import gemm_reference
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import pack
from ladder.simulate.operator import simulate
from schedules.estimate import gemm_at
from schedules.legal import is_legal
from schedules.policy import best_schedule
from schedules.schedule import Plan, Schedule
from schedules.tuning import TuningDatabase
from targets import get_device
from tile_types import list_types
from tile_types.errors import LadderError

TARGETS = ("cuda/sm_80", "cuda/sm_90a", "rocm/gfx90a", "rocm/gfx942")
ACTIVATIONS = ("float16", "bfloat16", "int8", "fp8_e4m3", "fp8_e5m2")
TOKENS = (1, 16, 64, 129)
N, K, GROUP = 99, 330, 64
LAYER = 4096
TUNED = TuningDatabase(None)
DAY = "LADDER_TEST_DAY"
"""Environment variable of a day's number (`tests.conftest`)."""


def _problem(target: str, activation: str, weight: str, m: int, n: int = N, k: int = K) -> Problem:
    block = next(ttype for ttype in list_types() if ttype.name == weight)
    grouped = not block.is_block and block.elem_bits <= 8
    group = None if block.is_block else GROUP if grouped else -1
    output = "float32" if activation == "bfloat16" else None
    return Problem(weight, activation, group, m, n, k, output=output, target=target)


def _pairs() -> list[tuple[str, str, str]]:
    """Return all (target, activation, weight) that the core multiplies without loss."""
    found = []
    for target in TARGETS:
        device = get_device(target)
        for activation in ACTIVATIONS:
            for ttype in list_types():
                try:
                    problem = _problem(target, activation, ttype.name, 1)
                    if device.cores_for(activation) and problem.gemm:
                        found.append((target, activation, ttype.name))
                except LadderError:
                    continue
    return found


PAIRS = _pairs()


def _schedule(problem: Problem) -> Schedule:
    """Return the layer's schedule, or where the small shape does not take it the one of its own."""
    device, m = problem.device, problem.m
    layer = gemm_at(problem.gemm, LAYER, LAYER)
    chosen: Any = TUNED.lookup(device, layer, m) or best_schedule(layer, device, m)
    return chosen if is_legal(problem.gemm, device, chosen) else best_schedule(problem.gemm, device, m)


def check(target: str, activation: str, weight: str, m: int) -> None:
    problem = _problem(target, activation, weight, m)
    gemm = problem.gemm
    operands = make_operands(problem, gemm)
    exact = gemm_reference(gemm, operands.x, operands.weight, operands.bias, operands.token_scale)
    lowered = Lowered(Request(gemm, target, Plan(((ANY_M, _schedule(problem)),))))
    packed = pack(gemm, problem.device, operands.weight)
    result = simulate(
        lowered,
        operands.x,
        packed,
        None,
        operands.token_scale,
        expected=exact,
        cancellation=cancellation([operands], exact),
    )
    assert not result.findings, result.report()
    assert result.blocks[0] == result.blocks[1]
    assert not (target.startswith("rocm") and result.bank_conflicts), result.report()


def _rotating(index: int) -> int:
    return TOKENS[(index + int(os.environ[DAY])) % len(TOKENS)]


@pytest.mark.parametrize(
    ("target", "activation", "weight", "m"), [(*pair, _rotating(i)) for i, pair in enumerate(PAIRS)]
)
def test_pairs_of_types(target: str, activation: str, weight: str, m: int) -> None:
    check(target, activation, weight, m)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "activation", "weight"), PAIRS)
def test_all_tokens(target: str, activation: str, weight: str, long_test: None) -> None:
    for m in TOKENS:
        check(target, activation, weight, m)


def test_every_pair_that_the_readme_names_is_there() -> None:
    assert {target for target, _, _ in PAIRS} == set(TARGETS)
    assert len({weight for _, _, weight in PAIRS}) >= 33
    assert ("rocm/gfx942", "fp8_e4m3", "int4") in PAIRS
