"""Hyperbolic functions, tangents, decimals and fake quantization: one kernel, and eager's values."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ladder

NAN, INF = math.nan, math.inf
SPECIAL = (
    *(NAN, INF, -INF, 0.0, -0.0, 2.0**-149, -1e-40, 1e-20, 3.4e38, -3.4e38, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5),
    *(
        -2.5,
        0.049,
        -0.3,
        0.999,
        1.001,
        12.5,
        -88.0,
        88.9,
        -89.3,
        104.0,
        1e10,
        -1e19,
        3e18,
        0.125,
        -1.05,
        300.7,
    ),
)

FUNCTIONS = (torch.sinh, torch.cosh, torch.tan, torch.asinh, torch.acosh, torch.atanh, torch.angle)


def compared(function: Any, *operands: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of eager's results and those of a plan without calls of torch."""
    compiled = ladder.compile(function)
    with torch.no_grad():
        compiled(*operands)
        pairs = [*zip(function(*operands), compiled(*operands), strict=True)]
    assert "aten" not in str(compiled.plan())
    return pairs


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_curves(dtype: torch.dtype) -> None:
    x = torch.cat([torch.tensor(SPECIAL), torch.linspace(-6, 6, 480)]).to(dtype)
    pairs = compared(lambda x: tuple(function(x) for function in FUNCTIONS), x)
    for function, (eager, got) in zip(FUNCTIONS, pairs, strict=True):
        want = function(x.double()).to(eager.dtype)  # eager's vectors overflow at 88
        rtol = max(2e-6, torch.finfo(dtype).eps)
        torch.testing.assert_close(got, want, rtol=rtol, atol=2.0**-147, equal_nan=True)
        numbers = ~want.isnan()
        assert torch.equal(got.signbit()[numbers], want.signbit()[numbers])


def test_many_tangents_on_cpus_are_torchs() -> None:
    """It computes them by vectors; ours of few are a quotient."""
    compiled = ladder.compile(torch.tan)
    x = torch.linspace(-6, 6, 4096)
    with torch.no_grad():
        compiled(x)
        assert torch.equal(compiled(x), torch.tan(x))
    assert "tan" in str(compiled.plan())


def test_decimals() -> None:
    x = torch.tensor(SPECIAL)
    for want, got in compared(lambda x: tuple(torch.round(x * 1.5, decimals=n) for n in (3, 1, -2)), x):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_fake_quantization(dtype: torch.dtype) -> None:
    """What is no number has the lowest code."""
    x = torch.tensor(SPECIAL).to(dtype)

    def program(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        quantized = torch.fake_quantize_per_tensor_affine(x, 0.1, 3, 0, 255)
        return quantized, torch.fake_quantize_per_tensor_affine(x * 2, 0.07, 0, -8, 7) + 1

    for want, got in compared(program, x):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
