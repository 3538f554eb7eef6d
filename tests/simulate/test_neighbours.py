"""Chains that read elements side by side, shifted or in reverse, on the simulator: right, and in vectors."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from drawn_chains import DTYPES

from ladder.ir import GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.simulate import simulate_launch
from targets import get_device
from tile_types.errors import ScheduleError


def reversed_rows(g: GraphBuilder, kind: str) -> str:
    x = g.input("x", kind, (5, 64))
    turned = g.add("map", x, spec="r -c+63 -> r c", sizes=(("r", 5), ("c", 64)))
    return g.add("add", x, turned)


def shifted(g: GraphBuilder, kind: str) -> str:
    """Differences along rows; rows of results are vectors, those of what is read begin between."""
    x = g.input("x", kind, (6, 72))
    parts = [g.add("slice", x, begin=(0, begin), shape=(6, 64)) for begin in (0, 3, 8)]
    return g.add("add", g.add("sub", parts[1], parts[0]), parts[2])


def around(g: GraphBuilder, kind: str) -> str:
    """Nine neighbours of the pixels inside an image, and every second of another."""
    x, y = g.input("x", kind, (2, 10, 40)), g.input("y", kind, (2, 8, 64))
    total = g.add("slice", y, begin=(0, 0, 1), shape=(2, 8, 32), step=(1, 1, 2))
    for down in range(3):
        for across in range(3):
            part = g.add("slice", x, begin=(0, down, across), shape=(2, 8, 32))
            total = g.add("add", total, part)
    return total


def rolled(g: GraphBuilder, kind: str) -> str:
    """What leaves a row at its end comes first; vectors lie between the seams."""
    x = g.input("x", kind, (4, 96))
    last, rest = (g.add("slice", x, begin=(0, begin), shape=(4, size)) for begin, size in ((91, 5), (0, 91)))
    turned = g.add("map", x, spec="r -c+95 -> r c", sizes=(("r", 4), ("c", 96)))
    return g.add("add", g.add("concat", last, rest, axis=1), turned)


def odd_seams(g: GraphBuilder, kind: str) -> str:
    """Rows of an odd length whose pieces would fit vectors, if rows began where vectors do."""
    x, y = g.input("x", kind, (4, 32)), g.input("y", kind, (4, 3))
    joined = g.add("concat", x, y, axis=1)
    return g.add("pad", g.add("neg", joined), low=(0, 1), high=(0, 1), value=0.0)


def odd(g: GraphBuilder, kind: str) -> str:
    """Rows of an odd length have no vectors."""
    x = g.input("x", kind, (8, 33))
    return g.add("neg", g.add("slice", x, begin=(0, 1), shape=(8, 32)))


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    "program", [reversed_rows, shifted, around, rolled, odd_seams, odd], ids=lambda p: p.__name__
)
@pytest.mark.parametrize("target", ["cuda/sm_90a", "rocm/gfx942"])
def test_neighbours_in_every_mapping(
    program: Callable[[GraphBuilder, str], str], kind: str, target: str
) -> None:
    build, device = GraphBuilder("chain"), get_device(target)
    graph = build.finish(program(build, kind))
    rng = np.random.default_rng(3)
    whole = [rng.integers(-8, 8, node.tile.known_shape).astype(DTYPES[kind]) for node in graph.inputs]
    exact, tried = np.asarray(evaluate(graph, whole)), 0
    for moves in ranked(graph, machine_of(device)):
        outputs = [np.full(exact.shape, np.nan, DTYPES[kind])]
        try:
            function = emit_chain(graph, device, "chain", moves.mapping)
        except ScheduleError:
            assert moves.mapping.tile[0] or moves.mapping.spread > 1
            continue
        result = simulate_launch(function, [*whole, *outputs], target=device, outputs=(len(whole),))
        assert not result.findings, (moves.mapping, result.report())
        np.testing.assert_array_equal(outputs[0].astype(np.float64), exact)
        tried += 1
    assert tried


@pytest.mark.parametrize(("program", "loads"), [(reversed_rows, 2), (shifted, 2), (around, 6), (odd, 0)])
def test_few_loads_serve_a_vector(program: Callable[[GraphBuilder, str], str], loads: int) -> None:
    """Of what lies between two vectors both are read, once for all that needs them; odd rows have none."""
    build = GraphBuilder("chain")
    graph = build.finish(program(build, "float16"))
    assert emit_chain(graph, get_device("cuda/sm_90a"), "chain", None).script().count("ptx.ld") == loads
