"""The bridge between tile graphs and the GEMM normal form.

Normal form of the weight: one scale per row (a group that spans K) is a row scale, so
``Gemm.scale`` is False for it; `as_gemm` gives that form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.build import GraphBuilder
from ladder.ir.extents import show_shape
from ladder.ir.gemm import Gemm, has_power_scales
from ladder.ir.graph import Graph, Node
from ladder.ir.operator import Attributes
from ladder.ir.ops import get_operator, unary_operators
from ladder.ir.passes import rewriting, run_passes
from ladder.ir.rules import CONVERT_FOLDING, LAYOUT_FOLDING, MATMUL_RECOGNITION
from tile_types.errors import ConversionError, DTypeError, ShapeError
from tile_types.library import group_scaled
from tile_types.quantized import QuantizedTensor
from tile_types.tile import Extent, Tile

NORMALISE = (
    rewriting("recognise matmul", MATMUL_RECOGNITION),
    rewriting("fold layouts", LAYOUT_FOLDING),
    rewriting("fold converts", CONVERT_FOLDING),
)


def gemm_graph(gemm: Gemm, name: str = "gemm") -> Graph:
    """Return the kernel graph that a GEMM stands for; with experts, that of one of them.

    Inputs, in order: ``A[M,K]`` (group-scaled if its tokens are), ``B[N,K]`` (group-scaled if there are
    scales or zero points),
    ``row_scale[N]`` if there is no group scale, ``token_scale[M]``, ``bias[N]``.

    Raises UnknownNameError, ConversionError if the weight, its zero points or an epilogue operator do not
        exist.
    """
    g = GraphBuilder(name)
    a = g.input("A", token_type(gemm), ("M", gemm.k))
    b = g.input("B", weight_type(gemm), (gemm.n, gemm.k))
    return g.finish(insert_gemm(g, gemm, a, b, "M", gemm_vectors(g, gemm, "M")))


def gemm_vectors(g: GraphBuilder, gemm: Gemm, rows: Extent) -> dict[str, str]:
    """Declare the vectors that a GEMM takes besides its matrices, as inputs; returns them by name."""
    vectors: dict[str, tuple[bool, str, Extent]] = {
        "row_scale": (not gemm.scale, "float32", gemm.n),
        "token_scale": (gemm.token_scale and not gemm.token_group, "float32", rows),
        "bias": (gemm.bias, gemm.output, gemm.n),
    }
    return {label: g.input(label, ttype, (n,)) for label, (used, ttype, n) in vectors.items() if used}


def insert_gemm(g: GraphBuilder, gemm: Gemm, a: str, b: str, rows: Extent, given: Mapping[str, str]) -> str:
    """Add the operators of a GEMM to a graph and return its result ``[rows, N]``.

    a, b: Activations ``[rows, K]`` and the weight ``[N, K]`` of `weight_type`.
    rows: M.
    given: The vectors that `gemm_vectors` declares, by name.
    Raises UnknownNameError, DTypeError if an epilogue operator does not exist, or is no function of one
        number.
    """
    for operator in gemm.epilogue:
        _require_epilogue(operator)
    weight = decoded(g, gemm, b)
    activation = as_type(g, a, gemm.activation)
    value = g.add("matmul", activation, weight, transpose_b=True, type=_sum_type(gemm), name="sum")
    value = as_type(g, value, "float32")
    if "row_scale" in given:
        value = g.add("mul", value, given["row_scale"])
    if "token_scale" in given:
        value = g.add("mul", value, g.add("reshape", given["token_scale"], shape=(rows, 1)))
    if "bias" in given:
        value = g.add("add", value, as_type(g, given["bias"], "float32"))
    for operator in gemm.epilogue:
        value = g.add(operator, value)
    value = as_type(g, value, gemm.output)
    return _gated(g, gemm, value, rows) if gemm.gate else value


def _gated(g: GraphBuilder, gemm: Gemm, value: str, rows: Extent) -> str:
    """Return what the gate makes of both halves of a product's columns."""
    _require_epilogue(gemm.gate)
    shape = (rows, gemm.columns)
    halves = [g.add("slice", value, begin=(0, begin), shape=shape) for begin in (0, gemm.columns)]
    gate, other = (as_type(g, half, "float32") for half in (halves[::-1] if gemm.gate_last else halves))
    gate = as_type(g, as_type(g, g.add(gemm.gate, gate), gemm.output), "float32")
    return as_type(g, g.add("mul", gate, other), gemm.output)


def weight_type(gemm: Gemm) -> str:
    """Return the type of a GEMM's weight: group-scaled if there are scales or zero points."""
    if not gemm.scale and gemm.zero == "none":
        return gemm.weight
    scale = "e8m0" if gemm.power_scales else "float16"
    return group_scaled(gemm.weight, gemm.group_size, scale=scale, zero=gemm.zero).name


def token_type(gemm: Gemm) -> str:
    """Return the type of a GEMM's activations: group-scaled if groups of a row have scales."""
    if not gemm.token_group:
        return gemm.activation
    return group_scaled(gemm.activation, gemm.token_group, scale="float32").name


def _sum_type(gemm: Gemm) -> str:
    """Integer sums meet group scales in float32."""
    return "float32" if gemm.scale or gemm.token_group else gemm.accumulator


def decoded(g: GraphBuilder, gemm: Gemm, b: str) -> str:
    """Decode the weight B[N, K]; without group scale only the zero point is applied."""
    core = gemm.activation
    if gemm.scale or gemm.zero == "none":
        return as_type(g, b, core)
    value = g.add("convert", g.add("elements", b), type=core)
    zero = g.add("metadata", b, field="zero")
    zero = g.add("repeat", zero, axis=1, times=gemm.group_size, extent=gemm.k)
    return g.add("sub", value, as_type(g, zero, core))


def as_type(g: GraphBuilder, value: str, ttype: str) -> str:
    """Return a value in a type."""
    return value if g.tile(value).ttype.name == ttype else g.add("convert", value, type=ttype)


def _require_epilogue(operator: str) -> None:
    get_operator(operator)
    if operator not in unary_operators():
        raise DTypeError(
            f"epilogue {operator!r} is not a unary element-wise operator: {', '.join(unary_operators())}"
        )


def as_gemm(graph: Graph) -> Gemm:
    """Recognise ``epilogue(token_scale * row_scale * (A · decode(B)ᵀ) + bias)``.

    Raises ShapeError if the graph is not one matrix product of [M,K] with a weight [N,K] and such an
        epilogue.
    Raises DTypeError if the activation or output type is not one that cores take.
    Raises ConversionError if an operand is converted to another core type than the activation's.
    """
    normal = run_passes(graph, NORMALISE)
    if len(normal.outputs) != 1:
        raise ShapeError(f"a GEMM has one output, graph {graph.name!r} has {len(normal.outputs)}")
    return Recogniser(normal).gemm()


class Recogniser:
    """Peels a normalised graph from its output to the matrix product."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.used: set[str] = set()

    def gemm(self) -> Gemm:
        output = self.graph.tile(self.graph.outputs[0]).ttype.name
        value = self.below_converts(self.graph.outputs[0])
        epilogue, value = self.epilogue(value)
        bias, value = self.bias(value)
        scales, value = self.scales(value)
        product = self.graph.producer(value)
        if product.operator != "matmul":
            raise self.unrecognised(product)
        activation, n, k = self.activation(product)
        token_group = self.token_group(product)
        weight = self.weight(product.inputs[1], activation, k)
        self.require_all_used()
        fields: dict[str, Any] = weight | {"bias": bias, "epilogue": epilogue, "token_group": token_group}
        fields["token_scale"] = "M" in scales or token_group > 0
        return Gemm(n, k, activation=activation, output=output, **fields)

    def below_converts(self, value: str) -> str:
        """Skip conversions, which keep the value."""
        node = self.graph.producer(value)
        while node.operator == "convert" and not self.graph.tile(node.inputs[0]).ttype.is_block:
            value = node.inputs[0]
            node = self.graph.producer(value)
        return value

    def epilogue(self, value: str) -> tuple[tuple[str, ...], str]:
        names: list[str] = []
        while (node := self.graph.producer(value)).operator in unary_operators():
            names.append(node.operator)
            value = self.below_converts(node.inputs[0])
        return tuple(reversed(names)), value

    def bias(self, value: str) -> tuple[bool, str]:
        node = self.graph.producer(value)
        if node.operator != "add":
            return False, value
        return True, self.peel_vector(node, lambda tile: len(tile.shape) == 1)[1]

    def scales(self, value: str) -> tuple[set[str], str]:
        """Return which scales multiply the product: ``M`` (per token) and ``N`` (per row)."""
        found: set[str] = set()
        while (node := self.graph.producer(value)).operator == "mul":
            vector, value = self.peel_vector(node, lambda tile: tile.ttype.name == "float32")
            axis = "N" if len(self.graph.tile(vector).shape) == 1 else "M"
            if axis in found:
                raise self.unrecognised(node)
            found.add(axis)
        return found, value

    def peel_vector(self, node: Node, fits: Callable[[Tile], bool]) -> tuple[str, str]:
        """Split ``vector op rest``: the vector comes from an input through convert and reshape."""
        for vector, rest in (node.inputs, node.inputs[::-1]):
            source = self.graph.producer(self.below_converts(vector))
            shaped = self.graph.tile(vector).shape
            is_vector = len(shaped) == 1 or (len(shaped) == 2 and shaped[1] == 1)
            if source.operator == "reshape":
                source = self.graph.producer(self.below_converts(source.inputs[0]))
            if source.operator == "input" and is_vector and fits(self.graph.tile(vector)):
                self.used.add(source.name)
                return vector, self.below_converts(rest)
        raise self.unrecognised(node)

    def activation(self, product: Node) -> tuple[str, int, int]:
        """Check the operands of the product; return the activation's type, N and K."""
        transposed = bool(dict(product.attributes).get("transpose_b"))
        a, b = (self.graph.tile(value) for value in product.inputs)
        if not transposed or len(a.shape) != 2 or len(b.shape) != 2:
            raise ShapeError(
                "a GEMM multiplies A[M,K] with a weight stored as B[N,K]; this product takes"
                f" {show_shape(a.shape)} and {show_shape(b.shape)}{'ᵀ' if transposed else ''}"
            )
        n, k = b.shape
        if not isinstance(n, int) or not isinstance(k, int):
            raise ShapeError(f"N and K of a weight must be numbers, got {show_shape(b.shape)}")
        source = self.token_source(product)
        if source.operator != "input":
            stored = self.graph.tile(self.below_converts(product.inputs[0])).ttype.name
            raise ConversionError(
                f"the activation must be an input in the core's type, it is %{source.name} ="
                f" {source.operator}(...) from {stored} to {a.ttype.name}; compute it in a kernel of its own"
            )
        self.used.add(source.name)
        return a.ttype.name, n, k

    def token_source(self, product: Node) -> Node:
        """Return where the activation comes from, below the scaling of its groups."""
        source = self.graph.producer(product.inputs[0])
        if source.operator == "convert":
            stored = self.graph.tile(source.inputs[0]).ttype
            if stored.is_block and stored.element == source.tile.ttype.name:
                return self.graph.producer(source.inputs[0])
        return source

    def token_group(self, product: Node) -> int:
        """Return the elements of a row of A that share a scale, 0 where they are not grouped."""
        stored = self.token_source(product).tile.ttype
        return stored.block_size if stored.is_block else 0

    def weight(self, value: str, core: str, k: int) -> dict[str, Any]:
        """Return the fields of a Gemm that describe the weight."""
        node = self.graph.producer(value)
        if node.operator == "sub":
            return self.unscaled_weight(node, k)
        source = node
        if node.operator == "convert":
            if node.tile.ttype.name != core:
                raise ConversionError(
                    f"the weight is decoded to {node.tile.ttype.name}, the activation is {core};"
                    f" decode it to {core}"
                )
            source = self.graph.producer(node.inputs[0])
        if source.operator != "input":
            raise self.unrecognised(source)
        self.used.add(source.name)
        return _weight_fields(source.tile, k)

    def unscaled_weight(self, node: Node, k: int) -> dict[str, Any]:
        """Recognise ``elements - repeat(zero)``."""
        chains = [self.chain(value) for value in node.inputs]
        wanted = [["elements", "input"], ["repeat", "metadata", "input"]]
        if [[part.operator for part in chain] for chain in chains] != wanted or chains[0][-1] != chains[1][
            -1
        ]:
            raise self.unrecognised(node)
        source = chains[0][-1]
        self.used.add(source.name)
        return _weight_fields(source.tile, k) | {"scale": False, "power_scales": False}

    def chain(self, value: str) -> list[Node]:
        """Return the nodes from a value to its input along first operands, without conversions."""
        node = self.graph.producer(self.below_converts(value))
        return [node, *(self.chain(node.inputs[0]) if node.inputs else [])]

    def require_all_used(self) -> None:
        for node in self.graph.inputs:
            if node.name not in self.used:
                raise ShapeError(
                    f"input {node.name!r} of graph {self.graph.name!r} takes no part in the GEMM"
                )

    def unrecognised(self, node: Node) -> ShapeError:
        return ShapeError(
            f"graph {self.graph.name!r} is no GEMM: %{node.name} = {node.operator}(...) is not part of"
            " epilogue(token_scale * row_scale * (A · decode(B)ᵀ) + bias)"
        )


def _weight_fields(tile: Tile, k: int) -> dict[str, Any]:
    ttype = tile.ttype
    size = min(ttype.block_size, k) if ttype.is_block else k
    scale = ttype.metadata_named("scale") is not None and size < k
    return {
        "weight": ttype.element_type.name,
        "group_size": size,
        "scale": scale,
        "power_scales": scale and has_power_scales(ttype),
        "zero": ttype.zero_kind,
    }


def gemm_reference(
    gemm: Gemm,
    a: npt.ArrayLike,
    quantized: QuantizedTensor,
    bias: npt.ArrayLike | None = None,
    token_scale: npt.ArrayLike | None = None,
) -> npt.NDArray[np.float64]:
    """Return the exact result [M, N] (of a gated product [M, N / 2]) in float64 on the decoded weights.

    a: Values [M, K] (numpy or torch), of the activation type.
    quantized: The weight [N, K]; its scales, row scales and zero points are applied.
    bias, token_scale: [N] and [M], if the GEMM has them; scales of tokens' groups are [M, groups].
    Raises ShapeError if an operand is missing, superfluous or has another shape.
    """
    activation = _float64(a)
    weight = _float64(quantized.dequantize("float64"))
    if weight.shape != (gemm.n, gemm.k) or activation.shape[1:] != (gemm.k,):
        raise ShapeError(
            f"a GEMM of N={gemm.n}, K={gemm.k} cannot take A {list(activation.shape)}"
            f" and B {list(weight.shape)}"
        )
    if gemm.token_group:
        groups = np.arange(gemm.k) // gemm.token_group
        scales = _float64(token_scale if token_scale is not None else [])
        if scales.shape != (len(activation), groups[-1] + 1):
            raise ShapeError(f"token_scale must be [{len(activation)}, {groups[-1] + 1}], got {scales.shape}")
        activation = activation * scales[:, groups]
    result = activation @ weight.T
    if gemm.token_scale and not gemm.token_group:
        result *= _vector("token_scale", token_scale, result.shape[0])[:, None]
    if gemm.bias:
        result += _vector("bias", bias, gemm.n)
    for operator in gemm.epilogue:
        _require_epilogue(operator)
        result = get_operator(operator).reference([result], _NO_ATTRIBUTES)
    if gemm.gate:
        _require_epilogue(gemm.gate)
        gate, other = np.split(result, 2, axis=1)[:: -1 if gemm.gate_last else 1]
        result = get_operator(gemm.gate).reference([gate], _NO_ATTRIBUTES) * other
    return result


_NO_ATTRIBUTES: Attributes = {}


def _vector(label: str, values: npt.ArrayLike | None, length: int) -> npt.NDArray[np.float64]:
    if values is None:
        raise ShapeError(f"this GEMM needs {label}[{length}]")
    found = _float64(values)
    if found.shape != (length,):
        raise ShapeError(f"{label} must have shape [{length}], got {list(found.shape)}")
    return found


def _float64(values: Any) -> npt.NDArray[np.float64]:
    """Return float64 numpy from numpy (ml_dtypes included) or torch."""
    held = values.detach().double().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
    return held.astype(np.float64)
