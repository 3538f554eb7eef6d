"""A chain as it is lowered: results that are rows of something larger are written there, in place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower.chain.symbols import size_names
from tile_types.tile import Tile


@dataclass(frozen=True)
class Put:
    """Where a result goes: row ``i`` along ``axis`` becomes row ``ids[i]`` of a tensor ``base``."""

    base: Tile
    ids: str
    axis: int


@dataclass(frozen=True)
class Chain:
    """What a loop nest computes.

    Parameters
    ----------
    graph
        The chain without ``put`` nodes: what is put is under the name of its ``put`` node, in its own shape.
    puts
        Result -> where it goes.
    sizes
        Names of the symbolic sizes, in the order in which the kernel takes them.
    """

    graph: Graph
    puts: Mapping[str, Put]
    sizes: tuple[str, ...]

    @classmethod
    def of(cls, graph: Graph) -> Chain:
        """Take the ``put`` nodes out of a chain's graph."""
        puts = {node.name: node for node in graph.nodes if node.operator == "put"}
        bases = {node.inputs[0] for node in puts.values()}
        kept = [_rows(graph, n) if n.name in puts else n for n in graph.nodes if n.name not in bases]
        places = {
            name: Put(graph.tile(node.inputs[0]), node.inputs[1], node_attributes(node)["axis"])
            for name, node in puts.items()
        }
        plain = replace(graph, nodes=tuple(kept)) if puts else graph
        return cls(plain, places, size_names(graph))


def _rows(graph: Graph, node: Node) -> Node:
    """Return a node of the name of a ``put`` that is its rows."""
    tile = replace(graph.tile(node.inputs[2]), layout=None)
    return Node(node.name, "reshape", (node.inputs[2],), (("shape", tile.shape),), (tile,))
