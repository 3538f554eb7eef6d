"""What the first run of a plan does, done when it is made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ladder

calls: list[int] = []


@pytest.fixture
def counting() -> Iterator[None]:
    """An operator that counts its calls."""
    calls.clear()
    library: Any = torch.library.Library("first_runs", "DEF")  # type: ignore[no-untyped-call]
    library.define("counted(Tensor x) -> Tensor")

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    library.impl("counted", counted, "CPU")
    library.impl("counted", lambda x: torch.empty_like(x), "Meta")
    yield
    library._destroy()


def test_a_plan_has_run_when_it_is_made() -> None:
    weight = torch.randn(16, 16)
    fast = ladder.compile(lambda x: torch.relu(x @ weight).sum(0))
    x = torch.randn(3, 16)
    fast(x)
    (built,) = fast.models
    assert built.executable._frames
    torch.testing.assert_close(fast(x), torch.relu(x @ weight).sum(0))


def test_random_numbers_are_drawn_as_without() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.dropout(x) + torch.rand(5) + torch.dropout_(x.t() * 1, 0.5, True).sum(0)[0]

    fast, x = ladder.compile(program), torch.randn(4, 5)
    for seed in (0, 1):
        torch.manual_seed(seed)
        expected = [program(x), program(x), torch.rand(1)]
        torch.manual_seed(seed)
        torch.testing.assert_close([fast(x), fast(x), torch.rand(1)], expected)


def test_what_is_written_and_what_has_effects_is_not_run_ahead(counting: None) -> None:
    def writes(x: torch.Tensor) -> torch.Tensor:
        x += 1
        return x * 2

    fast, x = ladder.compile(writes), torch.zeros(3)
    fast(x)
    assert torch.equal(x, torch.ones(3))
    operator = ladder.compile(lambda x: torch.ops.first_runs.counted(torch.relu(x)))
    for number in (1, 2, 3):
        assert torch.equal(operator(torch.zeros(3)), torch.ones(3))
        assert len(calls) == number
