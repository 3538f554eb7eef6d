"""A chain as it is lowered: rows that are scattered into an argument are written there, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower.chain.symbols import size_names
from tile_types.tile import Tile


@dataclass(frozen=True)
class Scatter:
    """A scatter of rows: row ``i`` of a result along ``axis`` becomes row ``ids[i]`` of a tensor ``base``."""

    base: Tile
    ids: str
    axis: int


@dataclass(frozen=True)
class Chain:
    """The chain that a loop nest computes.

    graph: The chain without ``put`` nodes: rows to scatter have the name of their ``put`` node, in their own
        shape.
    scatters: Result -> where its rows go.
    sizes: Names of the symbolic sizes, in the order in which the kernel takes them.
    """

    graph: Graph
    scatters: Mapping[str, Scatter]
    sizes: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph) -> Chain:
        """Take the ``put`` nodes out of a chain's graph."""
        scattered = {node.name: node for node in graph.nodes if node.operator == "put"}
        bases = {node.inputs[0] for node in scattered.values()}
        kept = [_rows(graph, n) if n.name in scattered else n for n in graph.nodes if n.name not in bases]
        places = {
            name: Scatter(graph.tile(node.inputs[0]), node.inputs[1], node_attributes(node)["axis"])
            for name, node in scattered.items()
        }
        plain = replace(graph, nodes=tuple(kept)) if scattered else graph
        return cls(plain, places, size_names(graph))


def _rows(graph: Graph, node: Node) -> Node:
    """Return a node of the name of a ``put`` that is its rows."""
    tile = replace(graph.tile(node.inputs[2]), layout=None)
    return Node(node.name, "reshape", (node.inputs[2],), (("shape", tile.shape),), (tile,))
