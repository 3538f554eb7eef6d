"""Real zero points cost products no further rounding."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

import ladder
from ladder.api.lowered import Lowered
from ladder.cli.operands import make_operands
from ladder.cli.problem import Problem
from ladder.runtime.compile import ANY_M, Request
from ladder.runtime.packed import pack
from ladder.simulate.operator import simulate
from schedules.packed_scales import _zeros, within_reach
from schedules.policy import rank
from schedules.schedule import Plan
from tile_types import QuantizedTensor, TType, quantize
from tile_types.errors import ConversionError
from tile_types.library import get_type

TOKENS, GROUP = 16, 32

FLAT = {  # spread of the first group of each row beside its mean; 0: of one weight
    ("uint4", 0.0),
    ("uint4", 1e-3),
    ("uint4", 1e-5),
    ("uint8", 1e-3),
    ("nf4", 0.0),
    ("nf4", 1e-3),
    ("fp8_e4m3", 1e-3),
}


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


@pytest.mark.parametrize(("weight", "spread"), sorted(FLAT))
def test_groups_far_from_0_beside_their_spread(weight: str, spread: float) -> None:
    """Their zero points overflowed float16 (NaN), or their scales had few digits beside those of the row."""
    random = torch.Generator().manual_seed(0)
    values = torch.randn(48, 3 * GROUP, generator=random)
    values[:, :GROUP] = 3.3 + spread * values[:, :GROUP]
    values[7, :GROUP] = -0.01
    matrix = quantize(values, weight, group_size=GROUP, zero="float", scale_type="float32")
    op = ladder.Matmul(48, 3 * GROUP, weight=weight, group_size=GROUP, zero="float", target="cuda/sm_90a")
    x = torch.randn(5, 3 * GROUP, generator=random).half()
    exact = x.double() @ torch.as_tensor(matrix.dequantize("float64")).T
    for kept in (matrix, matrix.to("cpu")):  # numpy's and torch's arrays
        y = torch.from_numpy(simulate(op, x, op.pack(kept, "cpu")).y.astype(np.float64))
        assert float((y - exact).norm() / exact.norm()) <= 5e-4


def test_zero_points_that_no_code_comes_near_are_refused() -> None:
    """Values of which the middle has no neighbours, with a zero point beyond float16."""
    codes = torch.arange(8, dtype=torch.uint8).repeat(4, 4)
    zero, scale = torch.full((4, 1), 1e5), torch.full((4, 1), 1e-3)
    element = TType("apart3", 3, lambda code, ops: ops.lookup((0.0, 1.0, 2.0, 30000.0), code & 3))
    matrix = QuantizedTensor.from_codes(
        codes, element, (1, 32), scale=scale, zero=zero, zero_kind="float", scale_type="float32"
    )
    with pytest.raises(ConversionError, match=r"a zero point of 100000 .* use bfloat16"):
        within_reach(matrix, "float16")
    assert within_reach(matrix, "bfloat16") is matrix


@pytest.mark.parametrize("target", ["cuda/sm_80", "cuda/sm_90a", "cuda/sm_100a", "rocm/gfx942"])
@pytest.mark.parametrize(("k", "m"), [(1, 1), (1, 40), (2, 5)])
def test_one_scale_and_zero_point_serve_rows_of_one_element(k: int, m: int, target: str) -> None:
    """A group that is shorter than a tile, but all of K, is one value of a row, not one of each element."""
    rng = np.random.default_rng(k)
    operator = ladder.Matmul(N=5, K=k, weight="int4", activation="float16", zero="float", target=target)
    weight = quantize(rng.normal(size=(5, k)).astype(np.float32), "int4", group_size=k, zero="float")
    x = rng.normal(size=(m, k)).astype(np.float16)
    result = simulate(operator, torch.from_numpy(x), operator.pack(weight))
    assert not result.findings, result.report()
    exact = x.astype(np.float64) @ np.asarray(weight.dequantize(), np.float64).T
    assert np.linalg.norm(result.outputs[0] - exact) <= 2e-3 * np.linalg.norm(exact)
