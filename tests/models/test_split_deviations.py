"""Variances, third and fourth moments: of parts first, with what the means of these lie from the whole's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from chain_targets import run_chain
from test_gpu_partition import DEVICE, on_gpu, planned
from torch.fx.experimental.proxy_tensor import make_fx

from ladder.frontend.torch_fx import import_fx
from ladder.ir import evaluate
from ladder.ir.graph import Graph
from ladder.movement.choose import machine_of, ranked
from ladder.movement.model import predicted
from ladder.movement.split_deviations import deviations_in_parts, sums_of_deviations
from ladder.partition import partition
from ladder.rewrite import simplify

assert on_gpu


def graph_of(program: Any, *inputs: torch.Tensor) -> Graph:
    return simplify(import_fx(make_fx(program)(*inputs), [*inputs]).graph, DEVICE)


def simulated(graph: Graph, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Return the results of a graph, part by part, kernels on the simulator."""
    known = {node.name: x for node, x in zip(graph.inputs, inputs, strict=True)}
    for part in partition(graph, device=DEVICE):
        given = [known[value] for value in part.inputs]
        if part.kind == "chain":
            made = run_chain(part.graph, given, DEVICE.name)
        else:
            array = evaluate(part.graph, [value.numpy() for value in given])
            made = [torch.from_numpy(np.ascontiguousarray(array))]
        known |= dict(zip(part.outputs, made, strict=True))
    return [known[value] for value in graph.outputs]


def moments(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    d = x - x.mean(0)
    return (d * d).mean(0), (d * d * d).mean(0), (d**4).mean(0)


def of_batches(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x.mean((0, 2)), x.var((0, 2), correction=0)


def of_columns(x: torch.Tensor) -> torch.Tensor:
    return x.var(1)


CASES = {
    "third and fourth": (moments, (12, 5), 3),
    "few columns": (moments, (30, 3), 5),
    "batches": (of_batches, (6, 4, 8), 1),
    "batches in parts": (of_batches, (6, 4, 8), 2),
    "columns of rows": (of_columns, (2, 6, 3), 3),
}


@pytest.mark.parametrize("special", [None, torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", CASES)
def test_moments_in_parts_are_those_of_the_whole(name: str, special: float | None) -> None:
    program, shape, count = CASES[name]
    x = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(1)) + 20
    if special is not None:
        x[(-1,) * len(shape)] = special
    graph = graph_of(program, x)
    found = sums_of_deviations(graph)
    assert found
    graph = deviations_in_parts(graph, {one.node.name: count for one in found})
    results = program(x.double())
    results = results if isinstance(results, tuple) else (results,)
    for value, exact in zip(simulated(graph, x), results, strict=True):
        torch.testing.assert_close(
            value.reshape(exact.shape).double(), exact, rtol=2e-4, atol=2e-4, equal_nan=True
        )


def skewness(x: torch.Tensor) -> torch.Tensor:
    d = x - x.mean(0)
    return (d**3).mean(0) / d.square().mean(0) ** 1.5


def of_images(x: torch.Tensor) -> torch.Tensor:
    return x.std((1, 2))


def normed(x: torch.Tensor) -> torch.Tensor:
    variance, mean = torch.var_mean(x, (1, 2), keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-5)


READ_ONCE = [
    (of_batches, (32, 128, 3136), 19e-6),
    (skewness, (32768, 256), 18e-6),
    (of_images, (32, 224, 224, 3), 11e-6),
    (normed, (16, 56, 56, 128), 28e-6),
]


@pytest.mark.parametrize(
    ("program", "shape", "most"), READ_ONCE, ids=lambda one: getattr(one, "__name__", "")
)
def test_large_moments_are_read_once(program: Any, shape: tuple[int, ...], most: float) -> None:
    """By the model, in seconds on an H200; means first and then deviations take 1.5 to 3 times as long."""
    chains = planned(program, torch.zeros(shape))
    machine = machine_of(DEVICE)
    assert sum(predicted(ranked(part.graph, machine)[0], machine) for part in chains) <= most


def test_what_is_infinite_counts_as_it_does_in_the_mean() -> None:
    """What is subtracted is made of means by sums and scales alone: what bounds them is no such mean."""

    def bounded(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0).clamp(max=1)).square().mean(0)

    def centred(x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0) * 0.5).square().mean(0)

    x = torch.randn(8, 3)
    assert not sums_of_deviations(graph_of(bounded, x))
    assert len(sums_of_deviations(graph_of(centred, x))) == 1
