"""Programs that take bits apart and put them together are kernels of chains, as eager to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside_eager import beside_eager


def unpacked(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Two codes of four bits in a byte."""
    low, high = (codes & 15).to(torch.int8) - 8, (codes >> 4).to(torch.int8) - 8
    return torch.stack([low, high], -1).reshape(codes.shape[0], -1).to(scale.dtype) * scale


def packed(x: torch.Tensor) -> torch.Tensor:
    codes = ((x.float() * 3).round().clamp(-8, 7) + 8).to(torch.uint8).view(x.shape[0], -1, 2)
    return codes[..., 0] | (codes[..., 1] << 4)


def words(codes: torch.Tensor) -> torch.Tensor:
    """Eight codes in a word, each shifted by a step of its own."""
    steps = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((codes[..., None] >> steps) & 0xF).flatten(1)


def mixed(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a & b, a | b, a ^ b, ~a, a << b, a >> b, a << 3, a >> 70, 5 & a, (a & 1).bool()


def truths(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return a & b, a | b, a ^ b, ~a, (a ^ True) & (b | False)


def integers(name: str) -> list[torch.Tensor]:
    kind = getattr(torch, name)
    info = torch.iinfo(kind)
    found = [info.min, info.max, 0, 1, 7, 8, 9, 31, 63, info.max - 5, 85, info.max // 3]
    values = torch.tensor(found, dtype=kind)
    return [values.repeat_interleave(12).view(12, 12), values.repeat(12).view(12, 12)]


BYTES = torch.arange(256, dtype=torch.uint8).view(8, 32)
TRUTHS = torch.tensor([False, True, False, True]), torch.tensor([False, False, True, True])

PROGRAMS: dict[str, tuple[Callable[..., Any], Any]] = {
    "unpacked": (unpacked, (BYTES, torch.rand(8, 1).half())),
    "packed": (packed, (torch.randn(6, 32).half(),)),
    "words": (words, (torch.arange(-7, 8, dtype=torch.int32).view(3, 5) * 0x1234567,)),
    "truths": (truths, TRUTHS),
    **{name: (mixed, integers(name)) for name in ("uint8", "int8", "int32", "int64")},
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_bits_are_computed_in_chains(name: str) -> None:
    fast, pairs = beside_eager(*PROGRAMS[name])
    for one, other in pairs:
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    assert "torch.ops" not in fast.plan()
