"""Views of a plan's own memory are made once per buffer and sizes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import ladder
from ladder.integrations.dynamo import backend
from ladder.runtime.model import binders


def turned(x: Tensor, w: Tensor, y: Tensor) -> Tensor:
    """Views that stay views, one that needs a copy, and one whose shape follows from another argument."""
    a = torch.tanh(x @ w)
    b = a.reshape(a.shape[0], 4, 2).transpose(1, 2)
    c = b.reshape(a.shape[0], 8) @ w.t()
    d = torch.tanh(w.t() @ w)[:1].expand(y.shape[0], 8)
    return c.sum(0) + (d @ y.t()).sum()


def test_views_follow_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    whole = binders.view_run

    def counted(*given: Any) -> Any:
        run = whole(*given)

        def counting(value: Any) -> Any:
            made.append(value)
            return run(value)

        return counting

    monkeypatch.setattr(binders, "view_run", counted)
    fast, w = ladder.compile(turned), torch.randn(8, 8)
    counts = []
    with torch.no_grad():
        for rows, others in [(6, 5), (7, 4), (9, 4), (9, 3), (9, 3), (7, 4), (9, 3), (9, 3)]:
            x, y = torch.randn(rows, 8), torch.randn(others, 8)
            before = len(made)
            assert torch.allclose(fast(x, w, y), turned(x, w, y), atol=1e-4)
            counts.append(len(made) - before)
    assert not fast.refused
    assert counts[-1] < counts[-2]  # the same sizes once more


def test_results_are_the_callers_own() -> None:
    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(x)
        return y.t(), (torch.exp(y).reshape(-1) * 2).reshape(x.shape).t()

    fast = ladder.compile(both)
    with torch.no_grad():
        first = fast(torch.full((3, 4), 1.0))
        kept = [value.clone() for value in first]
        fast(torch.full((3, 4), 2.0))
    assert all(map(torch.equal, first, kept))


@pytest.mark.parametrize("compiled", [ladder.compile, partial(torch.compile, backend=backend)])
def test_views_of_parameters_require_gradients_as_without(compiled: Any) -> None:
    """Also where none are recorded, and if their type is another one or they are conjugates."""
    turns = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
    weight = torch.nn.Parameter(torch.randn(8, 4))

    def views(x: Tensor) -> tuple[Tensor, ...]:
        return (x @ weight).relu(), weight.t(), weight[2:4], weight, weight.detach()[1:], weight * 1

    def others(x: Tensor) -> tuple[Tensor, ...]:
        return x.relu() + 1, torch.view_as_real(turns), turns.conj(), turns.conj().imag

    def facts(value: Tensor) -> tuple[Any, ...]:
        where = value.stride(), value.storage_offset()
        return *where, value.requires_grad, value._is_view(), value._base is weight, value is weight

    torch._dynamo.reset()
    fast = compiled(views), compiled(others)
    with torch.no_grad():
        for rows in (3, 3, 5, 7, 9):
            x = torch.randn(rows, 8)
            for function, made in zip((views, others), fast, strict=True):
                found, expected = made(x), function(x)
                torch.testing.assert_close(found, expected)
                assert [*map(facts, found)] == [*map(facts, expected)]
    assert not getattr(fast[0], "refused", None)


def test_conjugates_of_what_is_written() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x.mul_(2)
        return x.conj(), x.conj().imag, x[1:]

    fast = ladder.compile(program)
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(3, 4, dtype=torch.complex64)
            y = x.clone()
            torch.testing.assert_close(fast(x), program(y), rtol=0, atol=0)
            assert torch.equal(x, y)


def test_views_of_what_is_written_lie_as_the_argument_of_each_call() -> None:
    """Sizes are open, and no plan serves all: that of each set of sizes has strides and offset of its own."""

    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        v = x.reshape_as(x)
        x.sub_(1)
        return v[x.shape[0] // 2 :], x.triu(1)

    fast = ladder.compile(program)
    with torch.no_grad():
        for shape in [(17, 5), (17, 5), (1, 5), (17, 8), (18, 9), (1, 0), (17, 5), (20, 3)]:
            mine = torch.arange(20 * 9.0)[: shape[0] * shape[1]].reshape(shape).clone()
            theirs = mine.clone()
            for found, expected in zip(fast(mine), program(theirs), strict=True):
                assert torch.equal(found, expected)
                assert found.stride() == expected.stride()
            assert torch.equal(mine, theirs)
