"""Pattern match of quantized matrix products: from a tile graph to the GEMM normal form.

Normal form of the weight: one scale per row (a group that spans K) is a row scale, so
``Gemm.scale`` is False for it; `as_gemm` gives that form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ladder.ir.extents import show_shape
from ladder.ir.gemm import Gemm, has_power_scales
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import unary_operators
from ladder.rewrite.identities import CONVERT_FOLDING, LAYOUT_FOLDING, MATMUL_RECOGNITION
from ladder.rewrite.passes import rewriting, run_passes
from tile_types import representable
from tile_types.errors import ConversionError, ShapeError
from tile_types.multiples import held_multiple
from tile_types.tile import Tile

NORMALISE = (
    rewriting("recognise matmul", MATMUL_RECOGNITION),
    rewriting("fold layouts", LAYOUT_FOLDING),
    rewriting("fold converts", CONVERT_FOLDING),
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
        vector, value = self.peel_vector(node, lambda tile: len(tile.shape) == 1)
        self.require_type_of_result(self.behind(vector))
        return True, value

    def require_type_of_result(self, added: Node) -> None:
        """Raise ConversionError if what is added to the product is of another type than the result."""
        result = self.graph.tile(self.graph.outputs[0]).ttype
        if added.tile.ttype != result:
            raise ConversionError(
                f"kernels add what has the result's type, {result.name}; {added.name!r} is"
                f" {added.tile.ttype.name}"
            )

    def behind(self, vector: str) -> Node:
        """Return what a vector comes from through conversions and a reshape."""
        source = self.graph.producer(self.below_converts(vector))
        if source.operator == "reshape":
            source = self.graph.producer(self.below_converts(source.inputs[0]))
        return source

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
            source, shaped = self.behind(vector), self.graph.tile(vector).shape
            is_vector = len(shaped) == 1 or (len(shaped) == 2 and shaped[1] == 1)
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
            return self.unscaled_weight(node, core, k)
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
        return _weight_fields(source.tile, core, k)

    def unscaled_weight(self, node: Node, core: str, k: int) -> dict[str, Any]:
        """Recognise ``elements - repeat(zero)``."""
        chains = [self.chain(value) for value in node.inputs]
        wanted = [["elements", "input"], ["repeat", "metadata", "input"]]
        if [[part.operator for part in chain] for chain in chains] != wanted or chains[0][-1] != chains[1][
            -1
        ]:
            raise self.unrecognised(node)
        source = chains[0][-1]
        self.used.add(source.name)
        return _weight_fields(source.tile, core, k) | {"scale": False, "power_scales": False}

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


def _weight_fields(tile: Tile, core: str, k: int) -> dict[str, Any]:
    ttype = tile.ttype
    fits = representable(ttype, core, ttype.zero_kind)  # what a graph says is converted is not changed
    held = held_multiple(ttype, (core,), ttype.zero_kind) if fits else ttype.element_type
    size = min(ttype.block_size, k) if ttype.is_block else k
    scale = ttype.metadata_named("scale") is not None and size < k
    return {
        "weight": held.name,
        "group_size": size,
        "scale": scale,
        "power_scales": scale and has_power_scales(ttype),
        "zero": ttype.zero_kind,
    }
