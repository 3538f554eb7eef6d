"""Diagonals are views, of which kernels read the elements that there are."""

from __future__ import annotations

from typing import Any

import torch

import ladder


def planned(function: Any, x: torch.Tensor) -> tuple[Any, str]:
    compiled = ladder.compile(function)
    with torch.no_grad():
        compiled(x)
        return compiled(x), str(compiled.plan())


def test_diagonals_are_summed_and_scaled() -> None:
    """Of matrices of 5 rows and 7 columns: the two beyond the corners have no element, and are torch's."""
    x = torch.arange(105.0).view(3, 5, 7)

    def program(x: torch.Tensor, *offsets: int) -> tuple[torch.Tensor, ...]:
        found = [x.diagonal(offset, -2, -1) for offset in offsets]
        return *(each * 2 for each in found), *(each.sum(-1) for each in found)

    for offsets in ((0, 1, -2, 6, -4), (7, -5)):
        got, plan = planned(lambda x, offsets=offsets: program(x, *offsets), x)
        assert all(torch.equal(*pair) for pair in zip(got, program(x, *offsets), strict=True))
        assert "aten" not in plan or 7 in offsets


def test_diagonals_of_axes_apart() -> None:
    x = torch.randn(4, 5, 6)
    got, plan = planned(lambda x: torch.diagonal(x, 1, 2, 0) + 1, x)
    assert torch.equal(got, torch.diagonal(x, 1, 2, 0) + 1)
    assert "aten" not in plan


def test_what_is_written_through_a_diagonal_is_written() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        x.diagonal(dim1=-2, dim2=-1).add_(1)
        return x.diagonal(dim1=-2, dim2=-1) * 1

    compiled = ladder.compile(program)
    alone = ladder.compile(lambda x: x.diagonal())
    with torch.no_grad():
        for _ in range(3):
            ours, theirs = torch.zeros(2, 3, 3), torch.zeros(2, 3, 3)
            assert torch.equal(compiled(ours), program(theirs))
            assert torch.equal(ours, theirs)
            x = torch.zeros(3, 3)
            alone(x).fill_(1)
            assert torch.equal(x, torch.eye(3))
