"""Reductions over few positions of windows are computed of moved copies on CPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import ladder
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.rewrite import simplify
from ladder.rewrite.short_windows import with_moved_copies
from targets import get_device

SPECS: dict[str, tuple[str, tuple[int, ...], dict[str, int], bool]] = {
    "rows and columns": (
        "n c 2*h+r 3*w+s -> n c h w r s",
        (2, 3, 9, 11),
        {"h": 4, "w": 3, "r": 3, "s": 2},
        False,
    ),
    "gaps": ("n c h+2*r w+3*s -> n c h w r s", (1, 2, 9, 11), {"h": 5, "w": 5, "r": 3, "s": 3}, False),
    "a border of zeros": (
        "n c 2*h+r-1 w+s-2 -> n c h w r s",
        (1, 2, 5, 6),
        {"h": 3, "w": 8, "r": 3, "s": 3},
        True,
    ),
    "columns only": ("n c 2*w+s -> n c w s", (2, 3, 9), {"w": 4, "s": 3}, False),
    "not from the first": ("c w+s+2 -> c w s", (3, 9), {"w": 4, "s": 3}, False),
    "fewer rows": ("h w+s -> h w s", (9, 9), {"h": 4, "w": 7, "s": 3}, False),
}


def windows(name: str, operator: str, dtype: str = "float32") -> Graph:
    spec, shape, sizes, pad = SPECS[name]
    g = GraphBuilder("pool")
    value = g.add("map", g.input("x", dtype, shape), spec=spec, sizes=tuple(sizes.items()), pad=pad)
    for _ in [size for size in sizes if size in "rs"]:
        value = g.add(operator, value, axis=len(g.tile(value).shape) - 1, keep=False)
    return g.finish(value)


def has_windows(graph: Graph) -> bool:
    return any(node.operator == "map" for node in graph.nodes)


@pytest.mark.parametrize("operator", ["reduce_max", "reduce_sum"])
@pytest.mark.parametrize("name", SPECS)
def test_values_stay(name: str, operator: str) -> None:
    """NaN, infinities and zeros of both signs too."""
    graph = windows(name, operator)
    found = with_moved_copies(graph)
    assert has_windows(graph)
    assert not has_windows(found)
    x = np.random.default_rng(0).integers(-9, 9, SPECS[name][1]).astype(np.float32)
    for special in (0.0, -0.0, np.inf, -np.inf, np.nan):
        for at in range(0, x.size, 7):
            x.reshape(-1)[at] = special
        one, other = evaluate(graph, {"x": x}), evaluate(found, {"x": x})
        np.testing.assert_array_equal(one, other)
    zeros = np.full_like(x, -0.0)
    one, other = evaluate(graph, {"x": zeros}), evaluate(found, {"x": zeros})
    assert np.array_equal(np.signbit(one), np.signbit(other))


def test_on_cpus_alone() -> None:
    graph = windows("rows and columns", "reduce_max")
    assert not has_windows(simplify(graph, get_device("cpu")))
    assert has_windows(simplify(graph, get_device("cuda/sm_90a")))


@pytest.mark.parametrize(
    ("spec", "shape", "sizes"),
    [
        ("n h+r w+s c -> n h w c r s", (1, 9, 9, 8), {"h": 7, "w": 7, "r": 3, "s": 3}),  # vectors of channels
        ("n c h+r w+s -> n c h w r s", (1, 2, 12, 12), {"h": 7, "w": 7, "r": 6, "s": 6}),  # long
        ("n c h+r w+s -> n c h w r s", (1, 2, 1, 9), {"h": 1, "w": 9, "r": 1, "s": 1}),  # of one element
    ],
)
def test_others_stay(spec: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
    g = GraphBuilder("pool")
    value = g.add("map", g.input("x", "float32", shape), spec=spec, sizes=tuple(sizes.items()), pad=False)
    inner = g.add("reduce_max", value, axis=len(g.tile(value).shape) - 1, keep=False)
    graph = g.finish(g.add("reduce_max", inner, axis=len(g.tile(inner).shape) - 1, keep=False))
    assert has_windows(with_moved_copies(graph))


def test_windows_that_are_read_again_stay() -> None:
    g = GraphBuilder("pool")
    x = g.input("x", "float32", (3, 9))
    value = g.add("map", x, spec="c w+s -> c w s", sizes=(("w", 7), ("s", 3)), pad=False)
    most = g.add("reduce_max", value, axis=2, keep=True)
    assert has_windows(with_moved_copies(g.finish(g.add("sub", value, most))))
    total = g.add("reduce_sum", value, axis=2, keep=False)
    assert has_windows(with_moved_copies(g.finish(total, value)))


def test_windows_of_what_is_computed_stay() -> None:
    """Each copy would compute it: those of a pool of pools, windows of windows."""
    g = GraphBuilder("pools")
    value, spec = g.input("x", "float32", (3, 40)), "c w+s -> c w s"
    for width in (36, 32):
        value = g.add("pad", value, low=(0, 0), high=(0, 0), value=0)
        value = g.add("map", value, spec=spec, sizes=(("w", width), ("s", 5)), pad=False)
        value = g.add("reduce_max", value, axis=2, keep=False)
    found = with_moved_copies(g.finish(value))
    assert sum(node.operator == "map" for node in found.nodes) == 1
    x = g.input("y", "float32", (3, 9))
    value = g.add("map", g.add("exp", x), spec=spec, sizes=(("w", 7), ("s", 3)), pad=False)
    assert has_windows(with_moved_copies(g.finish(g.add("reduce_max", value, axis=2, keep=False))))


POOLS: dict[str, Any] = {
    "largest": lambda x: F.max_pool2d(x, 3, 2, 1),
    "largest of a gap": lambda x: F.max_pool2d(x, (2, 3), 1, 0, 2),
    "mean": lambda x: F.avg_pool2d(x, 3, 1, 1),
    "mean of steps": lambda x: F.avg_pool2d(x, (3, 2), 2),
    "before others": lambda x: torch.relu(F.max_pool2d(x, 2) + 1) * 2,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("name", POOLS)
def test_pools(name: str, dtype: torch.dtype) -> None:
    fast, pool = ladder.compile(POOLS[name]), POOLS[name]
    for shape in ((2, 3, 9, 12), (1, 5, 17, 20), (1, 5, 18, 20)):  # sizes become open
        x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[0, 1, 3, 4], x[0, 2, 5, 5] = torch.nan, torch.inf
        with torch.no_grad():
            torch.testing.assert_close(fast(x), pool(x), equal_nan=True)
    assert "map" not in fast.plan()


def test_pools_of_one_program_read_their_own_images() -> None:
    """Whose values have other names in the new graph."""

    def pools(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x * 0 + 1, 3, 2, 1)
        return one, other, F.avg_pool2d(x[:, :, 10:], 2), F.avg_pool2d(x[:, :, :14], 2)

    x = torch.randn(1, 1, 24, 24)
    with torch.no_grad():
        for found, expected in zip(ladder.compile(pools)(x), pools(x), strict=True):
            torch.testing.assert_close(found, expected)
