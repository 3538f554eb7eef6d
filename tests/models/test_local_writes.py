"""Graphs that write only what their own operators made are traced once, and give what eager gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves

from ladder.frontend import aten_graphs


def _chain(x: Tensor) -> Tensor:
    y = x * 2
    y.relu_()
    y.add_(1)
    return y.sigmoid_() + 1


def _read_before(x: Tensor) -> Any:
    y = x + 1
    z = y * 3
    y.relu_()
    return z, y


def _added(x: Tensor) -> Any:
    y, z = x.exp(), x * 2
    y += z
    return y.relu_(), z


def _normed(x: Tensor) -> Tensor:
    y = functional.batch_norm(x, x.mean(0), x.var(0))
    functional.relu6(y, inplace=True)
    return y


def _given_before(x: Tensor) -> Tensor:
    y = x * 2
    given = y.relu_()
    y.add_(1)
    return given


def _by_itself(x: Tensor) -> Tensor:
    y = x * 2
    return y.mul_(y)


ONCE = (_chain, _read_before, _added, _normed, _given_before, _by_itself)


def _shown_by_a_view(x: Tensor) -> Any:
    y = x * 2
    part = y[:, 1:]
    y.relu_()
    return part, y


def _written_through_a_view(x: Tensor) -> Tensor:
    y = x * 2
    y[:, 1:].relu_()
    return y


def _of_another_type(x: Tensor) -> Tensor:
    y = x.half()
    return y.add_(x)


def _broadcast(x: Tensor) -> Tensor:
    y = x * 2
    return y.add_(x[0])


def _lies_otherwise(x: Tensor) -> Tensor:
    y = x * 2
    return y.add_(x.t().contiguous().t())


def _a_part_of_two(x: Tensor) -> Any:
    a, b = (x * 2).chunk(2, 1)
    a.relu_()
    return a, b


def _may_be_the_argument(x: Tensor) -> Any:
    y = torch.conj_physical(x)
    y.relu_()
    return y, x


def _an_argument(x: Tensor) -> Tensor:
    x.relu_()
    return x + 1


AGAIN = (
    _shown_by_a_view, _written_through_a_view, _of_another_type, _broadcast, _lies_otherwise, _a_part_of_two,
    _may_be_the_argument, _an_argument,
)  # fmt: skip


@pytest.mark.parametrize("program", [*ONCE, *AGAIN])
def test_own_results_are_written_without_a_second_trace(
    program: Callable[[Tensor], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = []

    def traced(*arguments: Any) -> Any:
        traces.append(arguments)
        return kept(*arguments)

    kept = aten_graphs._traced
    monkeypatch.setattr(aten_graphs, "_traced", traced)
    torch.manual_seed(0)
    x = torch.randn(4, 4)
    graph = aten_graphs.to_aten(torch.fx.symbolic_trace(program), [x.clone()])
    assert (len(traces) == 1) == (program in ONCE)
    given, read = x.clone(), x.clone()
    expected, found = tree_leaves(program(given)), tree_leaves(graph(read))
    assert torch.equal(given, read)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        assert one.stride() == other.stride()
        assert torch.allclose(one, other)
