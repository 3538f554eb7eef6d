"""Results of a chain that are rows of something larger: written where numbers say, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from tile_types.tile import Tile


@dataclass(frozen=True)
class Put:
    """Where a result goes: row ``i`` along ``axis`` becomes row ``ids[i]`` of a tensor ``base``."""

    base: Tile
    ids: str
    axis: int


def split_puts(graph: Graph) -> tuple[Graph, Mapping[str, Put]]:
    """Return a chain without its ``put`` nodes, and the results that they place.

    Results keep their order; what is put is under the name of its ``put`` node.
    """
    puts = {node.name: node for node in graph.nodes if node.operator == "put"}
    if not puts:
        return graph, {}
    bases = {node.inputs[0] for node in puts.values()}
    kept = [
        _rows_of(graph, puts[n.name]) if n.name in puts else n for n in graph.nodes if n.name not in bases
    ]
    found = {
        name: Put(graph.tile(node.inputs[0]), node.inputs[1], node_attributes(node)["axis"])
        for name, node in puts.items()
    }
    return replace(graph, nodes=tuple(kept)), found


def _rows_of(graph: Graph, node: Node) -> Node:
    """Return a node of the same name that is the rows, in their own shape."""
    tile = graph.tile(node.inputs[2])
    return Node(
        node.name, "reshape", (node.inputs[2],), (("shape", tile.shape),), (replace(tile, layout=None),)
    )
