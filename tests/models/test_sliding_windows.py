"""Pools of images as they are written, simulated: neighbouring windows of a thread share what they read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from test_gpu_chains import simulated
from torch.nn import functional as F

from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.lower.chain.windows import window_width
from ladder.movement.mapping import VECTORS
from targets import get_device

TYPES: dict[str, Any] = {"float16": np.float16, "float32": np.float32}


def pool(shape: tuple[int, ...], size: int, step: int, border: int, ttype: str, operator: str) -> Graph:
    """Return sums or maxima of windows of an image ``[n, c, h, w]``, next to each other in its rows."""
    g = GraphBuilder("chain")
    x = g.input("x", ttype, shape)
    if border:
        empty = -np.inf if operator == "reduce_max" else 0.0
        x = g.add("pad", x, low=(0, 0, border, border), high=(0, 0, border, border), value=float(empty))
    high, wide = ((extent + 2 * border - size) // step + 1 for extent in shape[2:])
    sizes = (("h", high), ("r", size), ("w", wide), ("s", size))
    value = g.add("map", x, spec=f"n c {step}*h+1*r {step}*w+1*s -> n c h w r s", sizes=sizes)
    if ttype == "float16" and operator == "reduce_sum":
        value = g.add("convert", value, type="float32")
    for axis in (5, 4):
        value = g.add(operator, value, axis=axis, keep=False)
    return g.finish(value)


def exact(x: Any, size: int, step: int, border: int, operator: str) -> Any:
    image = torch.from_numpy(x.astype(np.float32))
    if operator == "reduce_max":
        return F.max_pool2d(image, size, step, border).numpy()
    return F.avg_pool2d(image, size, step, border).numpy() * size * size


CASES = [
    ((2, 64, 33, 113), 3, 2, 1),
    ((1, 700, 9, 56), 3, 1, 1),
    ((1, 500, 11, 40), 5, 1, 2),
    ((3, 150, 10, 61), 2, 2, 0),
    ((1, 2, 5, 7), 3, 2, 1),
]


@pytest.mark.parametrize("operator", ["reduce_max", "reduce_sum"])
@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
@pytest.mark.parametrize("case", CASES)
def test_pools(case: tuple[Any, ...], target: str, operator: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, size, step, border = case
    monkeypatch.setattr("ladder.lower.chain.windows.BUSY_ROWS", 100)
    for ttype in TYPES:
        graph = pool(shape, size, step, border, ttype, operator)
        x = np.random.default_rng(0).normal(size=shape).astype(TYPES[ttype])
        x[0, 1, 3, 4], x[0, 0, 0, 0], x[0, 1, 4, 6] = np.nan, -np.inf, np.inf
        (tile,) = (graph.tile(value) for value in graph.outputs)
        for mapping in (VECTORS[0], VECTORS[2]):
            y = np.full(tile.known_shape, 77).astype(TYPES[tile.ttype.name])
            function = emit_chain(graph, get_device(target), "chain", mapping)
            result = simulated(function, target, [x, y], (1,))
            assert not result.findings, result.report()
            assert np.allclose(
                y, exact(x, size, step, border, operator), rtol=1e-5, atol=1e-5, equal_nan=True
            )


def test_threads_take_windows_side_by_side() -> None:
    """As many as divide a row, and as the registers of what they unroll allow."""
    widths = [
        (((32, 64, 113, 113), 3, 2, 1), 3),
        (((32, 64, 112, 112), 3, 2, 1), 4),
        (((16, 96, 56, 56), 5, 1, 2), 2),
        (((1, 2, 5, 8), 3, 1, 1), 1),  # few
    ]
    for case, width in widths:
        graph = pool(*case, "float16", "reduce_max")
        assert window_width(graph, graph.outputs[0]) == width
