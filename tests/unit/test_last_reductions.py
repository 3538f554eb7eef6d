"""Reductions behind whose axis only axes of one element lie are loops over rows on GPUs: as masks count."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.ir import GraphBuilder, evaluate
from ladder.ir.build import node_attributes
from ladder.movement.choose import machine_of, ranked
from ladder.rewrite import simplify
from targets import get_device

H200 = get_device("cuda/sm_90a")


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize("operator", ["reduce_sum", "reduce_max"])
@pytest.mark.parametrize("shape", [(2048, 32, 1), (3, 5, 1, 1), (40, 1)])
def test_the_same_numbers(shape: tuple[int, ...], operator: str, keep: bool) -> None:
    g = GraphBuilder("chain")
    x = g.add("reshape", g.input("x", "float32", shape[:2]), shape=shape)
    axis = 1 if len(shape) > 2 else 0
    graph = g.finish(g.add(operator, x, axis=axis, keep=keep))
    found = simplify(graph, H200)
    (node,) = (node for node in found.nodes if node.operator == operator)
    assert node_attributes(node)["axis"] % len(found.tile(node.inputs[0]).shape) == axis
    assert len(found.tile(node.inputs[0]).shape) == axis + 1
    value = np.random.default_rng(0).normal(size=shape[:2]).astype(np.float32)
    value[0, 0] = np.nan
    one, other = (np.asarray(evaluate(each, {"x": value})) for each in (graph, found))
    assert one.shape == other.shape
    np.testing.assert_allclose(one, other, rtol=1e-6)


def test_lanes_share_few_rows_to_a_block() -> None:
    g = GraphBuilder("chain")
    x = g.add("reshape", g.input("x", "float32", (8192, 32)), shape=(8192, 32, 1))
    graph = simplify(g.finish(g.add("reduce_sum", x, axis=1, keep=False)), H200)
    assert ranked(graph, machine_of(H200))[0].mapping.teams > 1
