"""Attention on CPUs by a kernel of ours: right beside float64, its strides, and which sizes are torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import ladder
from ladder.ir.attention import Attention
from ladder.partition.attention import are_few

CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "plain": ({}, (1, 1, 1, 8, 8)), "causal": ({"is_causal": True}, (2, 7, 17, 24, 40)),
    "scale": ({"scale": -1.5}, (1, 5, 3, 33, 1)), "groups": ({"enable_gqa": True}, (2, 1, 40, 3, 20)),
    "added": ({}, (3, 4, 16, 16, 16)), "chosen": ({}, (2, 9, 18, 24, 33)),
    "shared mask": ({}, (1, 3, 33, 8, 16)),
}  # fmt: skip
"""Case -> torch's options; batch, queries, keys, elements of a key and of a value."""


def arguments(case: str, size: tuple[int, ...]) -> tuple[tuple[Tensor, ...], Tensor | None]:
    """Return q, k, v, whose heads lie behind tokens, and the mask of a case."""
    torch.manual_seed(0)
    batch, tokens, keys, depth, width = size
    shared = 2 if case == "groups" else 4
    q, k = torch.randn(batch, tokens, 4, depth), torch.randn(batch, keys, shared, depth)
    v = torch.randn(batch, shared, width, keys).transpose(2, 3)
    masks = {
        "added": torch.randn(batch, 1, tokens, keys),
        "chosen": torch.rand(batch, 4, tokens, keys) < 0.6,
        "shared mask": torch.randn(tokens, keys),
    }
    return (q.transpose(1, 2), k.transpose(1, 2), v), masks.get(case)


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Return whether each attention that is bound is ours."""
    from ladder.runtime.model import native_parts

    found: list[bool] = []
    bind = native_parts.bind_entry
    monkeypatch.setattr(native_parts, "bind_entry", lambda *given: found.append(True) or bind(*given))
    return found


@pytest.mark.parametrize("case", CASES)
def test_right_and_laid_out_as_torchs(case: str, bound: list[bool]) -> None:
    options, size = CASES[case]

    def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, mask, **options)

    operands, mask = arguments(case, size)
    fast = ladder.compile(attention)
    with torch.no_grad():
        found, eager = fast(*operands, mask), attention(*operands, mask)
    wide = None if mask is None or mask.dtype == torch.bool else mask.double()
    wanted = attention(*(x.double() for x in operands), mask if wide is None else wide)
    assert bound == [True]
    assert found.stride() == eager.stride()
    assert (found - wanted).abs().max() <= 2e-6 * wanted.abs().max()


@pytest.mark.parametrize("lost", [float("nan"), float("inf"), -float("inf")])
def test_special_scores_are_as_torchs(lost: float) -> None:
    """NaN, infinite scores, and rows of which a mask hides all keys."""
    operands, mask = arguments("added", (2, 7, 17, 24, 40))
    assert mask is not None
    mask[0, 0, 2] = mask[1, 0, 3, 4] = lost
    fast = ladder.compile(F.scaled_dot_product_attention)
    with torch.no_grad():
        wanted = F.scaled_dot_product_attention(*(x.double() for x in operands), mask.double())
        found = fast(*operands, mask)
    torch.testing.assert_close(found.double(), wanted, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_open_sizes_take_the_kernel_where_scores_are_few(bound: list[bool]) -> None:
    fast = ladder.compile(F.scaled_dot_product_attention)
    with torch.no_grad():
        for batch, tokens in ((2, 5), (2, 5), (2, 5), (2, 5), (3, 90), (3, 90), (2, 6), (2, 0)):
            q, k, v = torch.randn(3, batch, 4, tokens, 16).unbind(0)
            first, *others = (fast(q, k, v) for _ in range(4))  # the first may compile
            torch.testing.assert_close(first, F.scaled_dot_product_attention(q, k, v))
            assert all(torch.equal(found, others[0]) for found in others)  # bound to these sizes or not
    assert bound


def test_many_scores_are_torchs() -> None:
    form = Attention(4, 4, 64, "float32", "float32")
    assert are_few(form, (1, 16, 64), 64)
    assert not are_few(form, (1, 256, 256), 64)
    assert not are_few(form, (1, 1, 4096), 64)
    assert not are_few(form, (1, 0, 16), 64)
