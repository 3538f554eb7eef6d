"""Norms in training: what an operator writes without its schema saying so, and what reads it afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ladder


class Read(nn.Module):
    """Reads the statistics of a norm before, between and after two calls that change them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Any) -> Any:
        before = self.norm.running_mean * 2
        y = self.norm(x)
        between = self.norm.running_mean * 2
        return self.norm(y + x), before, between, self.norm.running_var + 1


class Parts(nn.Module):
    """The statistics are views of buffers that are read whole."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(6))
        self.register_buffer("variances", torch.ones(6))

    def forward(self, x: Any) -> Any:
        y = nn.functional.batch_norm(x, self.means[:3], self.variances[3:], training=True)
        return y, self.means + 1, self.variances * 2


def instance_norm() -> nn.Module:
    return nn.InstanceNorm1d(3, momentum=0.3, affine=True, track_running_stats=True)


@pytest.mark.parametrize("make", [instance_norm, Read, Parts])
def test_running_statistics_are_eagers(make: Any) -> None:
    torch.manual_seed(0)
    eager = make().train()
    other = copy.deepcopy(eager)
    fast = ladder.compile(other)
    begun = [value._version for value in (*eager.buffers(), *other.buffers())]
    with torch.no_grad():
        for rows in (4, 4, 4, 2, 3):  # once, again by its plan, then with open sizes
            x = torch.randn(rows, 3, 5)
            torch.testing.assert_close(fast(x), eager(x))
            torch.testing.assert_close(list(other.buffers()), list(eager.buffers()))
    assert not fast.refused
    ended = [value._version for value in (*eager.buffers(), *other.buffers())]
    changes = [last - first for first, last in zip(begun, ended, strict=True)]
    assert changes[: len(changes) // 2] == changes[len(changes) // 2 :]
