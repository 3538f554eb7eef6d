"""A chain as it is lowered: rows that are scattered into an argument are written there, in place."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ladder.ir import extents
from ladder.ir.build import bind, node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.node_extents import extents_of
from ladder.partition.strided_rows import Order, strided_rows
from tile_types.tile import Tile


def size_names(graph: Graph) -> tuple[str, ...]:
    """Return the names of all sizes as they first occur: a kernel takes them first, as integers.

    Names that are numbered have that order: it is the one of the names that they stand for, whose terms may
    come in another order in an extent.
    """
    names = extents.size_names(extent for node in graph.nodes for extent in extents_of(node))
    numbered = all(re.fullmatch(r"n\d+", name) for name in names)
    return tuple(sorted(names, key=lambda name: int(name[1:]))) if numbered else names


def with_plain_names(graph: Graph) -> Graph:
    """Return a graph whose sizes are named by their order: equal chains of a model share a kernel."""
    names = size_names(graph)
    return bind(graph, {name: f"n{at}" for at, name in enumerate(names)}) if names else graph


@dataclass(frozen=True)
class Scatter:
    """A scatter of rows: row ``i`` of a result along ``axis`` becomes row ``ids[i]`` of a tensor ``base``.

    along: Whether each element has a number of its own.
    combine: How what comes is combined with what is there, as of the operator ``put``.
    from_end: Whether negative numbers count from the end.
    """

    base: Tile
    ids: str
    axis: int
    along: bool = False
    combine: str = ""
    from_end: bool = True

    @property
    def by_element(self) -> bool:
        """Whether neighbouring elements may go to places that are none."""
        return self.along or self.axis == len(self.base.shape) - 1


@dataclass(frozen=True)
class Chain:
    """The chain that a loop nest computes.

    graph: The chain without ``put`` nodes: rows to scatter have the name of their ``put`` node, in their own
        shape.
    scatters: Result -> where its rows go.
    sizes: Names of the symbolic sizes, in the order in which the kernel takes them.
    orders: Result -> how its elements are counted, where leading axes do not count rows.
    """

    graph: Graph
    scatters: Mapping[str, Scatter]
    sizes: tuple[str, ...]
    orders: Mapping[str, Order] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Graph) -> Chain:
        """Take the ``put`` nodes out of a chain's graph."""
        scattered = {node.name: node for node in graph.nodes if node.operator == "put"}
        bases = {node.inputs[0] for node in scattered.values()}
        kept = [_rows(graph, n) if n.name in scattered else n for n in graph.nodes if n.name not in bases]
        places = {
            name: Scatter(graph.tile(node.inputs[0]), node.inputs[1], **given)
            for name, node in scattered.items()
            for given in (node_attributes(node),)
        }
        plain = replace(graph, nodes=tuple(kept)) if scattered else graph
        return cls(plain, places, size_names(graph))

    def with_rows(self) -> Chain:
        """Return the chain with leading axes that count rows, if other ones do."""
        found = None if self.scatters else strided_rows(self.graph)
        return self if found is None else replace(self, graph=found.graph, orders=found.orders)


def _rows(graph: Graph, node: Node) -> Node:
    """Return a node of the name of a ``put`` that is its rows."""
    tile = replace(graph.tile(node.inputs[2]), layout=None)
    return Node(node.name, "reshape", (node.inputs[2],), (("shape", tile.shape),), (tile,))
