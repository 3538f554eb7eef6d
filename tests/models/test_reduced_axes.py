"""Reductions of several axes: joined where numbers of one are repeated, rows of groups read whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_gpu_partition import DEVICE, on_gpu, planned
from test_split_deviations import graph_of, simulated

from ladder.movement.choose import machine_of, ranked
from ladder.movement.model import predicted
from ladder.movement.split import split_reductions
from ladder.rewrite import axis_rules

assert on_gpu


def demodulated(w: torch.Tensor, s: torch.Tensor) -> torch.Tensor:
    """As StyleGAN2 scales the weights of a convolution."""
    w = w[None] * s[:, None, :, None, None]
    return w * (w.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()


def of_groups(x: torch.Tensor) -> torch.Tensor:
    """A group norm, channels last."""
    n, rows, channels = x.shape
    y = x.view(n, rows, 4, channels // 4)
    mean, variance = y.mean((1, 3), keepdim=True), y.var((1, 3), keepdim=True, unbiased=False)
    return F.silu((y - mean) * torch.rsqrt(variance + 1e-5))


def centred(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """As VICReg centres a batch, and takes the deviations of what it has centred."""
    x = x - x.mean(0)
    return x, (x.var(0) + 1e-4).sqrt()


CASES: dict[Any, tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], float]] = {
    demodulated: (((512, 512, 3, 3), (16, 512)), ((3, 5, 3, 3), (2, 5)), 60e-6),
    of_groups: (((8, 4096, 256),), ((2, 9, 24),), 36e-6),
    centred: (((4096, 2048),), ((9, 6),), 34e-6),
}
"""Program -> shapes of a model, small ones, and the most predicted for an H200; 279, 43, 45 µs before."""


@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_large_inputs_are_read_as_they_lie(program: Any) -> None:
    shapes, _, most = CASES[program]
    machine = machine_of(DEVICE)
    parts = planned(program, *(torch.zeros(shape) for shape in shapes))
    assert sum(predicted(ranked(part.graph, machine)[0], machine) for part in parts) <= most


@pytest.mark.parametrize("special", [None, torch.nan, torch.inf])
@pytest.mark.parametrize("program", CASES, ids=lambda program: program.__name__)
def test_axes_are_reduced_right(program: Any, special: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(axis_rules, "MUCH_REDUCED", 1)
    generator = torch.Generator().manual_seed(4)
    inputs = [torch.randn(shape, generator=generator) + 2 for shape in CASES[program][1]]
    if special is not None:
        inputs[0][(1,) * inputs[0].ndim] = special
    exact = program(*(x.double() for x in inputs))
    graph = split_reductions(graph_of(program, *inputs), DEVICE)
    results = exact if isinstance(exact, tuple) else (exact,)
    for found, wanted in zip(simulated(graph, *inputs), results, strict=True):
        torch.testing.assert_close(
            found.reshape(wanted.shape).double(), wanted, rtol=1e-4, atol=1e-5, equal_nan=True
        )


def test_deviations_of_other_means_stay() -> None:
    """Along another axis, or of a number that is no mean; and deviations that are not squared and summed."""

    def other_axis(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(0)
        return (x - x.mean(1, keepdim=True)).square().sum(0)

    def other_sum(x: torch.Tensor) -> torch.Tensor:
        x = x - x.mean(0)
        return (x - x.mean(0)).square().sum(1)

    def other_number(x: torch.Tensor) -> torch.Tensor:
        x = x - x.sum(0) / 7
        return (x - x.sum(0) / 7).square().sum(0)

    def given(x: torch.Tensor) -> torch.Tensor:
        """All NaN where one is infinite, deviations are minus infinity elsewhere."""
        return centred(centred(x)[0])[0]

    x = torch.randn(9, 6)
    for program, count in ((other_axis, 2), (other_sum, 2), (other_number, 2), (given, 2), (centred, 1)):
        nodes = graph_of(program, x).nodes
        assert sum(n.operator == "sub" and bool(n.tile.shape) for n in nodes) == count, program.__name__


def centres(x: torch.Tensor) -> torch.Tensor:
    return x.mean(1)


def covariance(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of two clouds of points, as Kabsch's algorithm turns one onto the other."""
    x, y = x - x.mean(1, keepdim=True), y - y.mean(1, keepdim=True)
    return (x[:, :, :, None] * y[:, :, None]).sum(1)


@pytest.mark.parametrize(
    ("program", "shape", "count", "most"),
    [(centres, (256, 4096, 3), 1, 8e-6), (covariance, (2048, 256, 3), 2, 40e-6)],
)
def test_points_are_read_in_vectors(program: Any, shape: tuple[int, ...], count: int, most: float) -> None:
    """Sums of three columns are of vectors of several points first; 17 and 57 µs if not, by the model."""
    parts = planned(program, *(torch.zeros(shape) for _ in range(count)))
    machine = machine_of(DEVICE)
    assert sum(predicted(ranked(part.graph, machine)[0], machine) for part in parts) <= most
    small = [torch.randn(3, 17, 3) for _ in range(count)]
    exact = program(*(x.double() for x in small))
    (found,) = simulated(split_reductions(graph_of(program, *small), DEVICE), *small)
    torch.testing.assert_close(found.reshape(exact.shape).double(), exact, rtol=1e-4, atol=1e-5)
