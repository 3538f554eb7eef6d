"""Wide windows are reduced in steps: the same numbers, borders, dilation and special values included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.ir.build import node_attributes
from ladder.rewrite import simplify, wide_windows
from targets import get_device

H200 = get_device("cuda/sm_90a")


def steps(graph: Graph) -> list[int]:
    """Return how many elements each reduction takes."""
    found = []
    for node in graph.nodes:
        if node.operator.startswith("reduce"):
            shape = graph.tile(node.inputs[0]).shape
            found.append(int(shape[node_attributes(node)["axis"]]))
    return found


def graph_of(function: Callable[[Tensor], Any], x: Tensor) -> Graph:
    from torch.fx.experimental.proxy_tensor import make_fx

    return import_fx(make_fx(function, pre_dispatch=True)(x), [x]).graph


POOLS: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...]]] = {
    "frames": (lambda x: F.avg_pool1d(x, 101, 1, 50, count_include_pad=False), (2, 3, 150)),
    "frames, one left": (lambda x: F.avg_pool1d(x, 71, 1), (1, 2, 90)),
    "frames, prime": (lambda x: F.avg_pool1d(x, 67, 1, 3), (1, 2, 90)),
    "largest": (lambda x: F.max_pool1d(x, 97, 1, 10), (1, 2, 140)),
    "largest, dilated": (lambda x: F.max_pool1d(x, 66, 1, 0, 2), (1, 2, 160)),
    "images": (lambda x: F.avg_pool2d(x, (9, 11), 1, (4, 5)), (2, 2, 20, 24)),
    "images, strides": (lambda x: F.avg_pool2d(x, (12, 16), (2, 3), (3, 0)), (1, 2, 30, 40)),
    "images, wide": (lambda x: F.avg_pool2d(x, (3, 70), 1, (1, 35)), (1, 1, 5, 80)),
    "images, largest": (lambda x: F.max_pool2d(x, 15, 1, 7), (1, 2, 20, 20)),
    "one axis of images": (lambda x: F.avg_pool2d(x, (1, 80), 1, (0, 4)), (1, 2, 3, 90)),
}


@pytest.mark.parametrize("special", [None, np.nan, np.inf])
@pytest.mark.parametrize("name", POOLS)
def test_the_same_numbers(name: str, special: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_windows, "LEAST_SAVED", 1)
    function, shape = POOLS[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    if special is not None:
        x.view(-1)[7] = special
    graph = graph_of(function, x)
    found = simplify(graph, H200)
    assert max(steps(found)) <= wide_windows.WIDE // 2
    made = torch.from_numpy(np.asarray(evaluate(found, [x.numpy()])))
    torch.testing.assert_close(made.float(), function(x), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_few_windows_and_windows_apart_stay() -> None:
    """What saves few reads, and windows that share none, take one step."""
    for function, shape in (
        (lambda x: F.avg_pool1d(x, 101, 1), (1, 1, 150)),
        (lambda x: F.avg_pool1d(x, 128, 128), (64, 64, 8192)),
        (lambda x: F.avg_pool2d(x, 16, 16), (32, 64, 256, 256)),
    ):
        graph = graph_of(function, torch.empty(shape, device="meta"))
        assert max(steps(simplify(graph, H200))) >= 16
        names = [node.operator for node in simplify(graph, H200).nodes]
        assert names.count("map") == 1


def test_axes_of_one_element_are_left_out() -> None:
    """Windows along one axis end in channels where these are last in memory."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (2, 1, 300, 16))
    windows = g.add(
        "map", x, spec="n h+r w+s c -> n h w c r s", sizes=(("h", 1), ("w", 290), ("r", 1), ("s", 11))
    )
    inner = g.add("reduce_sum", windows, axis=5, keep=False)
    graph = g.finish(g.add("reduce_sum", inner, axis=4, keep=False))
    found = simplify(graph, H200)
    assert steps(found) == [11]
    value = np.random.default_rng(0).normal(size=(2, 1, 300, 16))
    np.testing.assert_allclose(np.asarray(evaluate(found, [value])), np.asarray(evaluate(graph, [value])))
