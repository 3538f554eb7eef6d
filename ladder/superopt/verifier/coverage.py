"""Preconditions of a comparison of programs: signatures, known extents, stores that cover results."""

from __future__ import annotations

import math

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.verify import verify
from tile_types.errors import ShapeError, VerificationError
from tile_types.tile import Tile


def signature(graph: Graph) -> tuple[tuple[Tile, ...], tuple[Tile, ...]]:
    """Return the tiles of inputs and outputs, in order."""
    return tuple(node.tile for node in graph.inputs), tuple(graph.tile(output) for output in graph.outputs)


def signatures_differ(first: Graph, second: Graph) -> str:
    """Return how the signatures differ, or an empty text."""
    for what, a, b in zip(("input", "output"), signature(first), signature(second), strict=True):
        if len(a) != len(b):
            return f"{len(a)} {what}s and {len(b)}"
        for number, (left, right) in enumerate(zip(a, b, strict=True)):
            if (left.ttype, left.shape) != (right.ttype, right.shape):
                return f"{what} {number} is {_show(left)} and {_show(right)}"
    return ""


def _show(tile: Tile) -> str:
    return f"{tile.ttype.name}{list(tile.shape)}"


def require_complete(graph: Graph) -> None:
    """Check a graph with known extents, and that its blocks write every output element.

    An element that no block writes is garbage on hardware and zero in the interpreter, so no
    evaluation would find it.

    Raises VerificationError if the graph is invalid or a store leaves elements unwritten.
    Raises ShapeError if an extent is symbolic.
    """
    verify(graph)
    for owner, node in graph.walk():
        for tile in node.tiles:
            _require_known(graph, node, tile)
        if node.operator == "store":
            _require_covering(owner, node)


def _require_known(graph: Graph, node: Node, tile: Tile) -> None:
    if not all(isinstance(extent, int) for extent in tile.shape):
        raise ShapeError(f"graph {graph.name!r}: %{node.name} has symbolic extents {tile.shape}; bind them")


def _require_covering(graph: Graph, node: Node) -> None:
    axes = node_attributes(node)["grid"]
    tile = graph.tile(node.inputs[0]).known_shape
    for axis, (extent, part) in enumerate(zip(node.tile.known_shape, tile, strict=True)):
        splits = [int(dim.extent) for dim, split in zip(graph.grid, axes, strict=True) if split == axis]
        if part * math.prod(splits) < extent:
            raise VerificationError(
                f"graph {graph.name!r}: %{node.name} writes {part * math.prod(splits)} of {extent} elements"
                f" along axis {axis}"
            )
