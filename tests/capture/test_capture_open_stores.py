"""Writes into slices whose bounds are numbers of the program, as caches take them: one record for all."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ladder.capture import Captured


def opened(module: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """Run a graph operator by operator, and take numbers as symbols alone, as plans do."""
    return module.forward


opened.dynamic_shapes, opened.numbers = True, False  # type: ignore[attr-defined]


class Cache(nn.Module):
    """Keeps the rows that it is given, turned by complex factors, and adds up those before."""

    def __init__(self, store: Callable[[Tensor, Tensor, int], None]) -> None:
        super().__init__()
        self.store = store
        self.register_buffer("kept", torch.zeros(4, 32, 6))
        angles = torch.outer(torch.arange(32.0), torch.arange(3.0))
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles))

    def forward(self, x: Tensor, at: int) -> Tensor:
        batch, rows, _ = x.shape
        pairs = torch.view_as_complex(x.reshape(batch, rows, -1, 2))
        turned = torch.view_as_real(pairs * self.turns[at : at + rows].view(1, rows, -1)).flatten(2)
        self.store(self.kept, turned, at)
        return self.kept[:batch, : at + rows].sum(1)


def rows(kept: Tensor, x: Tensor, at: int) -> None:
    kept[: x.shape[0], at : at + x.shape[1]] = x


def the_rest(kept: Tensor, x: Tensor, at: int) -> None:
    kept[: x.shape[0], at:] = x[:, :1]


def counted_from_the_end(kept: Tensor, x: Tensor, at: int) -> None:
    kept[..., -at : -at + 1, :] = x[:1, :1]


def added(kept: Tensor, x: Tensor, at: int) -> None:
    kept[: x.shape[0], at : at + x.shape[1]] += x


@pytest.mark.parametrize("store", [rows, the_rest, counted_from_the_end, added])
def test_bounds_of_what_is_written_stay_open(store: Callable[[Tensor, Tensor, int], None]) -> None:
    model = Cache(store)
    captured = Captured(copy.deepcopy(model), opened)
    with torch.no_grad():
        for at in (8, 9, 10, 11, 12, 13):
            _same(captured, model, torch.randn(2, 1, 6), at)
        assert captured.totals()[0] == 3
        for length, at in [(1, 31), (1, 32), (3, 30), (2, 40), (1, 1), (1, 0), (2, -3), (5, 7), (3, 20)]:
            _same(captured, model, torch.randn(2, length, 6), at)


def _same(captured: Captured, model: nn.Module, x: Tensor, at: int) -> None:
    """Check that results or errors, and what was written, are those of the model."""
    found = []
    for function in (captured, model):
        try:
            found.append(function(x, at))
        except RuntimeError as error:
            found.append(str(error))
    if isinstance(found[1], str):
        assert found[0] == found[1]
    else:
        assert torch.equal(*found)
    assert torch.equal(captured.function.kept, model.kept)
