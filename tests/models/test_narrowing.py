"""Positions of 64 bits that GPU kernels work out in 32: equal numbers, 64 bits where 32 do not hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_gpu_chains import simulated

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.lower.chain.narrowing import narrowed
from ladder.lower.chain.scatter import Chain
from targets import get_device

TARGETS = ("cuda/sm_90a", "rocm/gfx942")


def distances(g: GraphBuilder, rows: int, columns: int) -> str:
    at = g.add("iota", extent=columns, rank=2, axis=1, type="int64")
    return g.add("sub", at, g.add("iota", extent=rows, rank=2, axis=0, type="int64"))


def biased() -> Graph:
    """Return scores with a bias by distance, causal, and their shares."""
    g = GraphBuilder("chain")
    x, zero = g.input("x", "float32", (24, 40)), g.add("constant", value=0.0, type="int64")
    apart = distances(g, 24, 40)
    bias = g.add("convert", g.add("minimum", apart, zero), type="float32")
    number = g.add("constant", value=-1e9, type="float32")
    kept = g.add("select", g.add("less", zero, apart), number, g.add("add", x, bias))
    powers = g.add("exp", g.add("sub", kept, g.add("reduce_max", kept, axis=1)))
    return g.finish(g.add("div", powers, g.add("reduce_sum", powers, axis=1)))


def stored() -> Graph:
    """Return numbers of 64 bits: positions, what 32 bits do not hold, and what is added to an input."""
    g = GraphBuilder("chain")
    x, codes = g.input("x", "int64", (9, 20)), g.input("codes", "int32", (9, 20))
    apart = g.add("abs", distances(g, 9, 20))
    large = g.add("mul", apart, g.add("constant", value=float(1 << 40), type="int64"))
    own = g.add("convert", codes, type="int64")
    return g.finish(apart, large, g.add("add", x, apart), g.add("add", own, own), g.add("neg", own))


def chosen() -> Graph:
    """Return rows of a table by clamped positions."""
    g = GraphBuilder("chain")
    table = g.input("table", "float32", (7, 32))
    at = g.add("iota", extent=20, rank=1, axis=0, type="int64")
    least = g.add("minimum", at, g.add("constant", value=6.0, type="int64"))
    return g.finish(g.add("gather", table, least, axis=0))


def counted() -> Graph:
    """Return the last place of a positive number up to each, how many there are, a sum beyond 32 bits."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", (6, 96))
    above = g.add("less", g.add("constant", value=0.0, type="float32"), x)
    at = g.add("iota", extent=96, rank=2, axis=1, type="int64")
    last = g.add("scan_max", g.add("select", above, at, g.add("neg", at)), axis=1)
    count = g.add("reduce_sum", g.add("convert", above, type="int64"), axis=1)
    large = g.add("mul", last, g.add("constant", value=float(1 << 24), type="int64"))
    return g.finish(last, count, g.add("reduce_sum", large, axis=1))


def inputs_of(graph: Graph) -> list[Any]:
    rng = np.random.default_rng(0)
    kinds = {"int64": (-(2**45), 2**45, np.int64), "int32": (-(2**31), 2**31, np.int32)}
    given = []
    for node in graph.inputs:
        low, high, dtype = kinds.get(node.tile.ttype.name, (-9, 9, np.float32))
        given.append(rng.integers(low, high, node.tile.known_shape).astype(dtype))
        given[-1].flat[:2] = high - 1, low
    return given


@pytest.mark.parametrize(
    ("make", "target"),
    [*((make, target) for make in (biased, stored, counted) for target in TARGETS), (chosen, TARGETS[0])],
)
def test_the_same_numbers(make: Any, target: str) -> None:
    graph = make()
    given = inputs_of(graph)
    exact = evaluate(graph, given)
    exact = list(exact) if isinstance(exact, tuple) else [exact]
    types = {"int64": np.int64, "float32": np.float32}
    tiles = [graph.tile(value) for value in graph.outputs]
    made = [np.zeros(tile.known_shape, types[tile.ttype.name]) for tile in tiles]
    function = emit_chain(graph, get_device(target), "chain")
    places = tuple(range(len(given), len(given) + len(made)))
    result = simulated(function, target, [*given, *made], places)
    assert not result.findings, result.report()
    for found, wanted in zip(made, exact, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6 if found.dtype == np.float32 else 0)


def test_positions_have_no_64_bits() -> None:
    """But for results, inputs, and what 32 bits do not hold."""
    assert not any(node.tile.ttype.name == "int64" for node in narrowed(Chain.of(biased())).graph.nodes)
    wide = [node for node in narrowed(Chain.of(stored())).graph.nodes if node.tile.ttype.name == "int64"]
    assert {node.operator for node in wide} == {"input", "constant", "convert", "mul", "add", "neg"}
    gather = narrowed(Chain.of(chosen())).graph
    assert not any(node.tile.ttype.name == "int64" for node in gather.nodes)
