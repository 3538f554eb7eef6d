"""Transposes that move nothing are reshapes, others stay; results that something reads, too, stay results."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from ladder.ir import GraphBuilder, evaluate
from ladder.ir.folding import fold
from ladder.rewrite import rewrite
from ladder.rewrite.convolution_rules import STILL


@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 1, 3), (1, 1, 5), (1, 4, 1)])
def test_transposes_of_axes_of_one_element_are_reshapes(shape: tuple[int, ...]) -> None:
    x = np.arange(float(np.prod(shape))).reshape(shape)
    for permutation in permutations(range(3)):
        g = GraphBuilder("turned")
        value = g.add("transpose", g.input("x", "float32", shape), permutation=permutation)
        graph = rewrite(g.finish(value), STILL)
        still = [axis for axis in permutation if shape[axis] != 1] == [a for a in range(3) if shape[a] != 1]
        assert graph.nodes[-1].operator == ("reshape" if still else "transpose")
        assert np.array_equal(evaluate(graph, [x]), x.transpose(permutation))


def test_a_result_that_is_read_stays_a_result() -> None:
    """A convolution, channels last, and what a factor makes of it are both results."""
    g = GraphBuilder("both")
    x, w = g.input("x", "float32", (1, 6, 5, 4)), g.input("w", "float32", (8, 3, 3, 4))
    factor = g.input("factor", "float32", (8,))
    sizes = (("n", 1), ("p", 4), ("q", 3), ("f", 8), ("r", 3), ("s", 3), ("c", 4))
    spec = "n p+r q+s c, f r s c -> n p q f"
    value = g.add("contract", x, w, spec=spec, sizes=sizes, pad=False)
    graph = g.finish(value, g.add("mul", value, factor))
    folded = fold(graph, ["w", "factor"])
    assert len(folded.graph.outputs) == 2
    rng = np.random.default_rng(0)
    given = {node.name: rng.standard_normal(node.tile.shape) for node in graph.inputs}
    want = evaluate(graph, [given[node.name] for node in graph.inputs])
    for name, made in folded.made.items():
        given[name] = evaluate(made, [given[node.name] for node in made.inputs])
    got = evaluate(folded.graph, [given[node.name] for node in folded.graph.inputs])
    for a, b in zip(got, want, strict=True):
        assert np.allclose(a, b)
