"""Functions in chains for GPUs: how often they are called, and where what they give is kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_partition import DEVICE, on_gpu, planned, run  # noqa: F401

from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked


def emitted(part: Any) -> str:
    """Return a chain's first mapping as text."""
    return str(
        emit_chain(part.graph, DEVICE, "chain", ranked(part.graph, machine_of(DEVICE))[0].mapping).script()
    )


def snake(x: torch.Tensor) -> torch.Tensor:
    return x + torch.sin(x).square()


def normal(x: torch.Tensor) -> torch.Tensor:
    return torch.erf(x * 0.5**0.5)


def features(x: torch.Tensor) -> torch.Tensor:
    """Of points: a function of distances, one for each row, times functions of all."""
    d = x.square().sum(-1).sqrt()
    cut = torch.cos(d.clamp(max=5.0) * (math.pi / 5))
    return torch.exp(-(d[..., None] - torch.arange(32.0)).square()) * cut[..., None]


@pytest.mark.parametrize(
    ("program", "shape", "calls"),
    [
        (snake, (64,), {"sin(": 1}),
        (normal, (64,), {"erf(": 4, " / ": 0}),
        (features, (256, 16, 3), {"cos(": 1}),
    ],
)
def test_a_function_is_called_once_for_what_it_gives(
    program: Callable[..., Any], shape: tuple[int, ...], calls: dict[str, int]
) -> None:
    """A thread has one of few elements, four of many; those of a row share the row's own function."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    (part,) = planned(program, x)
    text = emitted(part)
    assert {name: text.count(name) for name in calls} == calls
    values = {next(iter(part.inputs)): x.numpy()}
    run([part], values)
    np.testing.assert_allclose(values[part.outputs[0]], program(x.double()).numpy(), rtol=2e-6, atol=2e-6)


def shares(x: torch.Tensor) -> torch.Tensor:
    y = x.exp()
    return y / y.sum((1, 2), keepdim=True)


def test_what_two_axes_are_reduced_of_is_computed_once() -> None:
    """The reduction joins its axes; the elements that it shares with others stay one."""
    x = torch.randn(8, 50, 40, generator=torch.Generator().manual_seed(0))
    (part,) = planned(shares, x)
    assert part.operators.count("exp") == 1
    values = {next(iter(part.inputs)): x.numpy()}
    run([part], values)
    np.testing.assert_allclose(values[part.outputs[0]].reshape(x.shape), shares(x.double()), rtol=1e-5)


def decibels(x: torch.Tensor) -> torch.Tensor:
    y = (x[:, 0].square() + x[:, 1].square()).log10()
    return torch.maximum(y, y.amax((1, 2), keepdim=True) - 8)


def test_parts_of_long_rows_compute_what_they_share_themselves() -> None:
    """Neither logarithms nor squares are stored: they are of fewer elements to read than to keep."""
    x = torch.randn(4, 2, 512, 200, generator=torch.Generator().manual_seed(0))
    first, second, last = planned(decibels, x)
    assert "log10" in first.operators
    assert "log10" in last.operators
    assert sum(math.prod(first.graph.tile(v).known_shape) for v in first.outputs) < 1000
    values = {next(iter(first.inputs)): x.numpy()}
    run([first, second, last], values)
    np.testing.assert_allclose(
        values[last.outputs[0]].reshape(4, 512, 200), decibels(x.double()), rtol=1e-5, atol=1e-5
    )
