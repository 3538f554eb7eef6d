"""What is computed of a model's parameters and buffers alone: once, and again after they were changed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ladder
from ladder.runtime.model import joined, parameters


class Biased(nn.Module):
    """Attention to windows: a table of relative positions, read by an index that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.table = nn.Parameter(torch.randn(49, 2))
        self.places: Tensor
        self.register_buffer("places", torch.randint(0, 49, (256,)))

    def bias(self) -> Tensor:
        return self.table[self.places].view(16, 16, 2).permute(2, 0, 1).contiguous()

    def forward(self, x: Tensor) -> Any:
        q, k, v = self.project(x).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) + self.bias().unsqueeze(0)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Returned(Biased):
    def forward(self, x: Tensor) -> Any:
        bias = self.bias()
        return x[:, :, :16] + bias[0], bias


class Resampled(nn.Module):
    """Embeddings of places of a grid of another size; a part that only moves elements is no work."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(1, 8, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        grid = F.interpolate(self.places, size=(6, 6), mode="bicubic", align_corners=False)
        return x.sin() + grid.flatten(2).transpose(1, 2)


class Normalised(nn.Module):
    """Gains that are one more than what is stored, and angles of a buffer by places."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(32))
        self.rates: Tensor
        self.register_buffer("rates", torch.rand(32), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1], device=x.device).float()[:, None] * self.rates
        return F.rms_norm(x, (32,)) * (1.0 + self.gain.float()) * angles.cos()


class Counting(Normalised):
    """A buffer that every call changes."""

    def forward(self, x: Tensor) -> Tensor:
        self.rates.add_(0.25)
        return super().forward(x)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int]] = {
    "biased": (Biased, (2, 16, 32), 1),
    "returned": (Returned, (2, 16, 32), 0),
    "resampled": (Resampled, (2, 36, 8), 1),
    "normalised": (Normalised, (2, 5, 32), 2),
    "counting": (Counting, (2, 5, 32), 1),
}
"""Name -> (model, shape of x, values that are kept)."""


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5)


def kept(fast: Any) -> int:
    (built,) = fast.models
    return sum(source.graph is not None for source in built.program.sources.values())


@pytest.mark.parametrize("name", MODELS)
def test_values_are_kept_and_made_again_after_changes(name: str) -> None:
    make, shape, count = MODELS[name]
    torch.manual_seed(0)
    model, other, x = make().eval(), make().eval(), torch.randn(shape)
    other.load_state_dict(model.state_dict())
    for buffer, copied in zip(model.buffers(), other.buffers(), strict=True):
        copied.copy_(buffer)
    fast = ladder.compile(model)

    def alter(change: Callable[[nn.Module], Any]) -> None:
        change(model)
        change(other)

    with torch.no_grad():
        for _ in range(3):
            same(fast(x), other(x))
        assert kept(fast) == count
        alter(lambda m: [p.mul_(1.5) for p in m.parameters()])
        same(fast(x), other(x))
        alter(lambda m: [b.copy_(b.flip(0)) for b in m.buffers()])
        same(fast(x), other(x))
        alter(lambda m: [p.data.neg_() for p in m.parameters()])  # torch counts no such write
        same(fast(x), other(x))
        alter(lambda m: [setattr(p, "data", p.data * float("inf")) for p in m.parameters()])
        found, expected = fast(x), other(x)
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_what_is_returned_is_the_callers() -> None:
    model = Returned().eval()
    fast, x = ladder.compile(model), torch.randn(2, 16, 32)
    with torch.no_grad():
        for _ in range(3):
            fast(x)[1].zero_()
        same(fast(x), model(x))


@pytest.mark.parametrize("name", ["biased", "resampled", "normalised"])
def test_halves_autocast_and_files(name: str, tmp_path: Path) -> None:
    make, shape, count = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    fast = ladder.compile(model)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            found = fast(x)
        torch.testing.assert_close(found, model(x), rtol=2e-2, atol=2e-2)
    half, y = make().to(torch.bfloat16).eval(), x.to(torch.bfloat16)
    short = ladder.compile(half)
    with torch.no_grad():
        for _ in range(2):
            found = short(y)
        assert kept(short) == count
        torch.testing.assert_close(found, half(y), rtol=2e-2, atol=2e-2)
        path = short.export(tmp_path / "model.ladder", y)
        assert torch.equal(ladder.load(path)(y), found)


def test_layers_that_share_a_plan_keep_their_values_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where `torch.compile` takes each layer by itself: all have the same graph."""
    made: list[Any] = []
    make = joined.Made.made
    monkeypatch.setattr(joined.Made, "made", lambda self, values: (made.append(0), make(self, values))[1])
    layers, others = ([Resampled().eval() for _ in range(3)] for _ in range(2))
    for layer, other in zip(layers, others, strict=True):
        other.load_state_dict(layer.state_dict())
        layer.compile(backend="ladder")
    x = torch.randn(2, 36, 8)

    def counted() -> int:
        made.clear()
        for layer, other in zip(layers, others, strict=True):
            same(layer(x), other(x))
        return len(made)

    with torch.no_grad():
        assert [counted() for _ in range(3)] == [3, 0, 0]
        layers[1].places.mul_(2)
        others[1].places.mul_(2)
        assert [counted() for _ in range(2)] == [1, 0]
        for each in (layers, others):
            del each[0]
        gc.collect()
        assert [counted() for _ in range(2)] == [0, 0]


def test_what_was_made_of_parts_that_are_gone_is_dropped() -> None:
    arrays = joined.Joined([joined.Join((0, 1), 0)])
    first, second = ([torch.randn(2, 3) for _ in range(2)] for _ in range(2))
    (one,) = arrays.of(first)
    (two,) = arrays.of(second)
    assert arrays.of(first)[0] is one
    assert arrays.of(second)[0] is two
    assert len(arrays._parked) == 1
    first.clear()
    gc.collect()
    assert not arrays._parked
    second[0].data.mul_(3)  # torch counts no such write
    third = [torch.randn(2, 3), second[1]]
    arrays.of(third)
    assert torch.equal(arrays.of(second)[0], torch.cat(second))


def test_large_values_and_precise_programs_compute_them_in_every_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, model = torch.randn(3, 36, 8), Resampled().eval()  # of a shape for which no plan is cached
    precise = ladder.compile(model, precise=True)
    monkeypatch.setattr(parameters, "MOST_BYTES", 64)
    large = ladder.compile(Resampled().eval())
    with torch.no_grad():
        precise(x), large(x)
    assert kept(precise) == kept(large) == 0
