"""Real zero points cost products no further rounding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ladder.api.lowered import Lowered
from ladder.cli.operands import make_operands
from ladder.cli.problem import Problem
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import pack
from ladder.simulate.operator import simulate
from schedules.packed_scales import _zeros
from schedules.policy import rank
from schedules.schedule import Plan
from tile_types.library import get_type

TOKENS, GROUP = 16, 32


def _error(target: str, weight: str, activation: str) -> float:
    """Return the relative error of a product whose scales and zero points meet decoded weights."""
    problem = Problem(
        weight, activation, GROUP, TOKENS, 64, 256, zero="float", output="float32", target=target, seed=13
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


ROUNDING = np.sqrt(3 / 8 / np.log(2) / 12)
"""Error of one rounding, relative to a number, in epsilons: root mean square over numbers of all sizes."""


@pytest.mark.costly
@pytest.mark.parametrize("weight", ["uint2", "uint4"])
@pytest.mark.parametrize(
    ("target", "activation"),
    [
        ("rocm/gfx90a", "bfloat16"),
        ("rocm/gfx942", "float16"),
        ("cuda/sm_90a", "bfloat16"),
        ("cuda/sm_90a", "float16"),
    ],
)
def test_weights_less_real_zero_points_are_rounded_twice(target: str, weight: str, activation: str) -> None:
    """Their scales, and their products with them."""
    twice = np.sqrt(2) * ROUNDING * torch.finfo(getattr(torch, activation)).eps
    assert _error(target, weight, activation) <= 1.1 * twice


@pytest.mark.parametrize("core", ["float16", "bfloat16"])
@pytest.mark.parametrize("weight", ["uint1", "uint2", "uint4", "uint8", "fp4_e2m1"])
def test_differences_from_the_coarse_part_are_exact(weight: str, core: str) -> None:
    element, dtype = get_type(weight), getattr(torch, core)
    values = torch.from_numpy(element.values().astype(np.float64))
    zero = torch.linspace(element.minimum, element.maximum, 257, dtype=torch.float64)[None]
    codes = SimpleNamespace(ttype=element, zero_kind="float")
    coarse, rest = _zeros(zero, codes, core)[0].double()
    differences = values[:, None] - coarse
    assert torch.equal(differences.to(dtype).double(), differences)
    reach = (values[:, None] - zero).abs().amax(0)
    assert bool((rest.abs() <= reach * torch.finfo(dtype).eps).all())
