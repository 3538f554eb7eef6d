"""Tensors with more elements than kernels count: torch runs those steps, the results are the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import ladder
from ladder.runtime import kernel
from ladder.runtime.model import attention, build, frame
from ladder.runtime.model.profile import ready_steps


def normed(x: Tensor) -> Tensor:
    return F.layer_norm(x * 2, (8,)).softmax(-1)


def attended(x: Tensor) -> Tensor:
    heads = x.view(-1, 2, 1, 4).transpose(0, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).flatten() + 1


def viewed(x: Tensor) -> tuple[Tensor, ...]:
    y = torch.tanh(x)
    return y.t(), y[1:].sum(0), (y * 2).reshape(-1)[3:]


def written(x: Tensor) -> Tensor:
    return x.mul_(2).index_fill_(0, torch.tensor([0]), 1.0).sum(0)


def numbered(x: Tensor) -> Tensor:
    return torch.tanh(x)[torch.tensor([1, 0])].argmax(-1) + x.amax().long()


PROGRAMS = (normed, attended, viewed, written, numbered)


@pytest.mark.parametrize("program", PROGRAMS)
@torch.no_grad()
def test_torch_runs_what_kernels_cannot_count(
    program: Callable[[Tensor], Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (frame, build):
        monkeypatch.setattr(module, "MOST_COUNTED", 64)
    fast = ladder.compile(program)
    for rows in (4, 9, 4, 12, 5, 9, 3, 12, 9):  # the first is fixed, others are open
        x = torch.randn(rows, 8)
        own = x.clone()
        torch.testing.assert_close(fast(own), program(x))
        assert torch.equal(own, x)
    assert not fast.refused


@torch.no_grad()
def test_sizes_that_are_fixed_say_so_in_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MOST_COUNTED", 64)
    fast = ladder.compile(normed)
    x = torch.randn(9, 8)
    for _ in range(2):
        torch.testing.assert_close(fast(x), normed(x))
    assert "kernels count 64 elements, a tensor has 72" in fast.plan()


@pytest.mark.parametrize("activation", [None, "int8"])
@torch.no_grad()
def test_products_take_as_many_rows_at_a_time_as_kernels_count(
    activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = ladder.quantize(torch.randn(40, 96), "int4", group_size=32)
    x = torch.randn(3, 67, 96)
    monkeypatch.setattr(kernel, "MOST_COUNTED", 20 * 96)
    options = {} if activation is None else {"activation": activation}
    layer = ladder.Linear.from_quantized(
        weight, bias=torch.randn(40), dtype=torch.float32, batch_invariant=True, **options
    )
    whole = layer(x)
    assert torch.equal(whole, torch.stack([layer(part) for part in x]))
    expected = x @ torch.from_numpy(weight.dequantize("float32").numpy()).t() + layer.bias
    assert (whole - expected).abs().max() <= (2e-2 if activation else 1e-5) * expected.abs().max()


@torch.no_grad()
def test_profiles_run_what_calls_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (frame, build):
        monkeypatch.setattr(module, "MOST_COUNTED", 64)
    fast = ladder.compile(normed)
    for rows in (4, 5, 6):
        fast(torch.randn(rows, 8))
    steps, _ = ready_steps(fast.models[-1].executable, [torch.randn(9, 8)])
    assert steps.by_torch


def test_heads_that_lie_far_apart_are_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slice of a cache may span more elements than 32 bits count, though it has few."""
    monkeypatch.setattr(attention, "MOST_COUNTED", 1000)
    cache = torch.randn(4, 2, 8, 16)
    near, far = cache[:1], cache[::3]
    assert attention.readable("k", near) is near
    copied = attention.readable("k", far)
    assert attention.elements_spanned(far) > 1000 >= attention.elements_spanned(copied)
    assert torch.equal(copied, far)
