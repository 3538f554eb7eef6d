"""Signs, bits and functions of two numbers: one kernel, and eager's values on all pairs of special ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import ladder

NAN, INF = math.nan, math.inf
SPECIAL = (
    *(NAN, INF, -INF, 0.0, -0.0, 2.0**-149, -1e-40, 2.0**-126, 3.4e38, -3.4e38, 1.0, -1.0, 0.5, -2.5),
    *(1e-20, -3e19, 65504.0, 1e-5, 12.5),
)

EXACT = {
    "copysign": torch.copysign,
    "copied from a number": lambda x, y: (torch.copysign(x, -0.0), torch.copysign(y, 2)),
    "signbit": lambda x, y: (torch.signbit(x), torch.signbit(x * 0)),
    "fmax": torch.fmax,
    "fmin": torch.fmin,
    "isinf": lambda x, y: torch.isinf(x) & ~torch.isinf(y * 2),
    "logical_xor": torch.logical_xor,
}
CLOSE = {"hypot": torch.hypot, "atan2": torch.atan2}


def compared(function: Any, x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of eager's results and those of a plan without calls of torch."""
    compiled = ladder.compile(function)
    with torch.no_grad():
        compiled(x, y)
        got, want = compiled(x, y), function(x, y)
    assert "aten" not in str(compiled.plan())
    return [*zip(want, got, strict=True)] if isinstance(want, tuple) else [(want, got)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_functions_of_signs_and_of_two_numbers(dtype: torch.dtype) -> None:
    values = torch.tensor(SPECIAL).to(dtype)
    x, y = values.repeat_interleave(len(values)), values.repeat(len(values))
    numbers = ~(x.isnan() | y.isnan())  # the sign of what is no number is the processor's

    def program(x: Any, y: Any) -> tuple[Any, ...]:
        found = [each(x, y) for each in (*EXACT.values(), *CLOSE.values())]
        return tuple(value for each in found for value in (each if isinstance(each, tuple) else (each,)))

    pairs = compared(program, x, y)
    for want, got in pairs[: -len(CLOSE)]:
        assert torch.equal(torch.nan_to_num(want)[numbers], torch.nan_to_num(got)[numbers])
        assert torch.equal(want.isnan(), got.isnan())
    for want, got in pairs[-len(CLOSE) :]:
        rtol = max(1e-6, torch.finfo(dtype).eps)
        torch.testing.assert_close(got, want, rtol=rtol, atol=2.0**-149, equal_nan=True)
        assert torch.equal(got.signbit()[numbers], want.signbit()[numbers])


def test_bits_of_floats_are_integers() -> None:
    """Powers of two below numbers, and random bits added before a rounding to bfloat16."""
    x = torch.tensor([v for v in SPECIAL if v == v])
    noise = torch.arange(len(x), dtype=torch.int32) * 3001

    def program(x: Any, noise: Any) -> tuple[Any, ...]:
        exponent = (x.view(torch.int32) >> 23) & 0xFF
        power = (exponent << 23).view(torch.float32)
        stochastic = ((x.view(torch.int32) + noise) & -65536).view(torch.float32)
        return exponent, power, stochastic * 2

    for want, got in compared(program, x, noise):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_views_of_bits_are_views() -> None:
    """What is written through one is written to what it views."""

    def program(x: Any) -> tuple[Any, Any]:
        view = x.view(torch.int32)
        view.bitwise_and_(0x7FFFFFFF)
        return view, x + 0

    compiled = ladder.compile(program)
    with torch.no_grad():
        for _ in range(3):
            ours, theirs = torch.tensor([-1.0, 2.0, -0.0]), torch.tensor([-1.0, 2.0, -0.0])
            for want, got in zip(program(theirs), compiled(ours), strict=True):
                assert torch.equal(want, got)
            assert torch.equal(ours, theirs)
        alone = ladder.compile(lambda x: x.view(torch.int32))
        for _ in range(3):
            x = torch.ones(3)
            alone(x).fill_(0)
            assert torch.equal(x, torch.zeros(3))
