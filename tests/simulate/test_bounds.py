"""Kernels of chains stay inside their tensors, proven: `tests.bounds` on what is emitted for CPUs."""

from __future__ import annotations

import pytest
import test_open_chains as open_chains
import test_random_chains as fixed_chains

from ladder.ir import Graph, GraphBuilder
from ladder.lower import builder as b
from ladder.lower.chain import emit_chain
from ladder.partition.rows import row_axes
from targets import get_device
from tests.bounds import unproven

CPU = get_device("cpu/avx512_vnni")


@pytest.mark.parametrize("seed", range(0, 60, 2))
def test_fixed_sizes(seed: int) -> None:
    graph = fixed_chains.Drawn(seed).chain()
    if row_axes(graph, graph.outputs) is not None:
        assert not unproven(emit_chain(graph, CPU, "chain"))


@pytest.mark.parametrize("seed", range(0, 9, 2))
def test_open_sizes(seed: int) -> None:
    """Products of extents are beyond z3 at times; it must not find sizes for which something lies outside."""
    graph = open_chains.Drawn(seed).chain()
    if row_axes(graph, graph.outputs) is not None:
        assert not [access for access in unproven(emit_chain(graph, CPU, "chain")) if access.found]


def shifted(low: int) -> Graph:
    """Return a part of a vector that begins at ``low``, which may be beyond its end."""
    g = GraphBuilder("chain")
    x = g.input("x", "float32", ("n",))
    return g.finish(g.add("neg", g.add("slice", x, begin=(low,), shape=("n",))))


def test_an_access_outside_is_found() -> None:
    assert not unproven(emit_chain(shifted(0), CPU, "chain"))
    (first, *_) = unproven(emit_chain(shifted(1), CPU, "chain"))
    assert first.found
    assert "axis 0 of argument 1 may lie outside n" in str(first)


@pytest.mark.parametrize(("least", "kept"), [(1, True), (0, False)])
def test_conditions_count(least: int, kept: bool) -> None:
    """``if v >= least: y[v] = x[v - 1]``."""
    with b.function("kernel") as result:
        x, y = b.tensor("x", (8,), "float32"), b.tensor("y", (8,), "float32")
        with b.loop(8) as v, b.when(v >= least):
            b.store(y, x[v - 1], v)
    assert (not unproven(result.func)) is kept
