"""Products by instructions with rules of their own: rows of scales, halves of a wave, groups in a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import ladder
from ladder.runtime.compile import ANY_M
from ladder.simulate.amd import wmma
from schedules.schedule import GpuSchedule, Plan


@pytest.mark.parametrize(("arch", "pipeline"), [("gfx1100", "wmma"), ("gfx1201", "wmma_split")])
@pytest.mark.parametrize("placement", ["operand", "accumulator"])
def test_scales_meet_their_rows(arch: str, pipeline: str, placement: str) -> None:
    torch.manual_seed(2)
    schedule = GpuSchedule(pipeline, 16, 64, 64, 2, 4, 2, placement=placement, warp_rows=32)
    op = ladder.Matmul(40, 130, "int4", "float16", group_size=32, output="float32", target=f"rocm/{arch}",
                       plan=Plan(((ANY_M, schedule),)))  # fmt: skip
    weight = ladder.quantize(torch.randn(40, 130) * torch.arange(1, 41)[:, None], "int4", group_size=32)
    x = torch.randn(5, 130).half()
    exact = x.double() @ torch.as_tensor(weight.dequantize("float64")).T
    result = ladder.simulate(op, x, op.pack(weight), expected=exact)
    assert not result.findings, result.report()
    assert not result.bank_conflicts


@pytest.mark.parametrize("core", [wmma.RDNA3, wmma.RDNA4], ids=lambda core: core.arch)
def test_results_lie_where_they_are_gathered_from(core: wmma.HalfCore) -> None:
    registers = np.arange(512).reshape(2, wmma.LANES, wmma.REGISTERS)
    assert np.array_equal(wmma.scatter_d(wmma.gather_d(registers, core), core), registers)


def test_halves_that_disagree_give_no_numbers() -> None:
    """RDNA3 wants the same operand in lanes i and i + 16."""
    a = np.ones((1, wmma.LANES, 16), np.float16)
    a[0, 19, 4] = 2
    b, c = np.ones((1, wmma.LANES, 16), np.float16), np.zeros((1, wmma.LANES, wmma.REGISTERS), np.float32)
    what = wmma.parse("llvm.amdgcn.wmma.f32.16x16x16.f16", wmma.RDNA3)
    d = wmma.gather_d(wmma.multiply(what, wmma.RDNA3, a.view(np.uint8), b.view(np.uint8), c), wmma.RDNA3)[0]
    assert np.isnan(d[3]).all()
    assert (np.delete(d, 3, axis=0) == 16).all()


@pytest.mark.parametrize(
    ("target", "weight", "activation"),
    [
        ("rocm/gfx1100", "nvfp4", torch.bfloat16),
        ("rocm/gfx1100", "int4", torch.float16),
        ("rocm/gfx1201", "int4", torch.float16),
        ("rocm/gfx950", "int4", torch.bfloat16),
    ],
)
def test_infinities_stay_in_their_group(target: str, weight: str, activation: torch.dtype) -> None:
    """An instruction that multiplies two groups is issued for each; zeros stand for the other's x too."""
    group = None if weight == "nvfp4" else 16
    name = str(activation).removeprefix("torch.")
    op = ladder.Matmul(32, 64, weight, name, group_size=group, output="float32", target=target)
    dense = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    stored = ladder.quantize(dense, weight, group_size=group)
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(2))
    x[0, 5], x[1, 63] = torch.inf, -torch.inf
    w = torch.as_tensor(stored.dequantize("float64"))
    wanted = (x.to(activation).double()[:, None] * w).sum(-1)
    found = torch.as_tensor(ladder.simulate(op, x.to(activation), op.pack(stored)).y).double()
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found[wanted.isinf()], wanted[wanted.isinf()])
