"""Graphs some of whose tensors lie on another device than their arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ladder
from ladder.integrations import dynamo

PROGRAMS: dict[str, Callable[[torch.Tensor, str], Any]] = {
    "moved": lambda x, place: ((x + 1).to(place), x * 2),
    "made": lambda x, place: (torch.zeros(3, device=place), x * 2),
    "made like another": lambda x, place: (torch.ones_like(x, device=place) * 2, x * 2),
    "in between": lambda x, place: (x + torch.ones(3, device=place).shape[0], x * 2),
}


def check(way: Callable[[Any], Any], name: str, x: torch.Tensor, place: str) -> None:
    """Compare devices and values of three calls."""
    program = PROGRAMS[name]
    expected, fast = program(x, place), way(program)
    for _ in range(3):
        for one, other in zip(expected, fast(x, place), strict=True):
            if isinstance(one, torch.Tensor):
                assert other.device == one.device
                assert one.is_meta or torch.equal(one, other)
            else:
                assert one == other


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("way", [ladder.compile, lambda f: torch.compile(f, backend=dynamo.backend)])
def test_results_lie_where_the_program_has_them(way: Callable[[Any], Any], name: str) -> None:
    with torch.no_grad():
        check(way, name, torch.randn(3), "meta")
