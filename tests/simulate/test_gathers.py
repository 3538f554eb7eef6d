"""Chains that read elements by number, on the simulator in every mapping: right, in bounds, or an error."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from drawn_chains import BOUNDS, DTYPES

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.movement.choose import ranked
from ladder.movement.mapping import Mapping
from ladder.simulate import simulate_launch
from targets import get_device
from tile_types.errors import ScheduleError

Numbers = dict[str, Sequence[int]]


def embedded(g: GraphBuilder) -> str:
    """Rows of a table, and of the second that all rows read, then their norm."""
    table, ids = g.input("table", "float16", (50, 64)), g.input("ids", "int64", (2, 9))
    value = g.add("convert", g.add("gather", table, ids, axis=0), type="float32")
    value = g.add("add", value, g.input("positions", "float32", (9, 64)))
    squares = g.add("reduce_sum", g.add("square", value), axis=2)
    return g.add("mul", value, g.add("rsqrt", squares))


def likelihood(g: GraphBuilder) -> str:
    """The logarithm of the share of one of each row."""
    x, ids = g.input("x", "float32", (6, 40)), g.input("ids", "int64", (6,))
    shifted = g.add("sub", x, g.add("reduce_max", x, axis=1))
    shares = g.add("sub", shifted, g.add("log", g.add("reduce_sum", g.add("exp", shifted), axis=1)))
    return g.add("gather", shares, g.add("reshape", ids, shape=(6, 1)), axis=1, along=True)


def of_images(g: GraphBuilder) -> str:
    """The same of each pixel over its channels."""
    x, ids = g.input("x", "float32", (2, 5, 8, 8)), g.input("ids", "int64", (2, 8, 8))
    shifted = g.add("sub", x, g.add("reduce_max", x, axis=1))
    shares = g.add("sub", shifted, g.add("log", g.add("reduce_sum", g.add("exp", shifted), axis=1)))
    return g.add("gather", shares, g.add("reshape", ids, shape=(2, 1, 8, 8)), axis=1, along=True)


def of_columns(g: GraphBuilder) -> str:
    """Elements of each row from the end; the numbers are computed."""
    x, ids = g.input("x", "float32", (4, 30)), g.input("ids", "int32", (3, 7))
    ids = g.add("sub", ids, g.add("constant", value=30.0, type="int32"))
    return g.add("neg", g.add("gather", x, ids, axis=1, from_end=True))


def joined(g: GraphBuilder) -> str:
    """What is gathered is joined with zeros around it, and with what is not."""
    x, ids = g.input("x", "float32", (5, 12, 4)), g.input("ids", "int64", (6,))
    found = g.add("gather", x, ids, axis=1)
    around = g.add("pad", found, low=(0, 1, 0), high=(0, 1, 0), value=0.0)
    return g.add("concat", around, g.input("y", "float32", (5, 3, 4)), axis=1)


def of_gathered(g: GraphBuilder) -> str:
    """Numbers that are gathered themselves, of halves in vectors."""
    x, ids = g.input("x", "float16", (12, 16)), g.input("ids", "int32", (8,))
    places = g.add("gather", g.input("places", "int64", (20,)), ids, axis=0)
    return g.add("convert", g.add("gather", x, places, axis=0), type="float32")


def of_joined(g: GraphBuilder) -> str:
    """Which operand of a join a number is of is known to the kernel alone, in two axes at once."""
    x, ids = g.input("x", "float32", (5, 12, 8)), g.input("ids", "int64", (6,))
    both = g.add("concat", x, g.add("exp", x), axis=1)
    found = g.add("gather", both, ids, axis=1)
    more = g.input("y", "float32", (2, 6, 8))
    return g.add("gather", g.add("concat", found, more, axis=0), ids, axis=0)


def turned(g: GraphBuilder) -> str:
    """Rows by number, written along other axes than they are read; what is added lies as the result does."""
    x, ids = g.input("x", "float32", (40, 64)), g.input("ids", "int64", (32,))
    found = g.add("transpose", g.add("gather", x, ids, axis=0), permutation=(1, 0))
    return g.add("add", found, g.input("y", "float32", (64, 32)))


PROGRAMS: dict[Callable[[GraphBuilder], str], Numbers] = {
    embedded: {"ids": (50,)},
    likelihood: {"ids": (40,)},
    of_images: {"ids": (5,)},
    of_columns: {"ids": (30,)},
    joined: {"ids": (12,)},
    of_joined: {"ids": (7,)},
    turned: {"ids": (40,)},
    of_gathered: {"ids": (20,), "places": (12,)},
}


def drawn(graph: Graph, numbers: Numbers) -> list[Any]:
    rng = np.random.default_rng(1)
    found = []
    for node in graph.inputs:
        shape, dtype = node.tile.known_shape, DTYPES.get(node.tile.ttype.name, node.tile.ttype.name)
        if node.name not in numbers:
            found.append(rng.uniform(-1, 1, shape).astype(dtype))
            continue
        (most,) = numbers[node.name]
        ids = rng.integers(0, most, shape).astype(dtype)
        ids.flat[0], ids.flat[-1] = most - 1, 0
        found.append(ids)
    return found


def launched(graph: Graph, mapping: Any, inputs: Sequence[Any]) -> tuple[Any, Any]:
    tiles = [graph.tile(value) for value in graph.outputs]
    outputs = [np.full(tile.known_shape or 1, np.nan, DTYPES[tile.ttype.name]) for tile in tiles]
    function = emit_chain(graph, get_device("cuda/sm_90a"), "chain", mapping)
    return simulate_launch(function, [*inputs, *outputs]), outputs


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_gathers_in_every_mapping(program: Callable[[GraphBuilder], str]) -> None:
    build = GraphBuilder("chain")
    graph = build.finish(program(build))
    inputs = drawn(graph, PROGRAMS[program])
    exact, tried = np.asarray(evaluate(graph, inputs)), 0
    for moves in ranked(graph):
        try:
            found, (got,) = launched(graph, moves.mapping, inputs)
        except ScheduleError:
            assert moves.mapping.tile[0] or moves.mapping.spread > 1
            continue
        tried += 1
        assert not found.findings, (moves.mapping, found.findings)
        np.testing.assert_allclose(got, exact, atol=3 * BOUNDS["float32"], rtol=0, err_msg=str(moves.mapping))
    assert tried


@pytest.mark.parametrize("number", [-1, 40, 1 << 32])
def test_numbers_of_no_row_are_errors(number: int) -> None:
    """Where a kernel would stop: it reads nothing there."""
    build = GraphBuilder("chain")
    graph = build.finish(likelihood(build))
    x, ids = drawn(graph, {"ids": (40,)})
    ids[3] = number
    found, _ = launched(graph, None, [x, ids])
    assert [finding.kind for finding in found.findings] == ["out of bounds"]
    assert "a row that is not there" in str(found.findings[0])


def test_no_number_waits_for_the_check_of_another() -> None:
    """A kernel may stop at its end alone: what lies behind a branch is not loaded before it is decided."""
    build = GraphBuilder("chain")
    x, (i, j) = build.input("x", "float32", (50, 64)), (build.input(name, "int64", (96,)) for name in "ij")
    edges = build.add("sub", *(build.add("gather", x, ids, axis=0, from_end=True) for ids in (i, j)))
    graph = build.finish(edges)
    four = Mapping(num=4, threads=128)
    text = emit_chain(graph, get_device("cuda/sm_90a"), "chain", four).script()
    assert text.count("__trap") == 1
    assert text.index("__trap") > text.rindex("T.ptx")
    inputs = drawn(graph, {"i": (50,), "j": (50,)})
    inputs[1][5], inputs[2][7] = -50, -1
    found, (got,) = launched(graph, four, inputs)
    assert not found.findings
    np.testing.assert_array_equal(got, inputs[0][inputs[1]] - inputs[0][inputs[2]])
    inputs[2][7] = -51
    assert [finding.kind for finding in launched(graph, None, inputs)[0].findings] == ["out of bounds"]
