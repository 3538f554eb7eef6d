"""Windows along an axis, cross products, powers and logarithms of two are kernels of chains, as eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_eager import beside_eager

import ladder


def frames(x: torch.Tensor) -> torch.Tensor:
    """Overlapping frames of a signal, each without its mean."""
    found = x.unfold(1, 8, 3)
    return found - found.mean(-1, keepdim=True)


def frames_before(x: torch.Tensor) -> torch.Tensor:
    """Frames along an axis that others follow, as many as there are and none more."""
    return x.unfold(-2, 5, 5) * 2 + x.unfold(0, 2, 1)[:1, :1, :, :1].mean()


def crossed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.cross(a, b, dim=-1), torch.linalg.cross(a[:1], b), torch.cross(a.mT, b.mT, dim=-2)


def of_two(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.exp2(x), torch.log2(x), torch.exp2(torch.floor(torch.log2(x.abs())))


X = torch.randn(6, 41, generator=torch.Generator().manual_seed(0))
SPECIAL = torch.tensor(
    [0.0, -0.0, 1.0, 2.0**-126, 2.0**-149, 3.0, -1.0, float("inf"), float("-inf"), float("nan")]
)

PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "frames": (frames, (X,)),
    "frames before others": (frames_before, (X.view(2, 3, 41).mT.contiguous(),)),
    "cross products": (crossed, (X[:, :39].reshape(6, 13, 3), X[:, 2:].reshape(6, 13, 3))),
    "powers": (of_two, (torch.cat([X.flatten() * 20, torch.arange(-126.0, 128), SPECIAL]),)),
    "powers of halves": (of_two, ((X * 4).half(),)),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_eager(name: str) -> None:
    fast, pairs = beside_eager(*PROGRAMS[name])
    for one, other in pairs:
        torch.testing.assert_close(one, other, equal_nan=True, atol=1e-6, rtol=1e-6)
    assert not {"unfold", "index_select", "linalg_cross"} & {*fast.plan().replace(".", " ").split()}


def divided(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a // 16, a % 7, (a // 3) * 3 + a % 3


@pytest.mark.parametrize("kind", ["int64", "int32", "int8", "uint8"])
def test_division_rounded_down(kind: str) -> None:
    info = torch.iinfo(getattr(torch, kind))
    numbers = [info.min, info.min + 1, -17, -16, -1, 0, 1, 15, 16, 17, info.max - 1, info.max]
    a = torch.tensor([number for number in numbers if number >= info.min], dtype=getattr(torch, kind))
    fast = ladder.compile(divided)
    got = [fast(a) for _ in range(2)][1]
    assert all(torch.equal(one, other) for one, other in zip(got, divided(a), strict=True))
    assert "torch.ops" not in fast.plan()


def test_what_lies_behind_the_point() -> None:
    """Of zeros the sign stays, and what rounds up to 1 is 1, as eager has them."""
    x = torch.cat([SPECIAL, torch.tensor([-2.0, -1e-30, 0.25, -0.25, 1e30, -7.75])])
    fast = ladder.compile(lambda x: x % 1)
    got = [fast(x) for _ in range(2)][1]
    torch.testing.assert_close(got, x % 1, equal_nan=True, atol=0, rtol=0)
    assert torch.equal(torch.signbit(got), torch.signbit(x % 1)) or bool(x.isinf().any())
    assert "torch.ops" not in fast.plan()
