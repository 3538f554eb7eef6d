"""Loops over time that Python unrolls: all steps share kernels, whatever place they read or write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import ladder
from ladder.partition.chains import MOST_JOINED

STEPS = 10


class Cell(nn.Module):
    """A hand-written recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(8 + 16, 16), nn.Linear(16, 4)

    def step(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(torch.cat((x, h), 1)))


class Stacked(Cell):
    """From the first step to the last."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, found = x.new_zeros(len(x), 16), []
        for t in range(x.shape[1]):
            h = self.step(x[:, t], h)
            found.append(self.outer(h))
        return torch.stack(found, 1)


class Backward(Cell):
    """By negative places, and written at such."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, found = x.new_zeros(len(x), 16), x.new_zeros(len(x), x.shape[1], 16)
        for t in range(1, x.shape[1] + 1):
            h = self.step(x[:, -t], h)
            found[:, -t] = h
        return found


class Strided(Cell):
    """Every second step; the others keep what was there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, found = x.new_zeros(len(x), 16), x.new_full((x.shape[1], len(x), 16), float("nan"))
        for t in range(0, x.shape[1], 2):
            h = self.step(x[:, t], found[t - 2] if t else h)
            found[t] = h
        return found


class Windows(Cell):
    """Two steps at once, along the last axis."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, lines = x.new_zeros(len(x), 16), x.transpose(1, 2).contiguous()
        for t in range(x.shape[1] - 1):
            h = self.step(lines[:, :, t : t + 2].sum(2), h)
        return h


def special(steps: int) -> torch.Tensor:
    """Return an input whose first and last steps have values that are no numbers."""
    x = torch.randn(3, steps, 8, generator=torch.Generator().manual_seed(0))
    x[0, 0, 0], x[1, -1, 0], x[2, -1, 1] = float("nan"), float("inf"), -float("inf")
    return x


@pytest.mark.parametrize("make", [Stacked, Backward, Strided, Windows])
def test_steps(make: Callable[[], nn.Module]) -> None:
    """As many kernels for twice as many steps, and what eager gives."""
    model, entries = make().eval(), []
    for steps in (STEPS, 2 * STEPS):
        fast, x = ladder.compile(model), special(steps)
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6, equal_nan=True)
        assert not fast.refused
        entries.append(len({step.entry for step in fast.models[0].plan.steps if step.entry}))
    assert entries[0] == entries[1]


def test_steps_of_open_batches() -> None:
    """Kernels that take sizes take the starts after them."""
    model = Backward().eval()
    fast = ladder.compile(model)
    with torch.no_grad():
        for count in (3, 2, 5, 3):
            x = torch.randn(count, STEPS, 8)
            torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    assert any(step.sizes and step.starts for step in fast.models[-1].plan.steps)


def test_steps_of_a_saved_model(tmp_path: Path) -> None:
    """What is read back gives its kernels the same starts."""
    model, x = Stacked().eval(), special(STEPS)
    loaded = ladder.load(ladder.compile(model).export(tmp_path / "steps.ladder", x))
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model(x), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_many_parts_are_joined_by_torch() -> None:
    class Doubled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([x[t] * 2 for t in range(len(x))], 1) + 1

    fast, x = ladder.compile(Doubled()), torch.randn(MOST_JOINED + 1, 3)
    torch.testing.assert_close(fast(x), Doubled()(x))
    assert f"a join of more than {MOST_JOINED}" in fast.plan()
