"""Block graphs of the superoptimizer's programs, as the search finds them, for any sizes and tiles.

Written out so that benchmarks and tests of kernels need no search; `meaning` says in numpy what each
computes. A quantized weight is ``[N, K]`` and decoded within the block; dense ones are ``[K, N]``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.ir import Graph, GraphBuilder

Array = Any


@dataclass(frozen=True)
class Case:
    """A kernel graph of one block graph, and its meaning in float64."""

    graph: Graph
    meaning: Callable[..., Array]

    @property
    def block(self) -> Graph:
        """The block graph."""
        (body,) = (node.body for node in self.graph.nodes if node.body is not None)
        return body


class _Block:
    """Builds a kernel graph around one block graph."""

    def __init__(
        self, name: str, grid: dict[str, int], loops: dict[str, int], dtype: str = "float16"
    ) -> None:
        self.kernel = GraphBuilder(name)
        self.b = GraphBuilder(f"{name}_block", "block", grid=grid, loops=loops)
        self.dtype, self.looped = dtype, bool(loops)
        self.operands: list[str] = []

    def load(
        self, name: str, shape: Sequence[int], tile: Sequence[int], grid: Sequence[int], loop: int = -1,
        ttype: str | None = None,
    ) -> str:  # fmt: skip
        """Declare an input of the program and load its tile."""
        kind = ttype or self.dtype
        self.operands.append(self.kernel.input(name.upper(), kind, tuple(shape)))
        source = self.b.input(f"{name}_in", kind, tuple(shape))
        loops = (loop,) if self.looped else ()
        return self.b.add("load", source, name=name, grid=tuple(grid), loop=loops, shape=tuple(tile))

    def weight(self, name: str, n: int, k: int, nt: int, kt: int, ttype: str) -> Callable[[str], str]:
        """Load a weight's tile; returns what multiplies a value with it."""
        if ttype == self.dtype:
            tile = self.load(name, (k, n), (kt, nt), (1,), 0)
            return lambda x: self.b.add("matmul", x, tile, type="float32")
        packed = self.load(name, (n, k), (nt, kt), (0,), 1, ttype)
        decoded = self.b.add("convert", packed, type=self.dtype)
        return lambda x: self.b.add("matmul", x, decoded, transpose_b=True, type="float32")

    def mean_square(self, value: str, axis: int, count: int, accumulate: bool = False) -> str:
        """Return the root of the mean square along an axis."""
        wide = self.b.add("convert", value, type="float32")
        total = self.b.add("reduce_sum", self.b.add("square", wide), axis=axis)
        total = self.b.add("accumulate", total) if accumulate else total
        mean = self.b.add("constant", value=1 / count, type="float32")
        return self.b.add("sqrt", self.b.add("mul", total, mean))

    def finish(self, y: str, shape: Sequence[int], grid: Sequence[int]) -> Graph:
        """Round and store the result."""
        stored = self.b.add(
            "store", self.b.add("convert", y, type=self.dtype), grid=tuple(grid), shape=tuple(shape)
        )
        return self.kernel.finish(*self.kernel.nest(self.b.finish(stored), *self.operands, name="Y"))


def _silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def _rms(x: Array, axis: int) -> Array:
    return np.sqrt((x * x).mean(axis, keepdims=True))


def _softmax(x: Array) -> Array:
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def rmsnorm_matmul(
    tokens: int, k: int, n: int, nt: int, kt: int, weight: str = "float16", dtype: str = "float16"
) -> Case:
    """X / rms(X) · W, divided after the product."""
    weight = dtype if weight == "float16" else weight
    g = _Block("rmsnorm_matmul", {"Ng": n // nt}, {"Kl": k // kt}, dtype)
    x = g.load("x", (tokens, k), (tokens, kt), (-1,), 1)
    product = g.b.add("accumulate", g.weight("w", n, k, nt, kt, weight)(x))
    y = g.b.add("div", product, g.mean_square(x, 1, k, accumulate=True))
    return Case(g.finish(y, (tokens, n), (1,)), lambda x, w: x / _rms(x, 1) @ w)


def gated_mlp(tokens: int, k: int, n: int, nt: int, kt: int, weight: str = "float16") -> Case:
    """silu(X · G) * (X · U): two products in one block."""
    g = _Block("gated_mlp", {"Ng": n // nt}, {"Kl": k // kt})
    x = g.load("x", (tokens, k), (tokens, kt), (-1,), 1)
    gate, up = (g.b.add("accumulate", g.weight(w, n, k, nt, kt, weight)(x)) for w in ("gate", "up"))
    y = g.b.add("mul", g.b.add("silu", gate), up)
    return Case(g.finish(y, (tokens, n), (1,)), lambda x, gate, up: _silu(x @ gate) * (x @ up))


def lora(tokens: int, k: int, n: int, rank: int, nt: int, kt: int = 0, weight: str = "float16") -> Case:
    """X · W + (X · A) · B: by concatenation without a loop (kt = 0), by a product after the loop with."""
    g = _Block("lora", {"Ng": n // nt}, {"Kl": k // kt} if kt else {})
    depth = kt or k
    x = g.load("x", (tokens, k), (tokens, depth), (-1,), 1)
    if kt:
        wide = g.b.add("accumulate", g.weight("w", n, k, nt, depth, weight)(x))
    else:
        w = g.load("w", (k, n), (depth, nt), (1,))
    a = g.load("a", (k, rank), (depth, rank), (-1,), 0)
    c = g.load("c", (rank, n), (rank, nt), (1,))
    low = g.b.add("matmul", x, a, type="float32")
    if kt:
        low = g.b.add("convert", g.b.add("accumulate", low), type="float16")
        y = g.b.add("add", wide, g.b.add("matmul", low, c, type="float32"))
    else:
        rows = g.b.add("concat", x, g.b.add("convert", low, type="float16"), axis=1)
        y = g.b.add("matmul", rows, g.b.add("concat", w, c, axis=0), type="float32")
    return Case(g.finish(y, (tokens, n), (1,)), lambda x, w, a, c: x @ w + x @ a @ c)


def attention(
    heads: int, q: int, d: int, kv: int, qt: int, kt: int, scale: float = 1.0, *, norm: bool = False
) -> Case:
    """softmax(scale Q · K) · V with running maxima; with ``norm``, of normalised Q and K."""
    g = _Block("attention", {"Hg": heads, "Qg": q // qt}, {"Sl": kv // kt})
    queries = g.load("q", (heads, q, d), (1, qt, d), (0, 1))
    keys = g.load("k", (heads, d, kv), (1, d, kt), (0, -1), 2)
    values = g.load("v", (heads, kv, d), (1, kt, d), (0, -1), 1)
    s = g.b.add("matmul", queries, keys, type="float32")
    if scale != 1:
        s = g.b.add("mul", s, g.b.add("constant", value=scale, type="float32"))
    if norm:
        s = g.b.add("div", g.b.add("div", s, g.mean_square(queries, 2, d)), g.mean_square(keys, 1, d))
    m = g.b.add("reduce_max", s, axis=2)
    p = g.b.add("exp", g.b.add("sub", s, m))
    total = g.b.add("accumulate", g.b.add("reduce_sum", p, axis=2), m, kind="rescale")
    rounded = g.b.add("convert", p, type="float16")
    o = g.b.add("accumulate", g.b.add("matmul", rounded, values, type="float32"), m, kind="rescale")
    graph = g.finish(g.b.add("div", o, total), (heads, q, d), (0, 1))

    def meaning(q: Array, k: Array, v: Array) -> Array:
        q, k = (q / _rms(q, 2), k / _rms(k, 1)) if norm else (q, k)
        return _softmax(scale * (q @ k)) @ v

    return Case(graph, meaning)


def split_attention(heads: int, q: int, d: int, kv: int, splits: int, qt: int, kt: int) -> Case:
    """softmax(Q · K) · V with the keys split over blocks, and a second kernel that combines them."""
    tiles = q // qt
    b = GraphBuilder(
        "part", "block", grid={"Hg": heads, "Qg": tiles, "Sg": splits}, loops={"Sl": kv // splits // kt}
    )
    shapes = {"q": (heads, q, d), "k": (heads, d, kv), "v": (heads, kv, d)}
    cut = {
        "q": ((1, qt, d), (0, 1, -1), -1),
        "k": ((1, d, kt), (0, -1, 2), 2),
        "v": ((1, kt, d), (0, -1, 1), 1),
    }
    queries, keys, values = (
        b.add("load", b.input(name, "float16", shapes[name]), shape=tile, grid=grid, loop=(loop,))
        for name, (tile, grid, loop) in cut.items()
    )
    s = b.add("matmul", queries, keys, type="float32")
    m = b.add("reduce_max", s, axis=2)
    p = b.add("exp", b.add("sub", s, m))
    o = b.add("matmul", b.add("convert", p, type="float16"), values, type="float32")
    sums = [
        b.add("accumulate", m, kind="max"),
        b.add("accumulate", b.add("reduce_sum", p, axis=2), m, kind="rescale"),
        b.add("accumulate", o, m, kind="rescale"),
    ]
    parts = [(heads, q * splits, width) for width in (1, 1, d)]
    part = b.finish(
        *(b.add("store", x, grid=(0, 1, 1), shape=shape) for x, shape in zip(sums, parts, strict=True))
    )
    c = GraphBuilder("combine", "block", grid={"Hg": heads, "Qg": tiles}, loops={"Sg": splits})
    maxima, totals, outputs = (
        c.add("load", c.input(f"part{i}", "float32", shape), shape=(1, qt, shape[2]), grid=(0, 1), loop=(1,))
        for i, shape in enumerate(parts)
    )
    both = [c.add("accumulate", x, maxima, kind="rescale") for x in (totals, outputs)]
    y = c.add("convert", c.add("div", both[1], both[0]), type="float16")
    combine = c.finish(c.add("store", y, grid=(0, 1), shape=shapes["q"]))
    g = GraphBuilder("split_attention")
    inputs = [g.input(name.upper(), "float16", shape) for name, shape in shapes.items()]
    graph = g.finish(*g.nest(combine, *g.nest(part, *inputs, name="P"), name="Y"))
    return Case(graph, lambda q, k, v: _softmax(q @ k) @ v)


def norm_transition(rows: int, d: int) -> Case:
    """rms(X + A (rms(H) - X)): no products, a row per block."""
    g = _Block("ntrans", {"Bg": rows}, {})
    x, h, a = (
        g.b.add("convert", g.load(name, (1 if name == "a" else rows, d), (1, d), (axis,)), type="float32")
        for name, axis in (("x", 0), ("h", 0), ("a", -1))
    )
    step = g.b.add("sub", g.b.add("div", h, g.mean_square(h, 1, d)), x)
    y = g.b.add("add", x, g.b.add("mul", a, step))
    graph = g.finish(g.b.add("div", y, g.mean_square(y, 1, d)), (rows, d), (0,))

    def meaning(x: Array, h: Array, a: Array) -> Array:
        y = x + a * (h / _rms(h, 1) - x)
        return y / _rms(y, 1)

    return Case(graph, meaning)
