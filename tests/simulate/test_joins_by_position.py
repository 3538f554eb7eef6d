"""Joins of parts of one value on the simulator: where an element lies is chosen, and it is loaded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.choose import ranked
from ladder.movement.mapping import Mapping
from ladder.simulate import simulate_launch
from targets import get_device

H100 = get_device("cuda/sm_90a")
ROWS = 7


def part(g: GraphBuilder, x: str, first: int, rows: int) -> str:
    shape = g.tile(x).shape
    return g.add("slice", x, begin=(0, first, 0), shape=(shape[0], rows, shape[2]))


def mirrored(g: GraphBuilder, x: str) -> str:
    return g.add("concat", part(g, x, 1, 1), x, part(g, x, ROWS - 2, 1), axis=1)


def turned(g: GraphBuilder, x: str) -> str:
    return g.add("concat", part(g, x, 3, ROWS - 3), part(g, x, 0, 3), axis=1)


def repeated(g: GraphBuilder, x: str) -> str:
    """The first row twice more, as borders repeat it."""
    shape = g.tile(x).shape
    row = g.add("broadcast", part(g, x, 0, 1), shape=(shape[0], 2, shape[2]))
    return g.add("concat", row, x, axis=1)


def of_two(g: GraphBuilder, x: str) -> str:
    return g.add("concat", g.add("neg", part(g, x, 2, 2)), part(g, x, 0, ROWS), axis=1)


PLACES: dict[Callable[[GraphBuilder, str], str], Any] = {
    mirrored: [1, *range(ROWS), ROWS - 2],
    turned: [3, 4, 5, 6, 0, 1, 2],
    repeated: [0, 0, *range(ROWS)],
    of_two: None,
}


def special(columns: int) -> np.ndarray:
    x = np.random.default_rng(5).standard_normal((2, ROWS, columns)).astype(np.float32)
    x[0, 0, 0], x[0, 1, 1], x[1, 3, 2], x[1, 6, columns - 1] = np.nan, -0.0, np.inf, -np.inf
    return x


def chain(make: Callable[[GraphBuilder, str], str], columns: int, squares: bool = False) -> Graph:
    g = GraphBuilder("chain")
    found = make(g, g.input("x", "float32", (2, ROWS, columns)))
    return g.finish(g.add("reduce_sum", g.add("square", found), axis=2) if squares else found)


def bits(x: np.ndarray) -> np.ndarray:
    return x.view(np.uint32)


@pytest.mark.parametrize("columns", [33, 64])
@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_joins_are_exact_in_every_mapping(make: Callable[[GraphBuilder, str], str], columns: int) -> None:
    graph, x = chain(make, columns), special(columns)
    wanted = np.concatenate([-x[:, 2:4], x], 1) if PLACES[make] is None else x[:, PLACES[make]]
    for moves in ranked(graph):
        got = np.full(wanted.shape, 7, np.float32)
        found = simulate_launch(emit_chain(graph, H100, "chain", moves.mapping), [x, got])
        assert not found.findings, (moves.mapping, found.findings)
        np.testing.assert_array_equal(bits(got), bits(wanted), err_msg=str(moves.mapping))


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_one_load_serves_all_parts_of_one_value(make: Callable[[GraphBuilder, str], str]) -> None:
    text = emit_chain(chain(make, 64), H100, "chain", Mapping(threads=128)).script()
    assert text.count("T.ptx.ld(") == 1 + (make is of_two)


@pytest.mark.parametrize("make", PLACES, ids=lambda make: make.__name__)
def test_rows_joined_between_rows_stay_in_registers(make: Callable[[GraphBuilder, str], str]) -> None:
    """Which part a row is of is known to all of its lanes, so they hold it from its sum to its result."""
    g = GraphBuilder("chain")
    found = make(g, g.input("x", "float32", (2, ROWS, 64)))
    graph = g.finish(g.add("div", found, g.add("reduce_sum", g.add("square", found), axis=2, keep=True)))
    held = [moves.mapping for moves in ranked(graph) if moves.mapping.lanes > 1]
    assert held
    assert all(mapping.num for mapping in held)
    x = np.where(np.isfinite(special(64)), special(64), np.float32(0.5))
    rows = np.concatenate([-x[:, 2:4], x], 1) if PLACES[make] is None else x[:, PLACES[make]]
    wanted = rows / np.square(rows, dtype=np.float64).sum(2, keepdims=True)
    for mapping in held[:4]:
        got = np.full(rows.shape, 7, np.float32)
        launch = simulate_launch(emit_chain(graph, H100, "chain", mapping), [x, got])
        assert not launch.findings, (mapping, launch.findings)
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7, err_msg=str(mapping))
