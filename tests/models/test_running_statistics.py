"""Norms in training: what an operator writes without its schema saying so, and what reads it afterwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import ladder
from ladder.frontend.aten_graphs import to_aten


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


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("library", ["cudnn", "miopen"])
def test_norms_of_libraries_are_no_steps_of_plans(library: str, known: bool) -> None:
    """They refuse memory that lies otherwise than that of the fake tensors they were traced with."""
    norm = getattr(torch.ops.aten, f"{library}_batch_norm").default

    def function(x: Any, weight: Any, bias: Any, mean: Any, variance: Any) -> Any:
        statistics = (mean, variance) if known else (None, None)
        return norm(x, weight, bias, *statistics, not known, 0.1, 1e-5)[0]

    torch.manual_seed(0)
    given = [torch.randn(2, 3, 5), *(torch.rand(3) + 0.5 for _ in range(4))]
    graph = to_aten(torch.fx.symbolic_trace(function), given)
    assert not any(library in str(node.target) for node in graph.graph.nodes)
    x, weight, bias, *statistics = given
    statistics = statistics if known else [None, None]
    expected = nn.functional.batch_norm(x, *statistics, weight, bias, not known, 0.1, 1e-5)
    (found,) = torch.utils._pytree.tree_leaves(graph(*given))
    torch.testing.assert_close(found, expected)
