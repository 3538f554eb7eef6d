"""Numbers of Python, and tensors of rank 0, beside tensors: converted as torch converts them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ladder

NAN, INF = math.nan, math.inf
BYTES = torch.tensor([0, 1, 44, 254, 255], dtype=torch.uint8)
SMALL = torch.tensor([-128, -56, 0, 127, 3], dtype=torch.int8)
WORDS = torch.tensor([2**24 + 1, -5, 0, 2**31 - 1, 7], dtype=torch.int32)
LONG = torch.tensor([2**53 + 1, 2**24 + 1, -1, 0, 2**62])
FLOATS = torch.tensor([0.1, INF, NAN, -0.0, 2.0**24])
TRUTHS = torch.tensor([True, False, True])


def _whole(x: Any) -> Any:
    compared = x < 300, x == -2, x > True, x >= 2.5
    return *compared, x.clamp(min=-1), torch.where(x > 3, x, -1), torch.full_like(x, 2.7)


def _real(x: Any) -> Any:
    limited = x.clamp(min=INF), x.clamp(max=-INF), x.clamp(min=-INF), x.clamp(NAN), x.clamp(max=0.1)
    return *limited, x == 0.1, x >= 16777216


def _truth(x: Any) -> Any:
    compared = x < 2, x == 0.5, x > -1, x == True  # noqa: E712
    filled = torch.full((2,), 0.5, dtype=torch.bool), torch.full((2,), -3, dtype=torch.bool)
    sums = torch.add(x, x, alpha=2), torch.add(x, x, alpha=0), x * True
    return *compared, *filled, *sums, x.amin(0), x.amax(0), F.pad(x, (1, 1), value=2.7)


def _filled(x: Any) -> Any:
    y = x.clone()
    y.fill_(2.7)
    return y, torch.full((2,), NAN, dtype=torch.bool), torch.full((2,), -1, dtype=torch.uint8)


def _shifted(x: Any) -> Any:
    """Numbers wrap around to the tensor's type before they shift, or say by how much."""
    steps = torch.tensor(256)
    return x << 256, x >> 256, 256 >> x, 300 >> x, -129 << x, -1 >> x, x << steps, x >> steps, x >> 2**31


def _compared(x: Any, y: Any) -> Any:
    return x == y, y >= x


def _rank_0(number: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(number, dtype=dtype)


CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    **{f"whole {x.dtype}": (_whole, (x,)) for x in (BYTES, LONG)},
    **{f"real {x.dtype}": (_real, (x,)) for x in (FLOATS, FLOATS.half())},
    **{f"shifted {x.dtype}": (_shifted, (x,)) for x in (BYTES, SMALL, LONG)},
    "truth": (_truth, (TRUTHS,)),
    **{f"filled {x.dtype}": (_filled, (x,)) for x in (BYTES, TRUTHS)},
    **{
        f"{x.dtype} beside {y.dtype} of rank {y.dim()}": (_compared, (x, y))
        for x, y in (
            (FLOATS, _rank_0(0.1, torch.float64)),
            (FLOATS.half(), _rank_0(0.1, torch.float32)),
            (BYTES, _rank_0(300, torch.int64)),
            (BYTES, SMALL),
            (WORDS, LONG),
            (FLOATS.half(), FLOATS.bfloat16()),
        )
    },
}


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_torch(name: str) -> None:
    function, given = CASES[name]
    compiled = ladder.compile(function)
    expected = function(*given)
    for _ in range(2):
        found = compiled(*given)
    for one, other in zip(expected, found, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("dtype", "exponent"), [(torch.bfloat16, 3.001), (torch.float16, 2.0001)])
def test_exponents_are_rounded_to_sixteen_bits(dtype: torch.dtype, exponent: float) -> None:
    """Powers of negative numbers are NaN unless the exponent becomes whole."""
    fast, x = ladder.compile(lambda x: x**exponent), torch.tensor([-2, -0.5, 0, 3], dtype=dtype)
    for _ in range(2):
        torch.testing.assert_close(fast(x), x**exponent)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64], ids=str)
def test_powers_of_integers_are_exact_and_wrap(dtype: torch.dtype) -> None:
    def powers(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x**y, 3**y, x**13, torch.pow(x, -y.abs()) if dtype.is_signed else x

    x, y = torch.tensor([7, 3, 9, 1], dtype=dtype), torch.tensor([13, 30, 25, 0], dtype=dtype)
    fast = ladder.compile(powers)
    for _ in range(2):
        for expected, found in zip(powers(x, y), fast(x, y), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.parametrize("shape", [(), (1,), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
def test_sums_of_minus_zero_are_zero(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    def sums(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.sum(), x.mean(), x.nansum(), x.sum(0), x.mean(-1, keepdim=True), x.sum(dtype=torch.float32)

    x = torch.full(shape, -0.0, dtype=dtype)
    fast = ladder.compile(sums)
    for _ in range(2):
        for expected, found in zip(sums(x), fast(x), strict=True):
            assert torch.equal(expected, found)
            assert torch.equal(expected.signbit(), found.signbit())
