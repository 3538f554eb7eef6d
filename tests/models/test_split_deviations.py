"""Variances and covariances of few long columns or rows: parts are read once for means and products."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_column_reductions import run_parts
from test_gpu_partition import on_gpu  # noqa: F401
from test_remainders import H200

from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph
from ladder.partition import partition
from ladder.partition.subgraphs import Subgraph
from ladder.runtime.model.prepared import simplified


def correlated(a: Any, b: Any) -> Any:
    a, b = a - a.mean(0), b - b.mean(0)
    return (a * b).sum(0) / (a.square().sum(0) * b.square().sum(0)).sqrt()


def normed(x: Any) -> Any:
    return (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def skewed(x: Any) -> Any:
    x = x - x.mean(0)
    return (x**3).mean(0) / x.square().mean(0) ** 1.5


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], int]] = {
    "variance": (lambda x: x.var(1), ((3, 4096, 8),), 1),
    "of rows": (lambda x: x.var(-1), ((3, 70000),), 1),
    "correlated": (correlated, ((16384, 64), (16384, 64)), 1),
    "normed": (normed, ((8192, 16),), 2),
    "skewed": (skewed, ((16384, 64),), 2),
}
"""Program -> itself, shapes of what it takes, and kernels that read all elements."""


def planned(program: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Graph, list[Subgraph]]:
    module = torch.fx.experimental.proxy_tensor.make_fx(program, pre_dispatch=True)(*inputs)
    graph = simplified(import_fx(module, list(inputs)), H200).graph
    return graph, partition(graph, device=H200, side_by_side=True)


@pytest.mark.parametrize("special", [False, True], ids=["numbers", "special"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_parts_are_read_once(name: str, special: bool) -> None:
    program, shapes, kernels = PROGRAMS[name]
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(shape, generator=generator) + 30 * at for at, shape in enumerate(shapes)]
    if special:
        x = inputs[0].flatten(1)
        x[0, 1], x[-1, 2], x[1, 3] = float("inf"), float("nan"), 3e38
    graph, parts = planned(program, *inputs)
    large = {node.name for node in graph.inputs}
    assert sum(bool(large & set(part.inputs)) for part in parts) == kernels
    wanted = program(*(each.double() for each in inputs))
    (found,) = run_parts(graph, parts, inputs)
    if special:
        wanted = program(*inputs).double()
    torch.testing.assert_close(found.reshape(wanted.shape), wanted, rtol=2e-5, atol=2e-5, equal_nan=True)


def test_sums_of_one_launch_stay_whole() -> None:
    """Columns that fill the device are read once already."""
    _, parts = planned(lambda x: x.var(1), torch.empty(64, 512, 512))
    assert [part.kind for part in parts if part.kind != "view"] == ["chain"]
