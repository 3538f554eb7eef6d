"""Sums of many elements into a few places by number: blocks of GPUs have their own in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.simulate import simulate_launch
from targets import get_device

H200 = get_device("cuda/sm_90a")
TYPES = {"float32": np.float32, "int32": np.int32, "int64": np.int64}

FORMS: dict[str, tuple[tuple[int, ...], int, int, dict[str, Any]]] = {
    "numbers": ((10,), 0, 5600, {}),
    "from the end": ((7,), 0, 3701, {"from_end": True}),
    "of rows": ((2, 3), 0, 1200, {}),
    "along": ((3, 4), 1, 2200, {"along": True}),
}
"""Shape of the places, axis, elements along it, attributes."""


def sums(form: str, kind: str, number: int | None) -> Graph:
    """Return sums of elements, or of one number again and again, into places."""
    shape, axis, count, given = FORMS[form]
    g = GraphBuilder("chain")
    read = (*shape[:axis], count, *shape[axis + 1 :])
    base = g.input("base", kind, shape)
    if number is None:
        x = g.input("x", kind, read)
        added = g.add("add", x, x)
    else:
        added = g.add("broadcast", g.add("constant", value=number, type=kind), shape=read)
    ids = g.input("ids", "int64", read if given.get("along") else (count,))
    return g.finish(g.add("put", base, ids, added, axis=axis, combine="add", **given))


def check(graph: Graph, kind: str, lowest: int, extent: int, wrong: int | None = None) -> None:
    rng = np.random.default_rng(0)
    base, *rest = graph.inputs
    start = rng.integers(-9, 9, base.tile.known_shape).astype(TYPES[kind])
    values = [
        rng.integers(lowest, extent, n.tile.known_shape)
        if n.name == "ids"
        else rng.integers(-9, 9, n.tile.known_shape).astype(TYPES[kind])
        for n in rest
    ]
    if wrong is not None:
        values[-1].reshape(-1)[77] = wrong
    made, function = start.copy(), emit_chain(graph, H200, "chain")
    assert "red.shared" in function.script() or '"shared"' in function.script()
    found = simulate_launch(function, [*values, made], outputs=(len(values),), target=H200)
    kinds = {finding.kind for finding in found.findings} - {"unwritten"}
    if wrong is not None:
        assert kinds == {"out of bounds"}
        return
    assert not kinds, found.report()
    wide = [v if v.dtype == np.int64 else v.astype(np.float64) for v in (start, *values)]
    exact = np.asarray(evaluate(graph, wide))
    np.testing.assert_array_equal(made.astype(np.float64), exact)


@pytest.mark.parametrize("kind", ["float32", "int32"])
@pytest.mark.parametrize("form", FORMS)
def test_sums(form: str, kind: str) -> None:
    shape, axis, _, given = FORMS[form]
    check(sums(form, kind, None), kind, -shape[axis] if given.get("from_end") else 0, shape[axis])


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("number", [1, -3])
def test_counts(number: int, kind: str) -> None:
    check(sums("along", kind, number), kind, 0, 4)


@pytest.mark.parametrize("wrong", [-1, 10, 1 << 32])
def test_numbers_of_no_place_are_errors(wrong: int) -> None:
    check(sums("numbers", "int64", 1), "int64", 0, 10, wrong)


@pytest.mark.parametrize("values", [[np.nan, 1.0], [np.inf, 1.0], [np.inf, -np.inf], [-0.0, 0.0]], ids=str)
def test_special_values(values: list[float]) -> None:
    graph = sums("numbers", "float32", None)
    x = np.zeros(5600, np.float32)
    x[[3, 5000]] = values
    ids = np.where(x == 0, 1, 2)
    ids[[3, 5000]] = 2
    made = np.zeros(10, np.float32)
    simulate_launch(emit_chain(graph, H200, "chain"), [x, ids, made], outputs=(2,), target=H200)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(made[2], 2 * np.float32(values[0]) + 2 * np.float32(values[1]))
    assert not made[[0, 1, 3, 4]].any()


def test_few_elements_and_many_places_take_none() -> None:
    """What a block would add at its end is not worth it."""
    for shape, count in (((1 << 14,), 1 << 22), ((64,), 1000)):
        g = GraphBuilder("chain")
        base, ids = g.input("base", "int32", shape), g.input("ids", "int64", (count,))
        graph = g.finish(g.add("put", base, ids, g.input("x", "int32", (count,)), axis=0, combine="add"))
        assert '"shared"' not in emit_chain(graph, H200, "chain").script()
