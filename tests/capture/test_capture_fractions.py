"""Fractions that change from call to call, for a backend whose plans have numbers as constants."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ladder
from ladder.capture import capture


def as_it_is(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    return module.forward


as_it_is.numbers = False  # type: ignore[attr-defined]

FRACTIONS = (0.1, 1 / 3, -2.5, -0.0, 1e-40, 3e38, 1e300, math.inf, math.nan, 7.0)


def sides(x: Any, t: float) -> Any:
    return x * t, t * x, x + t, t + x, x - t, t - x, x / t, t / x, (1 - t) * x


def spelled(x: Any, t: float) -> Any:
    return torch.mul(x, t), x.sub(t), torch.rsub(x, t), x.div(t), torch.add(t, x), x.true_divide(t)


def compared(x: Any, t: float) -> Any:
    return x < t, t <= x, x.gt(t), torch.ge(x, t), x == t, t != x


def in_place(x: Any, t: float) -> Any:
    a, b, c, d = (x.clone() for _ in range(4))
    a += t
    b -= t
    c *= t
    d.div_(t)
    return a, b, c, d, x.clone().mul_(1 - t).add_(t)


def alike(a: Any, b: Any) -> bool:
    """Tell whether results are the same bits of the same types; all NaN are."""
    pairs = zip(a, b, strict=True) if isinstance(a, tuple) else [(a, b)]
    return all(
        x.dtype == y.dtype and torch.equal(x.isnan(), y.isnan()) and torch.equal(bits(x), bits(y))
        for x, y in pairs
    )


def bits(x: torch.Tensor) -> torch.Tensor:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.detach().masked_fill(x.isnan(), 0).view(kind)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("program", [sides, spelled, compared, in_place])
def test_operators_give_the_same_bits(program: Any, dtype: torch.dtype) -> None:
    x = torch.tensor([[1.5, -0.0, 3e-5, math.inf], [math.nan, 1e-3, -7.25, 65000.0]], dtype=torch.float64)
    x = x.to(dtype)
    fast = capture(program, backend=as_it_is)
    for t in FRACTIONS:
        assert alike(fast(x, t), program(x, t)), t
    halves = program is in_place and dtype in (torch.float16, torch.bfloat16)  # products are rounded twice
    assert fast.calls["recorded"] <= (3 if not halves else len(FRACTIONS))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(), (0,), (3,)])
def test_whole_numbers_and_numbers_alone(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.full(shape, 3).to(dtype)
    fast, compares = (capture(program, backend=as_it_is) for program in (sides, compared))
    for t in FRACTIONS:
        assert alike(fast(x, t), sides(x, t)), t
        assert alike(compares(x, t), compared(x, t)), t
    assert fast.calls["recorded"] <= 3


def others(x: Any, t: float) -> Any:
    y = x.clone().to(torch.int32)
    y.copy_(x * t)
    z = torch.clamp(x, max=t) if t > 0 else x.pow(2)
    return y, z, x.sum() * t, torch.full((2,), t), x.add(x, alpha=t)


def test_where_a_number_is_no_tensor_it_is_what_it_was() -> None:
    fast, x = capture(others, backend=as_it_is), torch.randn(3, 4)
    for t in (0.5, -1.5, 2.25, 0.5, 1e-3, 2.25):
        found, wanted = fast(x, t), others(x, t)
        assert alike(found, wanted)


def test_gradients() -> None:
    def loss(x: Any, t: float) -> Any:
        return ((x * t).sin() + t / x - t).sum()

    fast = capture(loss, backend=as_it_is)
    for t in (0.5, 0.75, 1.25, -3.5):
        x, y = (torch.tensor([0.3, -1.25, 2.0]).requires_grad_() for _ in range(2))
        fast(x, t).backward()
        loss(y, t).backward()
        assert alike(x.grad, y.grad)
    assert fast.calls["recorded"] <= 3


class Tempered(torch.nn.Module):
    """A temperature in an attribute, and a rate that decays by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.temperature, self.rate = torch.nn.Linear(8, 8), 1.0, 1.0

    def forward(self, x: Any) -> Any:
        self.rate *= 0.9
        return torch.softmax(self.inner(x) / self.temperature, -1) * self.rate


def test_attributes_are_recorded_three_times() -> None:
    torch.manual_seed(0)
    model, x = Tempered().eval(), torch.randn(2, 8)
    fast, rate, compiled = ladder.compile(model), 1.0, set()
    with torch.no_grad():
        for call in range(12):
            model.temperature = 0.5 + 0.1 * call
            rate *= 0.9
            found = fast(x)
            wanted = torch.softmax(model.inner(x) / model.temperature, -1) * rate
            assert model.rate == rate
            assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-7)
            compiled.add(len(fast.models))
    assert max(compiled) <= 4


@pytest.mark.parametrize("program", [lambda x, t: t - x, lambda x, t: x - t, lambda x, t: torch.rsub(x, t)])
def test_differences_of_bools_are_refused_as_torch_does(program: Any) -> None:
    fast = capture(program, backend=as_it_is)
    for t in FRACTIONS:
        with pytest.raises(RuntimeError, match="bool"):
            fast(torch.tensor([True, False]), t)
