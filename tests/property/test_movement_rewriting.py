"""Random chains as movement graphs: rewriting keeps what they compute, stays legal, and never moves more."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.movement.graph import MovementGraph
from ladder.movement.instantiate import instantiate
from ladder.movement.mapping import Mapping
from ladder.movement.model import traffic
from ladder.movement.rewrite import rewrite
from tests.movement_values import run, verify

UNARY = ("neg", "exp", "silu", "relu", "square", "sigmoid", "gelu", "tanh")
BINARY = ("add", "sub", "mul", "maximum")
MAPPINGS = (Mapping(), Mapping(4, 2, 32), Mapping(32, 1, 4), Mapping(64, 1), Mapping(tile=(64, 64)))


@st.composite
def chains(draw: st.DrawFn) -> Graph:
    """Draw a chain over ``[2, 4, 6, 8]``: element-wise operators, reductions, views and joins."""
    g = GraphBuilder("chain")
    shape = (2, 4, 6, 8)
    values = [g.input("x", "float32", shape), g.input("y", "float32", shape)]
    row = g.input("w", "float32", (8,))
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(("unary", "binary", "row", "normal", "view", "join", "softmax")))
        a, b = draw(st.sampled_from(values)), draw(st.sampled_from(values))
        values.append(_grown(draw, g, kind, a, b, row))
    outputs = dict.fromkeys([values[-1], draw(st.sampled_from(values[2:]))])
    return g.finish(*outputs)


def _grown(draw: st.DrawFn, g: GraphBuilder, kind: str, a: str, b: str, row: str) -> str:
    shape = g.tile(a).known_shape
    if kind == "unary":
        return g.add(
            draw(st.sampled_from(UNARY)), g.add("minimum", a, g.add("constant", value=3.0, type="float32"))
        )
    if kind == "binary":
        return g.add(draw(st.sampled_from(BINARY)), a, b)
    if kind == "row":
        return g.add("mul", a, row)
    if kind == "normal":
        return g.add("sub", a, g.add("reduce_max", a, axis=3))
    if kind == "softmax":
        powers = g.add("exp", g.add("sub", a, g.add("reduce_max", a, axis=3)))
        return g.add("div", powers, g.add("reduce_sum", powers, axis=3))
    if kind == "join":
        half = [g.add("slice", v, begin=(0, 0, 0, 0), shape=(2, 4, 6, 4)) for v in (a, b)]
        return g.add("concat", *half, axis=3)
    order = draw(st.sampled_from(((2, 0, 1, 3), (0, 1, 3, 2), (3, 1, 2, 0))))
    turned = g.add("transpose", a, permutation=order)
    return g.add("reshape", turned, shape=shape)


@settings(max_examples=40, deadline=None)
@given(chains(), st.sampled_from(MAPPINGS))
def test_rewriting_preserves_meaning(graph: Graph, mapping: Mapping) -> None:
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(-1, 1, node.tile.known_shape) for node in graph.inputs]
    exact = evaluate(graph, inputs)
    exact = exact if isinstance(exact, tuple) else (exact,)
    moves = instantiate(graph, mapping)
    verify(moves)
    before = [traffic(moves)]

    def check(rule: str, found: MovementGraph) -> None:
        verify(found)
        now = traffic(found)
        assert now.bytes["device"] <= before[0].bytes["device"], rule
        assert now.launches <= before[0].launches, rule
        before[0] = now

    rewritten = rewrite(moves, check)
    for graph_of_moves in (moves, rewritten):
        for got, want in zip(run(graph_of_moves, inputs), exact, strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_softmax_reads_and_writes_once(mapping: Mapping) -> None:
    g = GraphBuilder("softmax")
    x = g.input("x", "float32", (6, 128))
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=1)))
    graph = g.finish(g.add("div", powers, g.add("reduce_sum", powers, axis=1)))
    found = traffic(rewrite(instantiate(graph, mapping)))
    if mapping.lanes > 1:
        assert found.bytes["device"] == 2 * 6 * 128 * 4
        assert found.launches == 1
