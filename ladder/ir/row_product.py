"""Products of rows, or of windows of an image, with a matrix, and what is made of each element of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.convolution import as_convolution, windows_of
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.windows import Windows
from tile_types.errors import ShapeError
from tile_types.tile import Extent

PRODUCT, IMAGE = "product", "image"
"""Names of the product, and of the image whose windows are rows, among the inputs of the chain."""


@dataclass(frozen=True)
class RowProduct:
    """``chain(x[M, K] matrix^T, others...)``, element by element.

    x, matrix: Inputs of the graph.
    turned: Whether the matrix is stored as ``[K, N]``; else as ``[N, K]``.
    rows, columns, depth: M, N and K.
    chain: Of tensors ``[M, N]`` and ``[N]`` and of numbers: what is made of its first input, the product.
        Where rows are windows, its second is the image ``[B, H, W, C]``, which it does not read.
    others: Inputs of the graph that the chain reads besides, in order.
    """

    x: str
    matrix: str
    turned: bool
    rows: Extent
    columns: int
    depth: int
    chain: Graph
    others: tuple[str, ...]
    windows: Windows | None = None


@lru_cache(maxsize=1024)
def as_row_product(graph: Graph) -> RowProduct:
    """Recognise a product of rows with a matrix, with what follows it.

    Raises ShapeError if the graph computes anything else.
    """
    node = next(n for n in graph.nodes if n.operator in ("matmul", "contract"))
    tiles = [graph.tile(value) for value in node.inputs]
    turned = node.operator == "matmul" and not node_attributes(node)["transpose_b"]
    matrix = tiles[1].shape[::-1] if turned else tiles[1].shape
    columns, depth = matrix[0], product(matrix[1:])
    if not isinstance(columns, int) or not isinstance(depth, int) or 0 in (columns, depth):
        raise ShapeError("a kernel of rows needs a matrix of known extents")
    windows = _windows(graph, node)
    if any(tile.ttype.name != "float32" for tile in (*tiles, node.tile)):
        raise ShapeError(f"%{node.name} = {node.operator}(...) is no product of float32 rows with a matrix")
    if any(graph.producer(value).operator != "input" for value in node.inputs):
        raise ShapeError("what is multiplied is computed before")
    rows = product(node.tile.shape[:-1])
    image = tiles[0].shape if windows else ()
    image = (image[0], 1, *image[1:]) if len(image) == 3 else image
    chain, others = _Flat(graph, node, rows, columns, image).chain()
    x, stored = node.inputs
    return RowProduct(x, stored, turned, rows, columns, depth, chain, others, windows)


def _windows(graph: Graph, node: Node) -> Windows | None:
    """Return the windows that are multiplied; None for rows.

    Raises ShapeError if it is no product of two matrices, and no convolution with channels last.
    """
    if node.operator == "matmul":
        if any(len(graph.tile(value).shape) != 2 for value in node.inputs):
            raise ShapeError(f"%{node.name} multiplies more than two matrices")
        return None
    form = as_convolution(graph, node)
    if not form.last or form.groups > 1 or form.rank > 2:
        raise ShapeError(f"%{node.name} is no convolution of one group along one or two axes, channels last")
    return None if form.are_points else windows_of(form)


class _Flat:
    """Writes what follows a product with two axes: rows and columns."""

    def __init__(
        self, graph: Graph, node: Node, rows: Extent, columns: int, image: tuple[Extent, ...]
    ) -> None:
        self.graph, self.node = graph, node
        self.full, self.vector = (rows, columns), (columns,)
        self.g = GraphBuilder("rows")
        self.new = {node.name: self.g.input(PRODUCT, "float32", self.full)}
        if image:
            self.g.input(IMAGE, "float32", image)
        self.others: list[str] = []

    def chain(self) -> tuple[Graph, tuple[str, ...]]:
        """Return the graph, and the inputs that it reads beside the product."""
        if len(self.graph.outputs) != 1:
            raise ShapeError("a kernel of rows has one result")
        result = self.value(self.graph.outputs[0])
        if self.g.tile(result).shape != self.full:
            raise ShapeError("the result is no tensor like the product")
        if result == self.new[self.node.name]:
            result = self.g.add("convert", result, type="float32")
        return self.g.finish(result), tuple(self.others)

    def value(self, old: str) -> str:
        """Return the new name of a value."""
        if old not in self.new:
            self.new[old] = self.made(self.graph.producer(old))
        return self.new[old]

    def made(self, node: Node) -> str:
        shape = self.shape(node)
        if node.operator == "input":
            self.others.append(node.name)
            return self.g.input(f"other{len(self.others)}", node.tile.ttype.name, shape)
        if node.operator == "reshape":
            return self.same(node, shape)
        attributes: dict[str, Any] = dict(node.attributes)
        fits = get_operator(node.operator).elementwise or node.operator in ("convert", "constant")
        if not fits:
            raise ShapeError(f"%{node.name} = {node.operator}(...) is not made element by element")
        if node.operator == "constant":
            return self.g.add("constant", **attributes)
        return self.g.add(node.operator, *map(self.value, node.inputs), **attributes)

    def same(self, node: Node, shape: tuple[Extent, ...]) -> str:
        value = self.value(node.inputs[0])
        if self.g.tile(value).shape != shape:
            raise ShapeError(f"%{node.name} moves elements")
        return value

    def shape(self, node: Node) -> tuple[Extent, ...]:
        """Return the shape of a value with two axes, one, or none.

        Raises ShapeError if it is neither like the product, nor a vector of columns, nor a number.
        """
        if len(node.tiles) != 1 or node.tile.ttype.is_block:
            raise ShapeError(f"%{node.name} = {node.operator}(...) is not made element by element")
        shape = node.tile.shape
        if product(shape) == 1:
            return ()
        if shape[-1:] == self.vector and all(extent == 1 for extent in shape[:-1]):
            return self.vector
        if shape[-1:] == self.vector and product(shape[:-1]) == self.full[0]:
            return self.full
        raise ShapeError(f"%{node.name} has other rows than the product")
