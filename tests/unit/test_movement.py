"""Movement graphs: operators split, patterns, rules, levels, their text, which mapping is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.ir.formulas import FORMULAS
from ladder.movement.choose import ranked
from ladder.movement.decompose import canonical, decompose
from ladder.movement.graph import Move, MovementGraph, Sync
from ladder.movement.instantiate import instantiate
from ladder.movement.mapping import Mapping
from ladder.movement.model import source_slice, traffic
from ladder.movement.pattern import addresses, unravel
from ladder.movement.rewrite import rewrite
from tests.movement_values import apply, run, verify
from tile_types.errors import VerificationError


def norm(rows: int = 6, width: int = 128) -> Graph:
    """Return two results of a row: the sum, and its root mean square norm."""
    g = GraphBuilder("norm")
    x, y, w = g.input("x", "float16", (rows, width)), g.input("y", "float16", (rows, width)), "w"
    g.input(w, "float16", (width,))
    total = g.add("add", x, y)
    wide = g.add("convert", total, type="float32")
    scale = g.add("constant", value=1 / width, type="float32")
    mean = g.add("mul", g.add("reduce_sum", g.add("square", wide), axis=1), scale)
    normed = g.add("convert", g.add("mul", wide, g.add("rsqrt", mean)), type="float16")
    return g.finish(total, g.add("mul", w, normed))


def turned(rows: int, columns: int) -> Graph:
    g = GraphBuilder("turned")
    x = g.add("transpose", g.input("x", "float16", (columns, rows)), permutation=(1, 0))
    return g.finish(g.add("silu", x))


def levels(graph: MovementGraph) -> set[str]:
    return {tensor.slice.level for tensor in graph.tensors.values()}


@pytest.mark.parametrize("operator", FORMULAS)
def test_split_operators_equal_the_whole(operator: str) -> None:
    g = GraphBuilder("one")
    graph = g.finish(g.add(operator, g.input("x", "float32", (401,))))
    assert operator not in {node.operator for node in decompose(graph).nodes}
    x = np.linspace(-9, 9, 401)
    np.testing.assert_allclose(evaluate(decompose(graph), [x]), evaluate(graph, [x]), atol=3e-7)


def test_joins_become_choices() -> None:
    g = GraphBuilder("join")
    parts = [g.input(name, "float32", (2, width)) for name, width in (("a", 3), ("b", 1), ("c", 4))]
    graph = g.finish(g.add("concat", *parts, axis=1))
    plain = canonical(graph)
    assert "concat" not in {node.operator for node in plain.nodes}
    inputs = [np.random.default_rng(0).normal(size=node.tile.known_shape) for node in graph.inputs]
    np.testing.assert_array_equal(evaluate(plain, inputs), evaluate(graph, inputs))


def test_addresses_say_what_a_pattern_reads() -> None:
    g = GraphBuilder("views")
    x = g.input("x", "float32", (4, 6, 5))
    y = g.add("transpose", x, permutation=(2, 0, 1))
    y = g.add("reshape", y, shape=(10, 12))
    y = g.add("slice", y, begin=(1, 2), shape=(4, 5), step=(2, 2))
    y = g.add("repeat", y, axis=1, times=2)
    y = g.add("pad", y, low=(1, 0), high=(0, 2), value=-1.0)
    y = g.add("broadcast", y, shape=(3, *g.tile(y).shape))
    pattern = g.finish(y).nodes[1:]
    source = np.arange(120.0).reshape(4, 6, 5)
    read = apply(pattern, source)
    flat, inside = addresses(pattern, source.shape, unravel(np.arange(read.size), read.shape))
    np.testing.assert_array_equal(np.where(inside, flat, -1), read.reshape(-1))


def test_rows_stay_in_registers() -> None:
    graph = norm()
    moves = rewrite(instantiate(graph, Mapping(32, 1, 4)))
    found = traffic(moves)
    assert found.launches == 1
    assert found.syncs == {"warp": 1, "block": 0, "device": 0}
    assert found.bytes["device"] == 2 * (4 * 6 * 128 + 128)
    assert levels(moves) == {"immediate", "lane", "warp", "device"}


def test_long_rows_meet_in_shared_memory() -> None:
    moves = rewrite(instantiate(norm(), Mapping(64, 1)))
    assert levels(moves) == {"immediate", "lane", "block", "device"}
    assert moves.syncs("block") == 1


def test_transposed_reads_pass_tiles() -> None:
    graph = turned(1024, 1024)
    best = ranked(graph)[0]
    assert best.mapping.tile[0]
    tile = next(step for step in best.steps if isinstance(step, Move) and best.level(step.result) == "block")
    assert source_slice(best, tile).level == "device"
    x = np.random.default_rng(0).normal(size=(1024, 1024))
    np.testing.assert_allclose(run(best, [x])[0], evaluate(graph, [x]), atol=1e-12)


def test_a_missing_sync_is_found() -> None:
    moves = rewrite(instantiate(norm(), Mapping(32, 1, 4)))
    steps = tuple(step for step in moves.steps if not isinstance(step, Sync))
    with pytest.raises(VerificationError, match="without a sync"):
        verify(replace(moves, steps=steps))


def test_text_shows_levels_and_costs() -> None:
    text = str(rewrite(instantiate(norm(), Mapping(32, 1, 4))))
    assert text.startswith("movement norm [rows of 32 lanes x 1, 4 per block] {")
    assert "partial reduce_sum" in text
    assert "sync warp" in text
    assert text.endswith("// 1 launches; moved: warp 1536 B, device 6400 B; syncs: warp 1")


def test_numbers_are_mapped_too() -> None:
    """A chain of a tensor of rank 0, as the positions of static caches are."""
    g = GraphBuilder("counted")
    one = g.add("constant", value=1, type="int64")
    graph = g.finish(g.add("add", g.input("count", "int64", ()), one))
    assert ranked(graph)
