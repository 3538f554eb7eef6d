"""How kernels of chains read and write memory: in vectors where these fit, and each thread one after none."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from test_column_reductions import run
from test_gpu_chains import check

from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain, vector_loops
from ladder.movement.choose import machine_of, ranked
from ladder.movement.mapping import Mapping
from ladder.simulate import simulate_launch
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


def tokens(kind: str, first: int, last: int) -> Graph:
    """Return patches of pictures with some tokens before and behind them, and positions added."""
    g, count = GraphBuilder("chain"), first + 24 + last
    x = g.add("reshape", g.input("x", kind, (2, 72, 4, 6)), shape=(2, 72, 24))
    x = g.add("transpose", x, permutation=(0, 2, 1))
    before, behind = (g.input(name, kind, (2, n, 72)) for name, n in (("before", first), ("behind", last)))
    parts = [part for part, n in ((before, first), (x, 24), (behind, last)) if n]
    return g.finish(g.add("add", g.add("concat", *parts, axis=1), g.input("at", kind, (count, 72))))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kind", "first", "last"), [("float16", 1, 0), ("float32", 0, 3), ("float16", 2, 1), ("bfloat16", 1, 0)]
)
def test_patches_beside_tokens_pass_through_shared_memory(
    target: str, kind: str, first: int, last: int
) -> None:
    """Lanes read along the patches, under the condition that there is one."""
    graph = tokens(kind, first, last)
    mapping = next(moves.mapping for moves in ranked(graph) if moves.mapping.tile[0])
    rng = np.random.default_rng(0)
    dtype = np.dtype(kind if kind != "bfloat16" else ml_dtypes.bfloat16)
    inputs = [rng.uniform(-2, 2, node.tile.shape).astype(dtype) for node in graph.inputs]
    output = np.zeros(graph.tile(graph.outputs[0]).shape, dtype)
    kernel = emit_chain(graph, get_device(target), "chain", mapping)
    result = simulate_launch(kernel, [*inputs, output], target=target, outputs=(len(inputs),))
    assert not result.findings, result.report()
    want = evaluate(graph, [one.astype(np.float64) for one in inputs])
    np.testing.assert_allclose(output.astype(np.float64), want, rtol=1e-2 if kind == "bfloat16" else 2e-3)
    if target.startswith("cuda"):
        before, *after = str(kernel.script()).split("cta_sync")
        assert "address_of(buffer[" in before
        assert "buffer[" not in "".join(after).replace("_result", "")


def same_texts(kind: str) -> Graph:
    """Return which places of a text see which: of one document, and not behind."""
    g = GraphBuilder("chain")
    x = g.input("x", kind, (2, 40))
    rows, columns = (g.add("reshape", x, shape=shape) for shape in ((2, 40, 1), (2, 1, 40)))
    at = g.add("iota", extent=40, type="int64")
    seen = g.add("less_equal", at, g.add("reshape", at, shape=(40, 1)))
    both = g.add("both", g.add("equal", rows, columns), seen)
    far = g.add("constant", value=-65504.0, type="float32")
    near = g.add("constant", value=0.0, type="float32")
    return g.finish(g.add("convert", g.add("select", both, near, far), type="float16"))


def following(kind: str) -> Graph:
    """Return the next number at each place, twice it, and nothing behind the last."""
    g = GraphBuilder("chain")
    x = g.input("x", kind, (3, 48))
    after = g.add("slice", x, begin=(0, 1), shape=(3, 47))
    twice = g.add("add", after, after)
    end = g.add("broadcast", g.add("constant", value=-100.0, type=kind), shape=(3, 1))
    return g.finish(g.add("concat", after, end, axis=1), g.add("concat", end, twice, axis=1))


def turned(kind: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("transpose", g.input("x", kind, (2, 24, 36)), permutation=(0, 2, 1))
    return g.finish(g.add("add", x, g.input("y", kind, (2, 36, 24))))


def bordered(kind: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.input("x", kind, (5, 30))
    return g.finish(g.add("pad", g.add("add", x, x), low=(1, 2), high=(0, 4), value=0.0))


@pytest.mark.parametrize("target", [*TARGETS, "rocm/gfx1100"])
@pytest.mark.parametrize("kind", ["int64", "float64"])
@pytest.mark.parametrize("make", [same_texts, following, turned, bordered])
def test_elements_of_64_bits_are_moved_in_vectors(
    make: Callable[[str], Graph], kind: str, target: str
) -> None:
    graph = make(kind)
    rng = np.random.default_rng(5)
    given: list[Any] = []
    for node in graph.inputs:
        numbers = rng.integers(0, 3, node.tile.known_shape) * (2**40 + 1)
        numbers.flat[3], numbers.flat[-2] = -(2**62), 2**61 + 1
        given.append(numbers.astype(kind))
        if kind == "float64":
            given[-1].flat[[5, 6, 7]] = np.nan, -np.inf, -0.0
    for mapping in ranked(graph, machine_of(get_device(target)))[:4]:
        for found, exact in zip(
            run(graph, given, target, mapping.mapping), reference(make, given), strict=True
        ):
            assert found.dtype == exact.dtype
            np.testing.assert_array_equal(found, exact)
            np.testing.assert_array_equal(np.signbit(found), np.signbit(exact))


def reference(make: Callable[[str], Graph], given: Sequence[Any]) -> list[Any]:
    """Return the results of the graphs above by numpy."""
    x = given[0]
    if make is same_texts:
        seen = (x[:, :, None] == x[:, None]) & np.tri(40, dtype=bool)
        return [np.where(seen, 0, -65504).astype(np.float16)]
    if make is following:
        end = np.full((3, 1), -100, x.dtype)
        return [np.concatenate([x[:, 1:], end], 1), np.concatenate([end, x[:, 1:] + x[:, 1:]], 1)]
    if make is turned:
        return [x.transpose(0, 2, 1) + given[1]]
    return [np.pad(x + x, ((1, 0), (2, 4)))]


def test_no_element_of_64_bits_is_read_alone_where_vectors_fit() -> None:
    text = script(same_texts("int64"))
    assert '"v4"' in text
    assert (
        len(re.findall(r"= x\[|\bx\[", text)) <= 8
    )  # each element of the row that a vector is compared with


def of_a_number(rows: int) -> Graph:
    """Return quotients by a number that is read, and powers of its logarithm."""
    g = GraphBuilder("chain")
    x, scale = g.input("x", "float32", (rows, 48000)), g.input("scale", "float32", ())
    powers = g.add("exp", g.add("mul", x, g.add("log1p", scale)))
    return g.finish(g.add("div", powers, scale))


def test_functions_of_a_number_are_computed_for_several_vectors() -> None:
    """Each thread computes them, unless few would be left: then for one."""
    assert [script(of_a_number(rows)).count("T.ptx.st(") for rows in (128, 64, 8)] == [4, 2, 1]


@pytest.mark.parametrize("target", TARGETS)
def test_several_vectors_of_a_number(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_loops, "RESIDENT", 1)
    graph = of_a_number(1)
    x, scale = np.linspace(-3, 3, 48000, dtype=np.float32).reshape(1, -1), np.array([2.5], np.float32)
    x[0, [3, 4001, 47999]] = np.nan, np.inf, -np.inf
    found = np.zeros((1, 48000), np.float32)
    device = get_device(target)
    run = simulate_launch(emit_chain(graph, device, "chain"), [x, scale, found], outputs=(2,), target=device)
    assert not run.findings, run.report()
    wanted = np.exp(x.astype(np.float64) * np.log1p(2.5)) / 2.5
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
