"""Larger programs as LAX parts: what is cut, and that the parts make up the program."""

from __future__ import annotations

import numpy as np
from superopt_programs import program

from ladder.ir import Graph, Node, evaluate, verify
from ladder.ir.build import node_attributes
from ladder.ir.ops import get_operator
from ladder.superopt.partition import Operation, pieces
from ladder.superopt.verifier import refusal, verify_equal


class Part:
    """A piece of a graph; its inputs and its output have the names of the program's values."""

    def __init__(self, graph: Graph, piece: list[Operation]) -> None:
        inside = {operation.name for operation in piece}
        outside = dict.fromkeys(name for o in piece for name in o.operands if name not in inside)
        sources = (graph.producer(name) for name in outside)
        given = (n if n.operator == "constant" else Node(n.name, "input", (), (), n.tiles) for n in sources)
        self.lax, last = piece[-1].lax, piece[-1].name
        self.operator = graph.producer(last).operator
        nodes = (*given, *(graph.producer(operation.name) for operation in piece))
        self.graph = Graph(f"{graph.name}_{last}", graph.level, nodes, (last,))


def partition(graph: Graph) -> tuple[Part, ...]:
    operations = [
        Operation(node.name, node.inputs, frozenset({lax_class(graph, node)}))
        for node in graph.nodes
        if node.operator not in ("input", "constant")
    ]
    return tuple(Part(graph, piece) for piece in pieces(operations, graph.outputs))


def lax_class(graph: Graph, node: Node) -> str:
    return get_operator(node.operator).lax_class(node_attributes(node, graph))


def run(parts, graph: Graph, inputs):
    """Evaluate part after part."""
    values = dict(zip((node.name for node in graph.inputs), inputs, strict=True))
    for part in parts:
        results = evaluate(part.graph, [values[node.name] for node in part.graph.inputs])
        results = results if isinstance(results, tuple) else (results,)
        values.update(zip(part.graph.outputs, results, strict=True))
    return tuple(values[output] for output in graph.outputs)


def layer(x, wq, wk, wv, up, down):
    """Attention with a norm, a residual, and an MLP with relu."""

    def norm(y):
        return y / (y.square().sum(1) * 0.25).sqrt()

    scores = norm(x) @ wq @ (norm(x) @ wk).T
    weights = (scores - scores.op("reduce_max", axis=1)).exp()
    x = x + (weights / weights.sum(1)) @ (norm(x) @ wv)
    return x + (norm(x) @ up).op("relu") @ down


SHAPES = {"x": (3, 4), "wq": (4, 2), "wk": (4, 2), "wv": (4, 4), "up": (4, 6), "down": (6, 4)}


def test_a_layer_is_cut_at_relu_and_at_roots_of_exponentials():
    graph = program(layer, SHAPES)
    parts = partition(graph)
    assert [part.lax for part in parts] == [True, True, False, True]
    assert parts[2].operator == "relu"
    generator = np.random.default_rng(0)
    inputs = [generator.standard_normal(node.tile.known_shape) for node in graph.inputs]
    assert np.allclose(run(parts, graph, inputs)[0], evaluate(graph, inputs), rtol=1e-12)
    for part in parts:
        verify(part.graph)
        assert len(part.graph.outputs) == 1
        whole = [node.name for node in part.graph.nodes if node.operator not in ("input", "constant")]
        assert len(set(whole)) == len(whole)
    computed = [n.name for p in parts for n in p.graph.nodes if n.operator not in ("input", "constant")]
    assert sorted(computed) == sorted(n.name for n in graph.nodes if n.operator not in ("input", "constant"))


def test_parts_can_be_decided_where_the_program_cannot():
    graph = program(lambda x, w: ((x @ w).silu() * 2.0).silu().op("relu") + x @ w, {"x": (2, 2), "w": (2, 2)})
    assert "two exponentials" in refusal(graph)
    parts = partition(graph)
    assert [part.lax for part in parts] == [True, True, False, True]
    assert [n.operator for n in parts[3].graph.nodes][-2:] == ["matmul", "add"]  # the second x · w waits
    for part in parts:
        assert not part.lax or (verify_equal(part.graph, part.graph).equal and not refusal(part.graph))


def test_lax_programs_are_one_part():
    graph = program(lambda x: x.exp() / x.exp().sum(1), {"x": (2, 3)})
    (part,) = partition(graph)
    assert part.lax
    assert [n.name for n in part.graph.nodes] == [n.name for n in graph.nodes]


def test_parts_that_nothing_connects_are_apart():
    graph = program(lambda x, y: (x.exp(), y.square()), {"x": (2, 2), "y": (2, 2)})
    assert len(partition(graph)) == 2


def test_a_norm_of_a_result_stays_whole():
    """Of softmax plus x: its mean square alone could be computed within the first stage."""
    graph = program(
        lambda x: (y := x + x.exp() / x.exp().sum(1)) / y.square().sum(1).sqrt() + y, {"x": (2, 3)}
    )
    first, second = partition(graph)
    assert [n.operator for n in second.graph.nodes if n.inputs] == [
        "square",
        "reduce_sum",
        "sqrt",
        "div",
        "add",
    ]
    assert first.graph.outputs == tuple(n.name for n in second.graph.nodes if n.operator == "input")
