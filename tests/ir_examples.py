"""One small graph per operator, and block graphs, for tests that cover the whole table."""

from __future__ import annotations

from typing import Any

import numpy as np

from ladder.ir import Graph, GraphBuilder, Node
from tile_types import Tile, get_type
from tile_types.quantize import quantize

BITS = ("bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right")
"""Operators of integers alone."""

CASES: dict[str, tuple[tuple[tuple[int | str, ...], ...], dict[str, Any]]] = {
    "convert": (((4, 6),), {"type": "float16"}),
    "encode": (((4, 6),), {"type": "int4"}),
    "contract": (((4, 6), (5, 6)), {"spec": "m k, n k -> m n"}),
    "matmul": (((2, 4, 6), (6, 5)), {"type": "float32"}),
    "reduce_sum": (((4, 6),), {"axis": 1}),
    "reduce_max": (((4, 6),), {"axis": 0, "keep": False}),
    **dict.fromkeys(("scan_sum", "scan_max", "scan_product", "scan_logsumexp"), (((4, 6),), {"axis": 1})),
    "broadcast": (((1, 6),), {"shape": (4, 6)}),
    "reshape": (((4, 6),), {"shape": (8, 3)}),
    "transpose": (((4, 6, 2),), {"permutation": (2, 0, 1)}),
    "restride": (((4, 6, 2),), {"permutation": (2, 0, 1)}),
    "concat": (((4, 6), (4, 1)), {"axis": 1}),
    "repeat": (((4, 3),), {"axis": 1, "times": 4, "extent": 10}),
    "slice": (((8, 6),), {"begin": (1, 2), "shape": (3, 4), "step": (2, 1)}),
    "map": (((9, 4),), {"spec": "h+r c -> h c r", "sizes": (("h", 7), ("r", 3))}),
    "pad": (((4, 6),), {"low": (1, 0), "high": (0, 2), "value": 2.0}),
    "iota": ((), {"extent": 5, "axis": 1, "rank": 2, "begin": 3, "step": 2, "type": "int64"}),
    "size": ((), {"extent": 5, "type": "float32"}),
    "take": (((5, 6), (2, 3)), {}),
    "gather": (((4, 5, 6), (2, 3)), {"axis": 1}),
    "put": (((4, 5, 6), (1,), (4, 1, 6)), {"axis": 1}),
    "attention": (((2, 4, 3, 8), (2, 2, 5, 8), (2, 2, 5, 6)), {"scale": 0.25}),
    **dict.fromkeys(("select", "fused"), (((4, 6), (4, 6), (6,)), {})),
    **dict.fromkeys(
        (
            "log",
            "log2",
            "log10",
            "log1p",
            "exp2",
            "sin",
            "cos",
            "abs",
            "floor",
            "round",
            "erf",
            "negation",
            "bits",
            "of_bits",
        ),
        (((4, 6),), {}),
    ),
    **dict.fromkeys(
        ("pow", "logaddexp", "quotient", "fmod", "less", "less_equal", "equal", "both", "either"),
        (((4, 6), (6,)), {}),
    ),
    **dict.fromkeys(BITS, (((4, 6), (6,)), {})),
    **dict.fromkeys(("add", "sub", "mul", "div", "div_ftz", "maximum", "minimum"), (((4, 6), (6,)), {})),
    **dict.fromkeys(
        (
            "neg",
            "square",
            "exp",
            "exp_ftz",
            "sqrt",
            "rsqrt",
            "sigmoid",
            "silu",
            "tanh",
            "relu",
            "gelu",
            "gelu_tanh",
        ),
        (((4, 6),), {}),
    ),
}
"""Operator -> shapes of its operands, attributes."""


def of_values(operator: str) -> Graph:
    """Return a graph that applies one operator to inputs of float32, or of int32."""
    shapes, attributes = CASES[operator]
    g = GraphBuilder("example")
    ttype = "int32" if operator in (*BITS, "of_bits") else "float32"
    inputs = [g.input(f"x{i}", ttype, shape) for i, shape in enumerate(shapes)]
    return g.finish(g.add(operator, *inputs, name="y", **attributes))


def of_call() -> Graph:
    g = GraphBuilder("example")
    target = {"target": "aten.topk.default", "arguments": (("%", 0), 2)}
    tiles = tuple(Tile(get_type(name), (4, 2)) for name in ("float32", "int64"))
    x = g.input("x", "float32", (4, 6))
    return g.finish(g.insert(Node("y", "call", (x,), tuple(sorted(target.items())), tiles)), "y.1")


def of_constant() -> Graph:
    g = GraphBuilder("example")
    return g.finish(g.add("constant", value=0.5, shape=(2, 3), type="float16", name="y"))


def of_quantized(operator: str, **attributes: Any) -> Graph:
    g = GraphBuilder("example")
    return g.finish(g.add(operator, g.input("x0", "uint4_g32_zi", (4, 80)), name="y", **attributes))


def of_matmul_blocks(rows: int | str = "M", n: int = 48, k: int = 96) -> Graph:
    """Return a block graph: A[M,K] B[N,K]^T in tiles of 16 x 16 x 32, and functions of the sums."""
    b = GraphBuilder(
        "tiles", "block", grid={"x": -(-n // 16), "y": f"ceildiv({rows}, 16)"}, loops={"i": -(-k // 32)}
    )
    a_in, b_in = b.input("a", "float16", (rows, k)), b.input("b", "float16", (n, k))
    a = b.add("load", a_in, grid=(-1, 0), loop=(1,), shape=(16, 32))
    w = b.add("load", b_in, grid=(0, -1), loop=(1,), shape=(16, 32))
    part = b.add("matmul", a, w, transpose_b=True, type="float32", level="register")
    total = b.add("accumulate", part, level="register")
    y = b.add("silu", b.add("neg", total, level="register"), level="register")
    body = b.finish(b.add("store", b.add("convert", y, type="float16"), grid=(1, 0), shape=(rows, n)))
    g = GraphBuilder("blocks")
    inputs = g.input("A", "float16", (rows, k)), g.input("B", "float16", (n, k))
    return g.finish(*g.nest(body, *inputs, name="y"))


def of_softmax_blocks(kind: str = "rescale") -> Graph:
    """Return an online softmax-weighted sum: exp(x - max) v / sum exp(x - max), in steps of 8."""
    b = GraphBuilder("online", "block", grid={"x": 4}, loops={"i": 3})
    x_in, v_in = b.input("x", "float32", (4, 24)), b.input("v", "float32", (24, 5))
    x = b.add("load", x_in, grid=(0,), loop=(1,), shape=(1, 8))
    v = b.add("load", v_in, grid=(-1,), loop=(0,), shape=(8, 5))
    top = b.add("reduce_max", x, axis=1)
    weight = b.add("exp", b.add("sub", x, top))
    numerator = b.add("accumulate", b.add("matmul", weight, v), top, kind=kind)
    denominator = b.add("accumulate", b.add("reduce_sum", weight, axis=1), top, kind=kind)
    ratio = b.add("div", numerator, denominator)
    body = b.finish(b.add("store", ratio, grid=(0,), shape=(4, 5)))
    g = GraphBuilder("softmax")
    return g.finish(
        *g.nest(body, g.input("X", "float32", (4, 24)), g.input("V", "float32", (24, 5)), name="y")
    )


EXAMPLES: dict[str, Graph] = {
    **{operator: of_values(operator) for operator in CASES},
    "input": of_values("neg"),
    "constant": of_constant(),
    "call": of_call(),
    "elements": of_quantized("elements"),
    "metadata": of_quantized("metadata", field="zero"),
    "load": of_matmul_blocks(),
    "store": of_matmul_blocks(),
    "block": of_matmul_blocks(),
    "accumulate": of_softmax_blocks(),
}
"""Operator -> a graph that contains it."""


def operands(graph: Graph, seed: int = 0, rows: int = 37) -> dict[str, Any]:
    """Return positive random values for the inputs of a graph; M becomes ``rows``."""
    generator = np.random.default_rng(seed)
    values: dict[str, Any] = {}
    for node in graph.inputs:
        shape = tuple(rows if extent == "M" else int(extent) for extent in node.tile.shape)
        array = generator.uniform(0.5, 4.0, shape)
        block = node.tile.ttype
        zero = None if block.zero_kind == "none" else block.zero_kind
        values[node.name] = (
            quantize(array, block.element, group_size=block.block_size, zero=zero)
            if block.is_block
            else array
        )
    return values
