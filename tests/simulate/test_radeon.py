"""Products of waves of 32 lanes, as TIR: rows of scales, and operands that both halves of a wave hold."""

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
