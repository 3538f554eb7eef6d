"""Chains for GPUs, executed by the simulator: right, in bounds, without races."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.chain_programs import PROGRAMS
from ladder.cli.first_kernels import whole_chain
from ladder.frontend.aten_models import MODEL_ROWS
from ladder.frontend.importer import Importer
from ladder.ir import Graph, GraphBuilder, evaluate
from ladder.lower.chain import emit_chain
from ladder.movement.choose import machine_of, ranked
from ladder.movement.mapping import Mapping, mappings
from ladder.partition import partition
from ladder.simulate import SimulationResult, simulate_launch
from targets import get_device

NUMPY = {"float32": np.float32, "float16": np.float16}
TARGETS = ["cuda/sm_90a", "cuda/sm_80", "rocm/gfx942"]


def softmax(width: int, ttype: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("convert", g.input("x", ttype, (3, width)), type="float32")
    powers = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=1)))
    ratio = g.add("div", powers, g.add("reduce_sum", powers, axis=1))
    return g.finish(g.add("convert", ratio, type=ttype))


def residual_norm(width: int, ttype: str) -> Graph:
    """Return two results of one row: the sum, and its root mean square norm."""
    g = GraphBuilder("chain")
    x, y, w = (
        g.input("x", ttype, (2, 5, width)),
        g.input("y", ttype, (10, width)),
        g.input("w", ttype, (width,)),
    )
    total = g.add("add", x, g.add("reshape", y, shape=(2, 5, width)))
    wide = g.add("convert", total, type="float32")
    mean = g.add(
        "mul",
        g.add("reduce_sum", g.add("square", wide), axis=2),
        g.add("constant", value=1 / width, type="float32"),
    )
    normed = g.add("convert", g.add("mul", wide, g.add("rsqrt", mean)), type=ttype)
    return g.finish(total, g.add("mul", w, normed))


def rotary(width: int, ttype: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("transpose", g.input("x", ttype, (2, 3, 4, width)), permutation=(0, 2, 1, 3))
    cos, sin, half = g.input("cos", ttype, (3, width)), g.input("sin", ttype, (3, width)), width // 2
    low = g.add("slice", x, begin=(0, 0, 0, 0), shape=(2, 4, 3, half))
    high = g.add("slice", x, begin=(0, 0, 0, half), shape=(2, 4, 3, half))
    turned = g.add("concat", g.add("neg", high), low, axis=3)
    return g.finish(g.add("add", g.add("mul", x, cos), g.add("mul", turned, sin)))


def shuffle(width: int, ttype: str) -> Graph:
    """Return concat, shuffle of channels and split, with a join across rows."""
    g = GraphBuilder("chain")
    a, b = g.input("a", ttype, (2, 4, 3, width)), g.input("b", ttype, (2, 4, 3, width))
    joined = g.add("reshape", g.add("concat", a, g.add("relu", b), axis=1), shape=(2, 2, 4, 3, width))
    mixed = g.add("reshape", g.add("transpose", joined, permutation=(0, 2, 1, 3, 4)), shape=(2, 8, 3, width))
    return g.finish(g.add("slice", g.add("relu", mixed), begin=(0, 4, 0, 0), shape=(2, 4, 3, width)))


def pool(width: int, ttype: str) -> Graph:
    g = GraphBuilder("chain")
    x = g.add("pad", g.input("x", ttype, (1, 2, 6, width)), low=(0, 0, 1, 1), high=(0, 0, 1, 1), value=-100.0)
    sizes = (("h", 3), ("w", width // 2), ("r", 3), ("s", 3))
    windows = g.add("map", x, spec="n c 2*h+r 2*w+s -> n c h w r s", sizes=sizes)
    return g.finish(g.add("reduce_max", g.add("reduce_max", windows, axis=5, keep=False), axis=4, keep=False))


def large_windows(shape: tuple[int, ...], spec: str) -> Graph:
    """Return sums over windows of 9 by 9, side by side, along two axes."""
    g = GraphBuilder("chain")
    sizes = (("h", 2), ("w", 4), ("r", 9), ("s", 9))
    x = g.add("map", g.input("x", "float32", shape), spec=spec, sizes=sizes)
    rank = len(g.tile(x).shape)
    for axis in (rank - 1, rank - 2):
        x = g.add("reduce_sum", x, axis=axis, keep=False)
    return g.finish(x)


@pytest.mark.parametrize(
    ("shape", "spec"),
    [((2, 18, 36), "n 9*h+r 9*w+s -> n h w r s"), ((18, 36, 8), "9*h+r 9*w+s c -> h w c r s")],
)
def test_large_windows_by_a_thread_each(
    shape: tuple[int, ...], spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are many; few are shared by lanes. In both orders of channels."""
    graph = large_windows(shape, spec)
    assert all(candidate.lanes > 1 for candidate in mappings(graph))
    monkeypatch.setattr("ladder.movement.mapping.BUSY_ROWS", 1)
    assert all(candidate.lanes == 1 for candidate in mappings(graph))
    check(graph, np.float32, Mapping())


def heads(width: int, ttype: str) -> Graph:
    """Return norms of three heads and of two, and a sum without reductions: three loops over rows."""
    g = GraphBuilder("chain")
    x, w = g.input("x", ttype, (2, 6 * width)), g.input("w", ttype, (width,))

    def part(begin: int, count: int) -> str:
        cut = g.add("slice", x, begin=(0, begin * width), shape=(2, count * width))
        return g.add("reshape", cut, shape=(2, count, width))

    def norm(rows: str) -> str:
        least = g.add("constant", value=1e-3, type="float32")
        wide = g.add("convert", rows, type="float32")
        root = g.add("rsqrt", g.add("add", g.add("reduce_sum", g.add("square", wide), axis=2), least))
        return g.add("mul", w, g.add("convert", g.add("mul", wide, root), type=ttype))

    high, low = (
        g.add("slice", part(0, 3), begin=(0, 0, b), shape=(2, 3, width // 2)) for b in (width // 2, 0)
    )
    turned = g.add("concat", g.add("neg", high), low, axis=2)
    return g.finish(g.add("add", norm(part(0, 3)), turned), norm(part(3, 2)), g.add("add", part(5, 1), w))


CASES = {
    f"{make.__name__} {width} {ttype}": (make, width, ttype)
    for make, widths in (
        (softmax, (7, 64, 1000)),
        (residual_norm, (48, 640)),
        (rotary, (16,)),
        (heads, (16, 20)),
        (shuffle, (8, 7)),
        (pool, (8,)),
    )
    for width in widths
    for ttype in NUMPY
}


@pytest.mark.parametrize("case", CASES)
def test_simulated(case: str) -> None:
    make, width, ttype = CASES[case]
    check(make(width, ttype), NUMPY[ttype])


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["int64", "int32"])
def test_integers_over_warps(kind: str, target: str) -> None:
    """Sums of 64 bits pass between warps whole."""
    g = GraphBuilder("chain")
    graph = g.finish(g.add("reduce_sum", g.input("x", kind, (3, 640)), axis=1, keep=False))
    x = np.random.default_rng(0).integers(-(2**30), 2**30, (3, 640)).astype(kind)
    x = x * 2**30 if kind == "int64" else x // 1024
    for mapping in (Mapping(128), Mapping(256, 3)):
        y = np.zeros(3, kind)
        result = simulated(emit_chain(graph, get_device(target), "chain", mapping), target, [x, y], (1,))
        assert not result.findings, result.report()
        assert np.array_equal(y, x.sum(1, dtype=kind))


@pytest.mark.parametrize("target", TARGETS)
def test_rows_shorter_than_a_team(target: str) -> None:
    """What a reduction loaded where a lane had a turn is loaded again by lanes that had none."""
    g = GraphBuilder("chain")
    shares, place = g.input("x", "float32", (1, 8)), g.input("p", "int64", (8,))
    ratio = g.add("convert", g.add("div", shares, g.add("reduce_sum", shares, axis=1)), type="float16")
    here = g.add("equal", g.add("reshape", place, shape=(1, 8)), g.add("reshape", place, shape=(8, 1)))
    none = g.add("constant", value=0.0, type="float16")
    graph = g.finish(g.add("select", here, ratio, none))
    x = np.random.default_rng(0).uniform(1, 2, (1, 8)).astype(np.float32)
    for mapping in (None, Mapping(get_device(target).warp), Mapping(128)):
        y = np.full((8, 8), np.nan, np.float16)
        function = emit_chain(graph, get_device(target), "chain", mapping)
        result = simulated(function, target, [x, np.arange(8), y], (2,))
        assert not result.findings, result.report()
        assert np.allclose(y, np.diag((x / x.sum()).reshape(-1)), atol=1e-3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["rocm/gfx90a", "rocm/gfx942", "rocm/gfx1100"])
def test_simulated_on_amd(case: str, target: str) -> None:
    make, width, ttype = CASES[case]
    check(make(width, ttype), NUMPY[ttype], device=target)


def simulated(function: Any, target: str, arrays: Sequence[Any], outputs: Sequence[int]) -> SimulationResult:
    """Execute a kernel for a target."""
    return simulate_launch(function, arrays, target=target, outputs=outputs)


def check(graph: Graph, dtype: type, mapping: Mapping | None = None, device: str = "cuda/sm_90a") -> None:
    """Simulate a chain on random inputs and compare with the reference."""
    rng = np.random.default_rng(0)
    inputs = [rng.uniform(-2, 2, node.tile.shape).astype(dtype) for node in graph.inputs]
    outputs = [np.full(graph.tile(value).shape, np.nan, dtype) for value in graph.outputs]
    function = emit_chain(graph, get_device(device), "chain", mapping)
    places = tuple(range(len(inputs), len(inputs) + len(outputs)))
    result = simulated(function, device, [*inputs, *outputs], places)
    assert not result.findings, result.report()
    assert not result.bank_conflicts, result.bank_conflicts
    expected = evaluate(graph, inputs)
    for got, exact in zip(outputs, expected if isinstance(expected, tuple) else (expected,), strict=True):
        error = np.linalg.norm(got.astype(np.float64) - exact) / np.linalg.norm(exact)
        assert error < (1e-6 if dtype is np.float32 else 1e-3)


def cached(heads: int, kept: int, tokens: int, size: int, ttype: str) -> Graph:
    """Return columns of one product as queries and as rows that are put into caches of 8 tokens."""
    g = GraphBuilder("chain")
    width = (heads + 2 * kept) * size
    x = g.input("x", ttype, (2, tokens, width))
    ids = g.input("ids", "int64", (tokens,))
    bases = [g.input(name, ttype, (2, kept, 8, size)) for name in ("keys", "values")]
    parts, begin = [], 0
    for count in (heads, kept, kept):
        part = g.add("slice", x, begin=(0, 0, begin), shape=(2, tokens, count * size))
        part = g.add("reshape", part, shape=(2, tokens, count, size))
        parts.append(g.add("transpose", part, permutation=(0, 2, 1, 3)))
        begin += count * size
    puts = [
        g.add("put", base, ids, g.add("neg", p), axis=2) for base, p in zip(bases, parts[1:], strict=True)
    ]
    return g.finish(g.add("relu", parts[0]), *puts)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("ttype", NUMPY)
@pytest.mark.parametrize(("tokens", "size"), [(1, 16), (3, 8), (2, 5)])
def test_rows_are_put_in_place(target: str, ttype: str, tokens: int, size: int) -> None:
    graph = cached(4, 2, tokens, size, ttype)
    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, graph.inputs[0].tile.shape).astype(NUMPY[ttype])
    ids = np.array([-3, 0, 20][:tokens])
    caches = [rng.uniform(-2, 2, (2, 2, 8, size)).astype(NUMPY[ttype]) for _ in range(2)]
    inside = ids < 8
    outputs = [np.full(graph.tile(graph.outputs[0]).shape, np.nan, NUMPY[ttype]), *(c.copy() for c in caches)]
    function = emit_chain(graph, get_device(target), "chain")
    result = simulated(function, target, [x, ids, *outputs], (2, 3, 4))
    assert {finding.kind for finding in result.findings} <= {"unwritten"}, result.report()
    queries, keys, values = np.split(x, [4 * size, 6 * size], axis=2)
    heads = [part.reshape(2, tokens, -1, size).transpose(0, 2, 1, 3) for part in (queries, keys, values)]
    assert np.array_equal(outputs[0], np.maximum(heads[0], 0))
    for got, before, rows in zip(outputs[1:], caches, heads[1:], strict=True):
        before[:, :, ids[inside]] = -rows[:, :, inside]
        assert np.array_equal(got, before)


@pytest.mark.parametrize("name", PROGRAMS)
def test_measured_programs(name: str) -> None:
    """What `benchmarks.chains` measures is right in the first mappings of the model."""
    check_program(name, "cuda/sm_90a", 4)


@pytest.mark.parametrize("name", PROGRAMS)
def test_measured_programs_on_amd(name: str) -> None:
    """All of them in all mappings were right, on gfx90a, gfx942 and gfx1100."""
    check_program(name, "rocm/gfx942", 4)


def check_program(name: str, target: str, count: int) -> None:
    """Check the mappings that the model ranks first."""
    program = PROGRAMS[name]
    arguments = [torch.zeros(shape, dtype=torch.float16) for shape in program.shapes["small"]]
    graph = whole_chain(program.function, arguments)
    for moves in ranked(graph, machine_of(get_device(target)))[:count]:
        check(graph, np.float16, moves.mapping, target)


@pytest.mark.parametrize("case", [softmax, residual_norm, rotary])
def test_ampere(case: Callable[[int, str], Graph]) -> None:
    check(case(64, "float16"), np.float16, device="cuda/sm_80")


@pytest.mark.parametrize("ttype", NUMPY)
def test_tiles_at_edges(ttype: str) -> None:
    """Tiles that the result does not fill, batches beside them, and rows of 4 elements per plane."""
    g = GraphBuilder("chain")
    x = g.input("x", ttype, (3, 72, 4, 20))
    y = g.add("mul", g.add("transpose", x, permutation=(0, 2, 3, 1)), g.input("w", ttype, (72,)))
    for moves in ranked(graph := g.finish(y)):
        if moves.mapping.tile[0]:
            check(graph, NUMPY[ttype], moves.mapping)
            break
    else:
        pytest.fail("no mapping with tiles")


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("width", [64, 1000, 7])
def test_tokens_are_quantized_in_the_chain(target: str, width: int) -> None:
    """Codes and scales as the kernel for tokens gives them, ties to even."""
    im = Importer("chain")
    im.few_launches = True
    x = im.g.input("x", "float16", (3, width))
    codes, scale = MODEL_ROWS["quantize_tokens.default"](im, "int8", im.g.add("relu", x), "int8")
    graph = im.g.finish(codes, scale)
    values = np.random.default_rng(0).integers(-255, 255, (3, width)).astype(np.float16) / 2
    values[:, 0], values[2] = 127, 0
    outputs = [np.full((3, width), 99, np.int8), np.full(3, np.nan, np.float32)]
    function = emit_chain(graph, get_device(target), "chain")
    result = simulated(function, target, [values, *outputs], (1, 2))
    assert not result.findings, result.report()
    assert np.array_equal(outputs[0], np.rint(np.maximum(values, 0)).astype(np.int8))
    assert outputs[1].tolist() == [1.0, 1.0, 2.0**-126]


def test_chains_of_open_sizes_without_elements_are_divided() -> None:
    """An extent 0 makes the number of elements known, though not that of rows."""
    g = GraphBuilder("model")
    x, y = g.input("x", "float32", ("S", 3, 0)), g.input("y", "float16", (4, "S", 0))
    graph = g.finish(g.add("exp", x), g.add("neg", y))
    parts = partition(graph, side_by_side=True, device=get_device("cuda/sm_90a"))
    assert {value for part in parts for value in part.outputs} == set(graph.outputs)


def test_few_joins_of_joins_are_in_one_kernel() -> None:
    """As a Hadamard transform has them, written out: each doubles what a kernel computes and emits."""
    g = GraphBuilder("model")
    value = g.input("x", "float32", (64, 128))
    for half in (1, 2, 4, 8, 16, 32, 64):
        pairs = g.add("reshape", value, shape=(64, 64 // half, 2, half))
        a, b = (
            g.add("slice", pairs, begin=(0, 0, at, 0), shape=(64, 64 // half, 1, half)) for at in range(2)
        )
        value = g.add("concat", g.add("add", a, b), g.add("sub", a, b), axis=2)
    parts = partition(g.finish(value), side_by_side=True, device=get_device("cuda/sm_90a"))
    assert [sum(node.operator == "concat" for node in part.graph.nodes) for part in parts] == [1, 3, 3]
