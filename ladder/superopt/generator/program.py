"""Programs to optimise: graphs over named dimensions, so that one definition serves all extents."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from ladder.ir.build import GraphBuilder
from ladder.ir.graph import Graph
from ladder.ir.ops import get_operator
from tile_types.errors import ConversionError, unknown_name
from tile_types.library import get_type
from tile_types.tile import Extent

Extents = Mapping[str, Extent]


@dataclass(frozen=True)
class Program:
    """A tensor program.

    name: For reports.
    define: ``(extents, sizes) -> kernel graph`` with these extents (numbers or symbols) for the dimensions.
        Constants such as 1/K follow ``sizes``, whatever the extents are.
    sizes: Extent of every dimension; the axes of the inputs are its dimensions.
    doc: One line.
    weights: Inputs that may be quantized: ``[K, N]``, the right operand of matrix products.
    packed: Type of those that are: they are ``[N, K]`` then, and convert to the program's type.
    """

    name: str
    define: Callable[[Extents, Mapping[str, int]], Graph]
    sizes: Mapping[str, int]
    doc: str = ""
    weights: tuple[str, ...] = ()
    packed: Mapping[str, str] = field(default_factory=dict)

    def graph(self, extents: Extents | None = None) -> Graph:
        """Return the program with other extents, or its own.

        Of quantized weights, as a function of their values: whatever is equal for all values is equal for
        those that codes and scales can give.
        """
        graph = self.define(extents or self.sizes, self.sizes)
        return _turned(graph, self.packed) if self.packed else graph

    @cached_property
    def symbolic(self) -> Graph:
        """The program with each dimension's name as extent."""
        return self.graph({name: name for name in self.sizes})

    @property
    def multiplies(self) -> bool:
        return any(node.operator == "matmul" for node in self.symbolic.nodes)

    def resized(self, **sizes: int) -> Program:
        """Return the program with other sizes; raises UnknownNameError for a dimension it lacks."""
        for name in sizes:
            if name not in self.sizes:
                raise unknown_name(f"dimension of {self.name}", name, self.sizes)
        return replace(self, sizes={**self.sizes, **sizes})

    def with_weights(self, ttype: str) -> Program:
        """Return the program with weights of a quantized type.

        Raises ConversionError if it has no weights, or the type is not quantized.
        """
        if not self.weights:
            raise ConversionError(f"{self.name} has no weights that could be {ttype}")
        if not get_type(ttype).is_block:
            raise ConversionError(f"{ttype} has no scales: give a quantized type such as int4_g128")
        return replace(self, packed=dict.fromkeys(self.weights, ttype))

    @property
    def groups(self) -> Mapping[str, int]:
        """Dimensions along which packed weights share scales -> how many elements do."""
        graph = self.symbolic
        return {
            str(node.tile.shape[1]): get_type(self.packed[node.name]).block_size
            for node in graph.inputs if node.name in self.packed
        }  # fmt: skip


def _turned(graph: Graph, packed: Iterable[str]) -> Graph:
    """Return a program whose packed weights are ``[N, K]``: right operands that products transpose."""
    g = GraphBuilder(graph.name)
    for node in graph.nodes:
        if node.name in packed:
            g.insert(replace(node, tiles=(replace(node.tile, shape=node.tile.shape[::-1]),)))
        elif node.operator == "matmul" and node.inputs[1] in packed:
            row = get_operator("matmul")
            g.insert(replace(node, attributes=row.stored({**dict(node.attributes), "transpose_b": True})))
        else:
            g.insert(node)
    return g.finish(*graph.outputs)


TYPE = "float16"


def _rmsnorm_matmul(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("rmsnorm_matmul")
    x, w = g.input("X", TYPE, (n["B"], n["K"])), g.input("W", TYPE, (n["K"], n["N"]))
    mean = g.add("constant", value=1.0 / sizes["K"], type=TYPE)
    square = g.add("mul", g.add("reduce_sum", g.add("square", x), axis=1), mean)
    return g.finish(g.add("matmul", g.add("div", x, g.add("sqrt", square)), w))


def _gated_mlp(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("gated_mlp")
    x = g.input("X", TYPE, (n["B"], n["K"]))
    gate, up = (g.input(name, TYPE, (n["K"], n["N"])) for name in ("G", "U"))
    return g.finish(g.add("mul", g.add("silu", g.add("matmul", x, gate)), g.add("matmul", x, up)))


def _lora(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("lora")
    x, w = g.input("X", TYPE, (n["B"], n["K"])), g.input("W", TYPE, (n["K"], n["N"]))
    a, b = g.input("A", TYPE, (n["K"], n["R"])), g.input("B", TYPE, (n["R"], n["N"]))
    low = g.add("matmul", g.add("matmul", x, a), b)
    return g.finish(g.add("add", g.add("matmul", x, w), low))


def _root_mean_square(g: GraphBuilder, x: str, axis: int, extent: int) -> str:
    mean = g.add("constant", value=1.0 / extent, type=TYPE)
    return g.add("sqrt", g.add("mul", g.add("reduce_sum", g.add("square", x), axis=axis), mean))


def _softmax(g: GraphBuilder, x: str, axis: int) -> str:
    exponential = g.add("exp", g.add("sub", x, g.add("reduce_max", x, axis=axis)))
    return g.add("div", exponential, g.add("reduce_sum", exponential, axis=axis))


def _attention_inputs(g: GraphBuilder, n: Extents) -> tuple[str, str, str]:
    """Return Q[H, M, D], K[H, D, S] and V[H, S, E]: M holds the query heads of one key head."""
    shapes = {"Q": "HMD", "K": "HDS", "V": "HSE"}
    q, k, v = (g.input(name, TYPE, [n[axis] for axis in axes]) for name, axes in shapes.items())
    return q, k, v


def _gqa(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("gqa")
    q, k, v = _attention_inputs(g, n)
    return g.finish(g.add("matmul", _softmax(g, g.add("matmul", q, k), 2), v))


def _qknorm_attention(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("qknorm_attention")
    q, k, v = _attention_inputs(g, n)
    q = g.add("div", q, _root_mean_square(g, q, 2, sizes["D"]))
    k = g.add("div", k, _root_mean_square(g, k, 1, sizes["D"]))
    return g.finish(g.add("matmul", _softmax(g, g.add("matmul", q, k), 2), v))


def _ntrans(n: Extents, sizes: Mapping[str, int]) -> Graph:
    g = GraphBuilder("ntrans")
    x, h = (g.input(name, TYPE, (n["B"], n["D"])) for name in "XH")
    rate = g.input("A", TYPE, (1, n["D"]))
    h = g.add("div", h, _root_mean_square(g, h, 1, sizes["D"]))
    moved = g.add("add", x, g.add("mul", rate, g.add("sub", h, x)))
    return g.finish(g.add("div", moved, _root_mean_square(g, moved, 1, sizes["D"])))


PROGRAMS: Mapping[str, Program] = {
    program.name: program
    for program in (
        Program(
            "rmsnorm_matmul", _rmsnorm_matmul, {"B": 16, "K": 4096, "N": 6144},
            "X / sqrt(mean(X * X)) · W", weights=("W",),
        ),
        Program(
            "gated_mlp", _gated_mlp, {"B": 8, "K": 4096, "N": 4096}, "silu(X · G) * (X · U)",
            weights=("G", "U"),
        ),
        Program(
            "lora", _lora, {"B": 16, "K": 256, "N": 4096, "R": 16}, "X · W + (X · A) · B", weights=("W",)
        ),
        Program(
            "gqa", _gqa, {"H": 2, "M": 256, "D": 64, "S": 4096, "E": 64},
            "softmax(Q · K) · V for each of H heads",
        ),
        Program(
            "qknorm_attention", _qknorm_attention, {"H": 2, "M": 256, "D": 64, "S": 4096, "E": 64},
            "softmax(rms(Q) · rms(K)) · V for each of H heads",
        ),
        Program(
            "ntrans", _ntrans, {"B": 16, "D": 4096},
            "rms(X + A * (rms(H) - X)), rms(x) = x / sqrt(mean(x * x))",
        ),
    )
}  # fmt: skip
"""Programs by name, with the sizes of the H200 baselines."""


def get_program(name: str) -> Program:
    """Return a program by name; raises UnknownNameError with the nearest names."""
    if name not in PROGRAMS:
        raise unknown_name("program", name, PROGRAMS)
    return PROGRAMS[name]
