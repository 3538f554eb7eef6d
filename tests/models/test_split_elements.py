"""What optimizers store and norm: moments and steps are stored, and summed in parts, by one kernel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_gpu_partition import DEVICE, on_gpu, planned
from test_split_deviations import graph_of, simulated
from test_turned_reductions import small

from ladder.movement import split
from ladder.movement.split import split_reductions

assert on_gpu
assert small


def lamb(w: torch.Tensor, g: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> tuple[torch.Tensor, ...]:
    mean, var = mean.lerp(g, 0.1), 0.999 * var + 0.001 * g * g
    step = mean / (var.sqrt() + 1e-6) + 0.01 * w
    return w - 1e-3 * (w.norm() / step.norm().clamp(min=1e-6)).clamp(max=10) * step, mean, var


def of_rows(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Sums of few long rows of what is stored."""
    shown = x * y + z
    return shown, shown / shown.abs().sum(-1, keepdim=True)


def arguments(shape: tuple[int, ...]) -> tuple[torch.Tensor, ...]:
    g = torch.Generator().manual_seed(3)
    *first, last = (torch.randn(shape, generator=g) for _ in range(4))
    return (*first, last.abs())


def test_what_is_stored_is_summed_where_it_is_made() -> None:
    """Five kernels if each sum reads what another kernel stored."""
    parts = planned(lamb, *arguments((2048, 1024)))
    assert len(parts) == 3
    assert len(parts[0].outputs) == 5


def critics(*x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Losses of arguments that have nothing in common but their length."""
    return (x[0] - x[1]).square().mean(), x[2].mean(), (x[3] - 6).abs().mean()


def test_sums_of_as_many_elements_are_one_launch() -> None:
    parts = planned(critics, *(torch.zeros(1 << 19) for _ in range(4)))
    assert len(parts) == 2
    assert len(parts[0].outputs) == 3
    assert len(planned(critics, *(torch.zeros(1 << 23) for _ in range(4)))) == 6


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("special", [None, torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("program", "shape", "stored"), [(lamb, (48, 40), 2), (lamb, (12, 33), 2), (of_rows, (3, 96), 1)]
)
def test_elements_of_parts_are_right(
    program: Any, shape: tuple[int, ...], stored: int, special: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(split, "HELD_BITS", 0)
    given = arguments(shape)
    if special is not None:
        given[1][0, 1] = special
    graph = split_reductions(graph_of(program, *given), DEVICE)
    assert [graph.producer(value).operator == "reshape" for value in graph.outputs].count(True) == stored
    for found, exact in zip(simulated(graph, *given), program(*(x.double() for x in given)), strict=True):
        torch.testing.assert_close(
            found.reshape(exact.shape).double(), exact, rtol=1e-4, atol=1e-5, equal_nan=True
        )
