"""Operators of a kernel graph that stand alone become block graphs, and those kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.outline import outlined
from ladder.runtime.fused import Fused, Lowering
from ladder.simulate.fused import simulate_fused
from targets import get_device, host_cpu
from tile_types.errors import ScheduleError


def normalised(transposed: bool = False) -> Graph:
    """A product, and its rows scaled by their root mean squares and by a column."""
    g = GraphBuilder("normalised")
    x = g.input("X", "float16", (2, 8, 128))
    w = g.input("W", "float16", (2, 64, 128) if transposed else (2, 128, 64))
    s = g.input("S", "float16", (2, 8, 1))
    product = g.add("matmul", x, w, type="float32", transpose_b=transposed)
    y = g.add("convert", g.add("convert", product, type="float16"), type="float32")
    mean = g.add(
        "mul",
        g.add("reduce_sum", g.add("square", y), axis=2),
        g.add("constant", value=1 / 64, type="float32"),
    )
    scaled = g.add("mul", y, g.add("convert", s, type="float32"))
    return g.finish(g.add("convert", g.add("div", scaled, g.add("sqrt", mean)), type="float16"))


def drawn(graph: Graph) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(node.tile.known_shape, generator=generator).half() for node in graph.inputs]


@pytest.mark.parametrize("transposed", [False, True])
def test_operators_alone_mean_the_same(transposed: bool) -> None:
    graph = normalised(transposed)
    blocks = outlined(graph)
    assert [node.operator for node in blocks.nodes if node.operator != "input"] == ["block", "block"]
    assert outlined(blocks) is blocks
    inputs = [x.numpy() for x in drawn(graph)]
    assert np.allclose(evaluate(blocks, inputs), evaluate(graph, inputs), rtol=2e-3, atol=2e-3)


def test_operators_alone_run() -> None:
    graph = normalised()
    inputs = drawn(graph)
    exact = evaluate(graph, [x.numpy() for x in inputs]).astype(np.float64)
    lowering = Lowering(outlined(graph), (BlockSchedule(copies="tensor"), BlockSchedule()))
    result = simulate_fused(lowering, get_device("cuda/sm_90a"), inputs)
    assert not result.findings
    here = Fused.build(
        Lowering(lowering.graph, (BlockSchedule(), BlockSchedule())), get_device(host_cpu().name)
    )
    for found in (result.outputs[0], here(*inputs).numpy()):
        assert np.linalg.norm(found - exact) <= 2e-3 * np.linalg.norm(exact)


def test_what_does_not_stand_alone_is_named() -> None:
    g = GraphBuilder("columns")
    x = g.input("X", "float16", (64, 16))
    total = g.add("reduce_sum", g.add("convert", x, type="float32"), axis=0)
    with pytest.raises(ScheduleError, match=r"%reduce_sum: reduce_sum is not lowered as a kernel of its own"):
        outlined(g.finish(g.add("convert", total, type="float16")))
    g = GraphBuilder("narrow")
    product = g.add(
        "matmul", g.input("X", "float16", (4, 12)), g.input("W", "float16", (12, 8)), type="float32"
    )
    with pytest.raises(ScheduleError, match=r"none of \(64, 32, 16\) divides 12"):
        outlined(g.finish(g.add("convert", product, type="float16")))
