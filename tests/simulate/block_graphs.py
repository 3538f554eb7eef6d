"""Block graphs by hand, as the search finds them, with what they compute in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.ir import Graph, GraphBuilder
from ladder.lower.blocks import BlockSchedule
from ladder.lower.blocks.kernel import emit
from ladder.simulate import SimulationResult, simulate_launch
from targets import get_device

Array = Any


@dataclass(frozen=True)
class Case:
    """A kernel graph of one block graph, and its meaning."""

    graph: Graph
    expected: Callable[..., Array]

    @property
    def block(self) -> Graph:
        """The block graph."""
        (body,) = (node.body for node in self.graph.nodes if node.body is not None)
        return body


def rmsnorm_matmul(tokens: int, k: int, n: int, kt: int, nt: int, dtype: str = "float16") -> Case:
    """X / rms(X) · W, divided after the product."""
    g = GraphBuilder("rmsnorm_matmul")
    x, w = g.input("X", dtype, (tokens, k)), g.input("W", dtype, (k, n))
    b = GraphBuilder("block", "block", grid={"Ng": n // nt}, loops={"Kl": k // kt})
    xt = b.add("load", b.input("x", dtype, (tokens, k)), grid=(-1,), loop=(1,), shape=(tokens, kt))
    wt = b.add("load", b.input("w", dtype, (k, n)), grid=(1,), loop=(0,), shape=(kt, nt))
    product = b.add("accumulate", b.add("matmul", xt, wt, type="float32"))
    square = b.add("square", b.add("convert", xt, type="float32"))
    total = b.add("accumulate", b.add("reduce_sum", square, axis=1))
    mean = b.add("mul", total, b.add("constant", value=1 / k, type="float32"))
    y = b.add("convert", b.add("div", product, b.add("sqrt", mean)), type=dtype)
    body = b.finish(b.add("store", y, grid=(1,), shape=(tokens, n)))
    graph = g.finish(*g.nest(body, x, w))
    return Case(graph, lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True)) @ w)


def gated_mlp(tokens: int, k: int, n: int, kt: int, nt: int) -> Case:
    """silu(X · G) * (X · U): two products in one block."""
    g = GraphBuilder("gated_mlp")
    inputs = [g.input("X", "float16", (tokens, k)), *(g.input(w, "float16", (k, n)) for w in "GU")]
    b = GraphBuilder("block", "block", grid={"Ng": n // nt}, loops={"Kl": k // kt})
    x = b.add("load", b.input("x", "float16", (tokens, k)), grid=(-1,), loop=(1,), shape=(tokens, kt))
    sums = [
        b.add(
            "accumulate",
            b.add(
                "matmul", x,
                b.add("load", b.input(w, "float16", (k, n)), grid=(1,), loop=(0,), shape=(kt, nt)),
                type="float32",
            ),
        )
        for w in "gu"
    ]  # fmt: skip
    y = b.add("convert", b.add("mul", b.add("silu", sums[0]), sums[1]), type="float16")
    body = b.finish(b.add("store", y, grid=(1,), shape=(tokens, n)))
    return Case(g.finish(*g.nest(body, *inputs)), lambda x, g, u: _silu(x @ g) * (x @ u))


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def lora(tokens: int, k: int, n: int, rank: int, nt: int, kt: int = 0) -> Case:
    """X · W + (X · A) · B: by concatenation without a loop (kt = 0), by a product after the loop with."""
    g = GraphBuilder("lora")
    shapes = {"x": (tokens, k), "w": (k, n), "a": (k, rank), "c": (rank, n)}
    inputs = [g.input(name.upper(), "float16", shape) for name, shape in shapes.items()]
    b = GraphBuilder("block", "block", grid={"Ng": n // nt}, loops={"Kl": k // kt} if kt else {})
    depth = kt or k
    tiles = {"x": (tokens, depth), "w": (depth, nt), "a": (depth, rank), "c": (rank, nt)}
    split = {"x": (-1, 1), "w": (1, 0), "a": (-1, 0), "c": (1, -1)}
    x, w, a, c = (
        b.add(
            "load", b.input(name, "float16", shape), grid=split[name][:1],
            loop=split[name][1:] if kt else (), shape=tiles[name],
        )
        for name, shape in shapes.items()
    )  # fmt: skip
    low = b.add("matmul", x, a, type="float32")
    if kt:
        wide = b.add("accumulate", b.add("matmul", x, w, type="float32"))
        low = b.add("convert", b.add("accumulate", low), type="float16")
        total = b.add("add", wide, b.add("matmul", low, c, type="float32"))
    else:
        rows = b.add("concat", x, b.add("convert", low, type="float16"), axis=1)
        total = b.add("matmul", rows, b.add("concat", w, c, axis=0), type="float32")
    body = b.finish(b.add("store", b.add("convert", total, type="float16"), grid=(1,), shape=(tokens, n)))
    return Case(g.finish(*g.nest(body, *inputs)), lambda x, w, a, c: x @ w + x @ a @ c)


def attention(heads: int, q: int, d: int, kv: int, qt: int, kt: int, scale: float = 1.0) -> Case:
    """softmax(scale Q · K) · V with running maxima."""
    g = GraphBuilder("attention")
    shapes = {"q": (heads, q, d), "k": (heads, d, kv), "v": (heads, kv, d)}
    inputs = [g.input(name.upper(), "float16", shape) for name, shape in shapes.items()]
    b = GraphBuilder("block", "block", grid={"Hg": heads, "Qg": q // qt}, loops={"Sl": kv // kt})
    tiles = {"q": (1, qt, d), "k": (1, d, kt), "v": (1, kt, d)}
    grids = {"q": (0, 1), "k": (0, -1), "v": (0, -1)}
    loops = {"q": (-1,), "k": (2,), "v": (1,)}
    qx, kx, vx = (
        b.add("load", b.input(n, "float16", shapes[n]), grid=grids[n], loop=loops[n], shape=tiles[n])
        for n in shapes
    )
    s = b.add("matmul", qx, kx, type="float32")
    s = b.add("mul", s, b.add("constant", value=scale, type="float32"))
    m = b.add("reduce_max", s, axis=2)
    p = b.add("exp", b.add("sub", s, m))
    total = b.add("accumulate", b.add("reduce_sum", p, axis=2), m, kind="rescale")
    rounded = b.add("convert", p, type="float16")
    o = b.add("accumulate", b.add("matmul", rounded, vx, type="float32"), m, kind="rescale")
    y = b.add("convert", b.add("div", o, total), type="float16")
    body = b.finish(b.add("store", y, grid=(0, 1), shape=(heads, q, d)))

    def expected(q: Array, k: Array, v: Array) -> Array:
        weights = np.exp(scale * (q @ k) - (scale * (q @ k)).max(-1, keepdims=True))
        return weights @ v / weights.sum(-1, keepdims=True)

    return Case(g.finish(*g.nest(body, *inputs)), expected)


def add_then_multiply(tokens: int, k: int, rank: int, n: int) -> Case:
    """X · (W + A · C): a computed second operand, which passes through shared memory."""
    g = GraphBuilder("merged_lora")
    shapes = {"x": (tokens, k), "w": (k, n), "a": (k, rank), "c": (rank, n)}
    inputs = [g.input(name.upper(), "float16", shape) for name, shape in shapes.items()]
    b = GraphBuilder("block", "block")
    x, w, a, c = (
        b.add("load", b.input(name, "float16", shape), shape=shape) for name, shape in shapes.items()
    )
    both = b.add("add", b.add("convert", w, type="float32"), b.add("matmul", a, c, type="float32"))
    y = b.add("matmul", x, b.add("convert", both, type="float16"), type="float32")
    body = b.finish(b.add("store", b.add("convert", y, type="float16"), shape=(tokens, n)))
    return Case(g.finish(*g.nest(body, *inputs)), lambda x, w, a, c: x @ (w + a @ c))


def run(case: Case, schedule: BlockSchedule, **options: Any) -> tuple[SimulationResult, float]:
    """Simulate a kernel; return what was found and the relative error against float64."""
    arch = options.pop("arch", "sm_90a")
    function = emit(case.block, get_device(f"cuda/{arch}"), schedule, "simulated")
    generator = np.random.default_rng(0)
    names = [node.tile.ttype.name for node in case.graph.inputs]
    arrays = [
        (generator.standard_normal(node.tile.known_shape) * 0.5).astype(_numpy(name))
        for node, name in zip(case.graph.inputs, names, strict=True)
    ]
    out = case.graph.tile(case.graph.outputs[0])
    y = np.full(out.known_shape, np.nan, _numpy(out.ttype.name))
    flat = [array.reshape(-1) for array in (*arrays, y)]
    result = simulate_launch(function, flat, **options)
    wanted = case.expected(*(array.astype(np.float64) for array in arrays))
    error = np.linalg.norm(y.astype(np.float64) - wanted) / np.linalg.norm(wanted)
    return result, float(error)


def _numpy(name: str) -> Any:
    import ml_dtypes

    return ml_dtypes.bfloat16 if name == "bfloat16" else np.dtype(name)
