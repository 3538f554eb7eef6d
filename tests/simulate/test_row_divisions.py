"""Rows divided by a number each: as float32 divisions round them, at the ends of the range too."""

from __future__ import annotations

import numpy as np
import pytest

from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.choose import ranked
from ladder.simulate import simulate_launch
from targets import get_device

ROWS, COLUMNS = 96, 64
ENDS = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 1e-38, -3.4e38, 3.4e38, 2.0**96, 1], np.float32)


def divided(stretched: bool) -> Graph:
    """Divide by the largest magnitude of a row, which a row of `divisors` has beside it."""
    g = GraphBuilder("chain")
    x, d = g.input("x", "float32", (ROWS, COLUMNS)), g.input("d", "float32", (ROWS, COLUMNS))
    divisor = g.add("reduce_max", d, axis=1)
    divisor = g.add("broadcast", divisor, shape=(ROWS, COLUMNS)) if stretched else divisor
    return g.finish(g.add("div", x, divisor))


def numbers(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return numbers of any magnitude, and the ends of the range."""
    found = rng.uniform(1, 2, shape) * np.exp2(rng.integers(-149, 128, shape)) * rng.choice([-1, 1], shape)
    found = found.astype(np.float32)
    found.flat[rng.choice(found.size, ENDS.size, replace=False)] = ENDS
    return found


@pytest.mark.parametrize("stretched", [False, True])
def test_quotients_of_rows(stretched: bool) -> None:
    graph, rng = divided(stretched), np.random.default_rng(5)
    x, d = numbers(rng, ROWS, COLUMNS), numbers(rng, ROWS, 1)
    with np.errstate(all="ignore"):
        wanted = x / d
    rounded_once = (np.abs(wanted) >= np.finfo(np.float32).tiny) & (np.abs(x) >= 2.0**-100)
    last_place = np.spacing(np.abs(wanted))
    for moves in ranked(graph)[:3]:
        function = emit_chain(graph, get_device("cuda/sm_90a"), "chain", moves.mapping)
        assert "ladder_by_inverse" in function.script()
        found = np.zeros_like(x)
        assert not simulate_launch(function, [x, np.repeat(d, COLUMNS, 1), found]).findings
        exact = (found == wanted) | (np.isnan(found) & np.isnan(wanted))
        assert exact[rounded_once | ~np.isfinite(wanted) | (wanted == 0)].all()
        small = ~rounded_once & np.isfinite(wanted)
        assert (np.abs(found[small] - wanted[small]) <= last_place[small]).all()


@pytest.mark.parametrize("operator", ["sigmoid", "silu"])
def test_quotients_by_one_and_an_exponential(operator: str) -> None:
    """As divisions, of infinities and of results that have fewer bits too."""
    g = GraphBuilder("chain")
    graph = g.finish(g.add(operator, g.input("x", "float32", (4, 61))))
    x = np.linspace(-104, 104, 4 * 61, dtype=np.float32).reshape(4, 61)
    x.flat[:5] = np.inf, -np.inf, np.nan, 0, -0.0
    function, found = emit_chain(graph, get_device("cuda/sm_90a"), "chain"), np.zeros_like(x)
    assert "ladder_by_inverse" in function.script()
    assert not simulate_launch(function, [x, found]).findings
    with np.errstate(all="ignore"):
        wanted = (x if operator == "silu" else np.float32(1)) / (np.float32(1) + np.exp(-x))
        near = np.abs(found - wanted) <= np.where(np.abs(wanted) < 2.0**-100, 1e-45, 0)
    assert (near | (found == wanted) | (np.isnan(found) & np.isnan(wanted))).all()


def test_numbers_that_are_known_or_halves_are_divided_otherwise() -> None:
    for kind, known in (("float16", False), ("float32", True)):
        g = GraphBuilder("chain")
        x = g.input("x", kind, (ROWS, COLUMNS))
        divisor = g.add("constant", value=3.0, type=kind) if known else g.add("reduce_max", x, axis=1)
        function = emit_chain(g.finish(g.add("div", x, divisor)), get_device("cuda/sm_90a"), "chain")
        assert "ladder_by_inverse" not in function.script()
