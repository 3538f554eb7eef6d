"""Random graphs: printing and parsing are inverse, verification holds, rewriting keeps the meaning."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ladder.ir import Graph, GraphBuilder, bind, evaluate, parse, print_graph, verify
from ladder.ir.extents import bind as bind_extent
from ladder.ir.extents import canonical
from ladder.ir.printer import print_literal
from ladder.rewrite import rewrite
from ladder.rewrite.identities import CONVERT_FOLDING, LAYOUT_FOLDING, MATMUL_RECOGNITION

UNARY = ("neg", "silu", "sigmoid", "tanh", "relu", "square")
BINARY = ("add", "sub", "mul", "maximum", "minimum")
TYPES = ("float32", "float16", "bfloat16")


@st.composite
def graphs(draw) -> Graph:
    """Draw a kernel graph over [M, n] tensors."""
    n = draw(st.integers(1, 6))
    g = GraphBuilder(draw(st.from_regex(r"[a-z_]{1,8}", fullmatch=True)))
    values = [g.input(f"x{i}", "float32", ("M", n)) for i in range(draw(st.integers(1, 3)))]
    for _ in range(draw(st.integers(1, 8))):
        x = draw(st.sampled_from(values))
        values.append(draw(st.sampled_from(STEPS))(draw, g, x, values, n))
    return g.finish(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=2)))


def unary(draw, g, x, values, n):
    return g.add(draw(st.sampled_from(UNARY)), x)


def binary(draw, g, x, values, n):
    return g.add(draw(st.sampled_from(BINARY)), x, draw(st.sampled_from(values)))


def converted(draw, g, x, values, n):
    for ttype in draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=3)):
        x = g.add("convert", x, type=ttype)
    return g.add("convert", x, type="float32")


def reshaped(draw, g, x, values, n):
    x = g.add("reshape", x, shape=(n, "M"))
    return g.add("reshape", x, shape=("M", n))


def transposed(draw, g, x, values, n):
    return g.add("transpose", g.add("transpose", x, permutation=(1, 0)), permutation=(1, 0))


def contracted(draw, g, x, values, n):
    weight = g.add("constant", value=draw(st.floats(-4, 4)), shape=(n, n), type="float32")
    spec = draw(st.sampled_from(("m k, n k -> m n", "m k, k n -> m n", "a b, c b -> a c")))
    return g.add("contract", x, weight, spec=spec)


def summed(draw, g, x, values, n):
    return g.add("broadcast", g.add("reduce_sum", x, axis=1), shape=("M", n))


STEPS = (unary, binary, converted, reshaped, transposed, contracted, summed)


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_parse_inverts_print(graph):
    verify(graph)
    assert parse(print_graph(graph)) == graph


@given(graphs(), st.integers(0, 4), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_rewriting_keeps_meaning(graph, rows, seed):
    generator = np.random.default_rng(seed)
    inputs = [generator.standard_normal((rows, int(node.tile.shape[1]))) for node in graph.inputs]
    result = rewrite(graph, CONVERT_FOLDING + LAYOUT_FOLDING + MATMUL_RECOGNITION)
    verify(result)
    verify(bind(result, {"M": rows}))
    assert not any(node.operator == "contract" for node in result.nodes)
    expected, got = evaluate(graph, inputs), evaluate(result, inputs)
    pairs = zip(expected, got, strict=True) if isinstance(expected, tuple) else [(expected, got)]
    for left, right in pairs:
        assert np.allclose(left, right, rtol=1e-12, atol=1e-12, equal_nan=True)


LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


@given(LITERALS, LITERALS.filter(lambda value: value is not None))
def test_any_attribute_and_layout_round_trips(value, layout):
    g = GraphBuilder("g")
    x = g.input("x", "float16", (2,), layout=layout)
    graph = g.finish(x)
    named = parse(print_graph(graph).replace("input()", f"input(a={print_literal(value)})"))
    assert named.tile("x").layout == layout
    assert dict(named.nodes[0].attributes)["a"] == value
    assert parse(print_graph(named)) == named


EXTENTS = st.recursive(
    st.sampled_from(["M", "N"]) | st.integers(0, 9).map(str),
    lambda inner: st.tuples(inner, st.sampled_from(["+", "-", "*"]), inner).map(
        lambda t: f"({t[0]} {t[1]} {t[2]})"
    ),
    max_leaves=6,
)


@given(EXTENTS, st.integers(0, 50), st.integers(0, 50))
def test_extents_keep_their_value(text, m, n):
    assert bind_extent(canonical(text), {"M": m, "N": n}) == eval(text, {"M": m, "N": n})
