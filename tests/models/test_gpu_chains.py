"""Chains for NVIDIA GPUs, executed by the simulator: right, in bounds, without races."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from benchmarks.chain_programs import PROGRAMS
from ladder.frontend.torch_fx import import_fx
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.movement.choose import ranked
from ladder.movement.mapping import Mapping
from ladder.partition import simplify
from ladder.simulate import simulate_launch
from targets import get_device

NUMPY = {"float32": np.float32, "float16": np.float16}


def softmax(width: int, ttype: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", ttype, (3, width)), type="float32")
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=1)))
    ratio = g.add("div", powers, g.add("reduce_sum", powers, axis=1))
    return g.finish(g.add("convert", ratio, type=ttype))


def residual_norm(width: int, ttype: str) -> Graph:
    """Return two results of one row: the sum, and its root mean square norm."""
    g = GraphBuilder("chain")
    x, y, w = (
        g.input("x", ttype, (2, 5, width)),
        g.input("y", ttype, (10, width)),
        g.input("w", ttype, (width,)),
    )
    total = g.add("add", x, g.add("reshape", y, shape=(2, 5, width)))
    wide = g.add("convert", total, type="float32")
    mean = g.add(
        "mul",
        g.add("reduce_sum", g.add("square", wide), axis=2),
        g.add("constant", value=1 / width, type="float32"),
    )
    normed = g.add("convert", g.add("mul", wide, g.add("rsqrt", mean)), type=ttype)
    return g.finish(total, g.add("mul", w, normed))


def rotary(width: int, ttype: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("transpose", g.input("x", ttype, (2, 3, 4, width)), permutation=(0, 2, 1, 3))
    cos, sin, half = g.input("cos", ttype, (3, width)), g.input("sin", ttype, (3, width)), width // 2
    low = g.add("slice", x, begin=(0, 0, 0, 0), shape=(2, 4, 3, half))
    high = g.add("slice", x, begin=(0, 0, 0, half), shape=(2, 4, 3, half))
    turned = g.add("concat", g.add("neg", high), low, axis=3)
    return g.finish(g.add("add", g.add("mul", x, cos), g.add("mul", turned, sin)))


def shuffle(width: int, ttype: str) -> Graph:
    """Return concat, shuffle of channels and split, with a join across rows."""
    g = GraphBuilder("chain")
    a, b = g.input("a", ttype, (2, 4, 3, width)), g.input("b", ttype, (2, 4, 3, width))
    joined = g.add("reshape", g.add("concat", a, g.add("relu", b), axis=1), shape=(2, 2, 4, 3, width))
    mixed = g.add("reshape", g.add("transpose", joined, permutation=(0, 2, 1, 3, 4)), shape=(2, 8, 3, width))
    return g.finish(g.add("slice", g.add("relu", mixed), begin=(0, 4, 0, 0), shape=(2, 4, 3, width)))


def pool(width: int, ttype: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("pad", g.input("x", ttype, (1, 2, 6, width)), low=(0, 0, 1, 1), high=(0, 0, 1, 1), value=-100.0)
    sizes = (("h", 3), ("w", width // 2), ("r", 3), ("s", 3))
    windows = g.add("map", x, spec="n c 2*h+r 2*w+s -> n c h w r s", sizes=sizes)
    return g.finish(g.add("reduce_max", g.add("reduce_max", windows, axis=5, keep=False), axis=4, keep=False))


CASES = {
    f"{make.__name__} {width} {ttype}": (make, width, ttype)
    for make, widths in (
        (softmax, (7, 64, 1000)),
        (residual_norm, (48, 640)),
        (rotary, (16,)),
        (shuffle, (8, 5)),
        (pool, (8,)),
    )
    for width in widths
    for ttype in NUMPY
}


@pytest.mark.parametrize("case", CASES)
def test_simulated(case: str) -> None:
    make, width, ttype = CASES[case]
    check(make(width, ttype), NUMPY[ttype])


def check(graph: Graph, dtype: type, mapping: Mapping | None = None, device: str = "cuda/sm_90a") -> None:
    """Simulate a chain on random inputs and compare with the reference."""
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(-2, 2, node.tile.shape).astype(dtype) for node in graph.inputs]
    outputs = [np.full(graph.tile(value).shape, np.nan, dtype) for value in graph.outputs]
    function = emit_chain(graph, get_device(device), "chain", mapping)
    places = tuple(range(len(inputs), len(inputs) + len(outputs)))
    result = simulate_launch(function, [*inputs, *outputs], outputs=places)
    assert not result.findings, result.report()
    expected = evaluate(graph, inputs)
    for got, exact in zip(outputs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        error = np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error < (1e-6 if dtype is np.float32 else 1e-3)


@pytest.mark.parametrize("name", PROGRAMS)
def test_measured_programs(name: str) -> None:
    """What `benchmarks.chains` measures is right in every mapping that it may take."""
    program = PROGRAMS[name]
    arguments = [torch.zeros(shape, dtype=torch.float16) for shape in program.shapes["small"]]
    graph = simplify(import_fx(make_fx(program.function)(*arguments), arguments).graph)
    for moves in ranked(graph):
        check(graph, np.float16, moves.mapping)


@pytest.mark.parametrize("case", [softmax, residual_norm, rotary])
def test_ampere(case: Callable[[int, str], Graph]) -> None:
    check(case(64, "float16"), np.float16, device="cuda/sm_80")


@pytest.mark.parametrize("ttype", NUMPY)
def test_tiles_at_edges(ttype: str) -> None:
    """Tiles that the result does not fill, batches beside them, and rows of 4 elements per plane."""
    g = GraphBuilder("chain")
    x = g.input("x", ttype, (3, 72, 4, 20))
    y = g.add("mul", g.add("transpose", x, permutation=(0, 2, 3, 1)), g.input("w", ttype, (72,)))
    for moves in ranked(graph := g.finish(y)):
        if moves.mapping.tile[0]:
            check(graph, NUMPY[ttype], moves.mapping)
            break
    else:
        pytest.fail("no mapping with tiles")
