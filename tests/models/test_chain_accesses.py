"""How kernels of chains read and write memory: in vectors where these fit, and each thread one after none."""

from __future__ import annotations

import re

import numpy as np
import pytest
from test_gpu_chains import check

from ladder.ir import Graph, GraphBuilder
from ladder.lower.chain import emit_chain
from ladder.movement.choose import ranked
from ladder.movement.mapping import Mapping
from targets import get_device

TARGETS = ["cuda/sm_90a", "rocm/gfx942"]


def script(graph: Graph, mapping: Mapping | None = None) -> str:
    """Return the text of a chain's kernel for an H200."""
    return str(emit_chain(graph, get_device("cuda/sm_90a"), "chain", mapping).script())


def windows(side: int, window: int, channels: int, kind: str = "float16") -> Graph:
    """Return pictures, channels first, in windows whose channels are last."""
    g, count = GraphBuilder("chain"), side // window
    x = g.add("transpose", g.input("x", kind, (2, channels, side, side)), permutation=(0, 2, 3, 1))
    x = g.add("reshape", x, shape=(2, count, window, count, window, channels))
    return g.finish(g.add("transpose", x, permutation=(0, 1, 3, 2, 4, 5)))


def loads(kernel: str) -> set[str]:
    """Return the kinds of loads from global memory: of single elements ``""``, else ``"v2"`` or ``"v4"``."""
    found = re.findall(r'T.ptx.ld\(.*"global".*"(v[24]|)", "[us]\d+"', kernel)
    return {*found, *re.findall(r"reinterpret\(\"uint16\", buffer\[()", kernel)}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("side", "window"), [(28, 7), (12, 3)])
def test_windows_of_any_side_are_read_in_vectors(target: str, side: int, window: int) -> None:
    """Rows of a tile follow each other as in the picture, across the borders of windows."""
    graph = windows(side, window, 64)
    mapping = next(moves.mapping for moves in ranked(graph) if moves.mapping.tile[0])
    check(graph, np.float16, mapping, target)
    if target.startswith("cuda"):
        assert loads(script(graph, mapping)) == {"v4"}


def test_borders_of_many_rows_have_threads_of_their_own() -> None:
    """They take blocks before those of what lies between, instead of turns of the same threads."""
    g, rows, columns = GraphBuilder("chain"), 1024, 256
    x = g.input("x", "float32", (rows, columns))
    parts = [(0, columns - 1, 1), (0, 0, columns - 1)]
    last, rest = (g.add("slice", x, begin=(0, begin), shape=(rows, n)) for _, begin, n in parts)
    graph = g.finish(g.add("add", x, g.add("concat", last, rest, axis=1)))
    vectors = rows * (columns // 4 - 2)
    blocks = re.search(r"cta_id\(\[(\d+)\]\)", script(graph, Mapping(threads=256)))
    assert blocks is not None
    assert int(blocks[1]) * 256 > vectors + rows
