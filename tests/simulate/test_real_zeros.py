"""Real zero points cost products no more roundings than integer ones."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.api.lowered import Lowered
from ladder.cli.operands import make_operands
from ladder.cli.problem import Problem
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import pack
from ladder.simulate.operator import simulate
from schedules.policy import rank
from schedules.schedule import Plan

TOKENS, GROUP = 16, 32


def _error(target: str, activation: str, zero: str) -> float:
    """Return the relative error of a product whose scales and zero points meet decoded weights."""
    problem = Problem(
        "uint4", activation, GROUP, TOKENS, 64, 256, zero=zero, output="float32", target=target, seed=13
    )
    gemm, device = problem.gemm, problem.device
    ranked = (candidate.schedule for candidate in rank(gemm, device, TOKENS))
    schedule = next(s for s in ranked if s.placement == "operand")
    operands = make_operands(problem, gemm)
    exact = operands.x.double().numpy() @ np.asarray(operands.weight.dequantize("float64")).T
    lowered = Lowered(Request(gemm, device.name, Plan(((ANY_M, schedule),))))
    packed = pack(gemm, device, operands.weight)
    result = simulate(lowered, operands.x, packed, expected=exact)
    assert result.kinds() <= {"wrong values"}, result.report()
    return result.relative_error


@pytest.mark.parametrize("target", ["rocm/gfx942", "cuda/sm_90a"])
@pytest.mark.parametrize("activation", ["bfloat16", "float16"])
def test_real_zero_points_round_as_often_as_integers(target: str, activation: str) -> None:
    assert _error(target, activation, "float") <= 1.15 * _error(target, activation, "integer")
