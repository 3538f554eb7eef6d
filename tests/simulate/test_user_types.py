"""Kernels of types that a user registers: the schedules that the policy chooses compute the matmul."""

from __future__ import annotations

import pytest
from problems import bound_of, gemm, run
from user_types import user_type

from ladder.lower.build import emit
from schedules.policy import make_plan
from schedules.tuning import TuningDatabase
from targets import get_device

CASES = [
    ("whole5", "bfloat16", "none", "sm_90a", 3),
    ("random5", "float16", "float", "sm_90a", 3),
    ("posit8", "float16", "none", "sm_90a", 70),
    ("shuffled6", "float16", "integer", "sm_90a", 70),
    ("random3", "float16", "none", "sm_90a", 3),
    ("posit3", "float16", "none", "sm_90a", 70),
    ("log7", "bfloat16", "none", "sm_80", 70),
]


@pytest.mark.costly
@pytest.mark.parametrize(("name", "core", "zero", "arch", "m"), CASES)
def test_chosen_schedules_of_a_users_type(name: str, core: str, zero: str, arch: str, m: int) -> None:
    weight, device = user_type(name).name, get_device(f"cuda/{arch}")
    problem = gemm(
        weight=weight, activation=core, group_size=64, scale=True, zero=zero, output=core, n=67, k=200
    )
    plan = make_plan(problem, device, TuningDatabase(None))
    kernel = emit(problem, device, plan.entries[plan.index(m)][1], "chosen")
    result, error = run(kernel, problem, m, target=f"cuda/{arch}")
    assert not result.findings, result.report()
    assert error <= bound_of(problem)
