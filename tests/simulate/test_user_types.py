"""Kernels of types that a user registers: the schedules that the policy chooses compute the matmul."""

from __future__ import annotations

import math

import pytest
import torch
from problems import gemm, require_right
from user_types import user_type

import ladder
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
    require_right(kernel, problem, m, target=f"cuda/{arch}")


SPECIAL = (math.nan, math.inf, -math.inf, *(float(value * value) for value in range(3, 32)))


@pytest.mark.costly
@pytest.mark.parametrize("bits", [4, 5])
def test_tables_hold_what_is_not_finite(bits: int) -> None:
    """Codes of NaN and infinity were read as 0."""
    held = SPECIAL[: 1 << bits]
    ttype = ladder.register_type(
        ladder.TType(f"special{bits}_of_tests", bits, lambda code, ops: ops.lookup(held, code))
    )
    codes = torch.full((33, 64), 5, dtype=torch.uint8)
    for row, code in enumerate((0, 1, 2, 1, 1)):
        codes[row, 7 * row] = code
    weight = ladder.QuantizedTensor.from_codes(
        codes, ttype, (1, 64), scale=torch.ones(33, 1), scale_type="float32"
    )
    op = ladder.Matmul(33, 64, ttype, target="cuda/sm_80")
    result = ladder.simulate(op, torch.ones(3, 64, dtype=torch.float16), op.pack(weight, "cpu"))
    assert not result.findings, result.report()
    expected = torch.full((33,), 64.0 * held[5])
    expected[:5] = torch.tensor([math.nan, math.inf, -math.inf, math.inf, math.inf])
    torch.testing.assert_close(torch.as_tensor(result.y[2]).float(), expected, equal_nan=True)
