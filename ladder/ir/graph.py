"""The tile graph as immutable values: nodes, edges (tiles) and nested graphs.

A graph lists its nodes in an order in which every operand is defined before its use.
A value is named by its node, or ``node.1``, ``node.2`` ... for further results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from tile_types.errors import UnknownNameError, unknown_name
from tile_types.tile import Extent, Tile

Literal = int | float | str | bool | None | tuple["Literal", ...]
"""Values that an attribute can hold."""

LEVELS = ("kernel", "block")
"""Graph levels, outermost first."""


@dataclass(frozen=True)
class Axis:
    """One grid or for-loop dimension of a block graph."""

    name: str
    extent: Extent


@dataclass(frozen=True)
class Node:
    """One operator applied to values.

    name: Unique in its graph; also names the first result.
    operator: A row of `ladder.ir.ops.OPERATORS`.
    inputs: Names of the operand values.
    attributes: Sorted (name, value) pairs; an attribute at its default is left out.
    tiles: The tile of each result.
    body: The nested graph of a graph-defined operator.
    """

    name: str
    operator: str
    inputs: tuple[str, ...]
    attributes: tuple[tuple[str, Literal], ...]
    tiles: tuple[Tile, ...]
    body: Graph | None = None

    @property
    def tile(self) -> Tile:
        """The tile of the first result."""
        return self.tiles[0]

    @cached_property
    def values(self) -> tuple[str, ...]:
        """Names of the results."""
        return tuple(value_name(self.name, position) for position in range(len(self.tiles)))


@dataclass(frozen=True)
class Graph:
    """A tile graph at one level.

    name: An identifier.
    level: One of `LEVELS`.
    nodes: Operators in an order in which operands come first.
    outputs: Names of the result values; of a block graph, what it stores.
    grid, loops: Block graphs only: grid dimensions (at most 3) and for-loop dimensions.
    """

    name: str
    level: str
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    grid: tuple[Axis, ...] = ()
    loops: tuple[Axis, ...] = ()

    @cached_property
    def tiles(self) -> Mapping[str, Tile]:
        """The tile of every value by name."""
        return {name: tile for node in self.nodes for name, tile in zip(node.values, node.tiles, strict=True)}

    @cached_property
    def _producers(self) -> Mapping[str, Node]:
        return {value: node for node in self.nodes for value in node.values}

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """The place of every node in order, by name."""
        return {node.name: at for at, node in enumerate(self.nodes)}

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The input nodes in order: the graph's operands."""
        return tuple(node for node in self.nodes if node.operator == "input")

    @property
    def ends(self) -> tuple[str, ...]:
        """The values that lie in memory: operands and results."""
        return (*(node.name for node in self.inputs), *self.outputs)

    def producer(self, value: str) -> Node:
        """Return the node that computes a value; raises UnknownNameError."""
        try:
            return self._producers[value]
        except KeyError:
            raise self._unknown(value) from None

    def unconverted(self, value: str) -> str:
        """Return the value that a value is converted from; itself if it is none."""
        while (node := self.producer(value)).operator == "convert":
            value = node.inputs[0]
        return value

    def tile(self, value: str) -> Tile:
        """Return the tile of a value; raises UnknownNameError."""
        try:
            return self.tiles[value]
        except KeyError:
            raise self._unknown(value) from None

    def walk(self) -> Iterator[tuple[Graph, Node]]:
        """Yield every node with its graph, nested graphs included, depth first."""
        for node in self.nodes:
            yield self, node
            if node.body is not None:
                yield from node.body.walk()

    def _unknown(self, value: str) -> UnknownNameError:
        return unknown_name(f"value in graph {self.name!r}", value, self.tiles)

    def __str__(self) -> str:
        """Return the textual form, see `ladder.ir.printer`."""
        from ladder.ir.printer import print_graph

        return print_graph(self)


def value_name(node: str, position: int) -> str:
    """Return the name of a node's result."""
    return node if position == 0 else f"{node}.{position}"
