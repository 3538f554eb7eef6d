"""Chains over tiles of matrices, whose axes of rows are not the leading ones: one kernel, in bounds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chain_targets import run_chain
from test_gpu_partition import on_gpu, planned

from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.partition.strided_rows import strided_rows
from targets import get_device

assert on_gpu
DEVICE = get_device("cuda/sm_90a")
TARGETS = ("cuda/sm_90a", "rocm/gfx942", "rocm/gfx1100")


def quantized(x: torch.Tensor, side: int) -> tuple[torch.Tensor, ...]:
    tiles = x.view(x.shape[0] // side, side, x.shape[1] // side, side).float()
    scale = tiles.abs().amax((1, 3), keepdim=True).clamp(min=1e-4)
    return (tiles / scale).to(torch.bfloat16).view(x.shape), scale.squeeze()


def turned(x: torch.Tensor, side: int) -> tuple[torch.Tensor, ...]:
    """The same, as programs write it that turn the axes themselves."""
    count = x.shape[0] // side, x.shape[1] // side
    tiles = x.view(count[0], side, count[1], side).transpose(1, 2).reshape(*count, -1).float()
    scale = tiles.abs().amax(-1, keepdim=True).clamp(min=1e-4)
    values = (tiles / scale).to(torch.bfloat16).view(*count, side, side).transpose(1, 2).reshape(x.shape)
    return values, scale.squeeze(-1)


def normed(x: torch.Tensor, side: int) -> tuple[torch.Tensor, ...]:
    tiles = x.view(x.shape[0] // side, side, x.shape[1] // side, side)
    apart = tiles - tiles.mean((1, 3), keepdim=True)
    return ((apart / (apart.square().mean((1, 3), keepdim=True) + 1e-6).sqrt()).view(x.shape),)


def graph_of(rows: int, columns: int, down: int, across: int) -> Graph:
    """Return quotients of elements and the largest magnitude of their tile, and that."""
    g = GraphBuilder("tiles")
    x = g.input("x", "float32", (rows, columns))
    tiles = g.add("reshape", x, shape=(rows // down, down, columns // across, across))
    inner = g.add("reduce_max", g.add("abs", tiles), axis=3, keep=True)
    largest = g.add("reduce_max", inner, axis=1, keep=True)
    return g.finish(g.add("div", tiles, largest), largest)


@pytest.mark.parametrize("program", [quantized, turned, normed])
@pytest.mark.parametrize(("shape", "side"), [((4096, 3584), 128), ((2048, 2048), 16), ((1024, 4096), 32)])
def test_tiles_are_one_kernel(program: Callable[..., object], shape: tuple[int, int], side: int) -> None:
    (part,) = planned(lambda x: program(x, side), torch.zeros(shape, dtype=torch.bfloat16))
    assert part.kind == "chain"
    best = ranked(part.graph, machine_of(DEVICE))[0]
    assert best.mapping.num * best.mapping.lanes * 8 == side * side  # each element is read once


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("down", "across"), [(16, 16), (8, 24), (12, 12), (9, 10), (64, 8), (5, 13)])
def test_elements_go_where_they_belong(down: int, across: int, target: str) -> None:
    x = torch.randn(3 * down, 4 * across)
    x[0, 0], x[down, 1], x[2 * down, across + 2], x[-1, -1] = torch.nan, torch.inf, -0.0, -torch.inf
    graph = graph_of(*x.shape, down, across)
    assert strided_rows(graph) is not None
    values, largest = run_chain(graph, [x], target)
    tiles = x.view(3, down, 4, across)
    exact = tiles.abs().amax((1, 3), keepdim=True)
    torch.testing.assert_close(largest, exact, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(values, tiles / exact, rtol=2e-7, atol=0, equal_nan=True)


def test_open_numbers_of_rows_have_kernels() -> None:
    for shape in (("n", 16, 8, 16), (4, 16, "n", 16)):
        g = GraphBuilder("tiles")
        x = g.input("x", "float32", shape)
        inner = g.add("reduce_max", x, axis=3, keep=True)
        graph = g.finish(g.add("sub", x, g.add("reduce_max", inner, axis=1, keep=True)))
        assert strided_rows(graph) is not None
        assert emit_chain(graph, DEVICE, "tiles") is not None


def test_other_chains_stay_as_they_are() -> None:
    g = GraphBuilder("rows")
    x = g.input("x", "float32", (64, 256))
    assert strided_rows(g.finish(g.add("sub", x, g.add("reduce_max", x, axis=1, keep=True)))) is None
    g = GraphBuilder("pieces")  # shorter than a sector of memory, of much
    x = g.input("x", "float16", (64, 1024, 32, 2))
    inner = g.add("reduce_max", x, axis=3, keep=True)
    assert strided_rows(g.finish(g.add("sub", x, g.add("reduce_max", inner, axis=1, keep=True)))) is None
