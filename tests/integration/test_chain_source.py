"""Chains whose source the simulator cannot judge: TVM's passes change it, and compilers read it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from ladder.ir import Graph, GraphBuilder
from ladder.lower.build import build_function
from ladder.lower.chain import emit_chain
from targets import get_device

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@needs_nvcc
@pytest.mark.parametrize("kind", ["float32", "float16", "int32"])
def test_a_number_that_is_known_is_stored(kind: str, tmp_path: Path) -> None:
    graph = GraphBuilder("chain")
    x = graph.input("x", kind, (1, 3, 32, 32))
    lanes = graph.add("transpose", x, permutation=(0, 2, 3, 1))
    padded = graph.add("pad", lanes, low=(0, 0, 0, 0), high=(0, 0, 0, 1), value=0.0)
    device = get_device("cuda/sm_90a")
    chain = graph.finish(padded)
    build_function(lambda name: emit_chain(chain, device, name), "padded", device, tmp_path)


@needs_nvcc
def test_a_result_without_axes_is_stored(tmp_path: Path) -> None:
    graph = GraphBuilder("chain")
    x, y = graph.input("x", "float32", (1,)), graph.input("y", "float32", ())
    whole = graph.add("add", graph.add("reshape", x, shape=()), y)
    device = get_device("cuda/sm_90a")
    chain = graph.finish(whole)
    build_function(lambda name: emit_chain(chain, device, name), "whole", device, tmp_path)


def whole_numbers(kind: str) -> Graph:
    """Return what TVM would compute in 32 bits, or a number below zero, which is known."""
    g = GraphBuilder("chain")
    if kind == "narrowed":
        return g.finish(g.add("iota", extent=48, type="int64"))
    return g.finish(g.add("broadcast", g.add("constant", value=-100.0, type="int64"), shape=(3, 48)))


@pytest.mark.parametrize("target", [pytest.param("cuda/sm_90a", marks=needs_nvcc), "rocm/gfx942"])
@pytest.mark.parametrize("kind", ["known", "narrowed"])
def test_whole_numbers_of_64_bits_are_stored_in_vectors(kind: str, target: str, tmp_path: Path) -> None:
    device, graph = get_device(target), whole_numbers(kind)
    build_function(lambda name: emit_chain(graph, device, name), "whole", device, tmp_path)
