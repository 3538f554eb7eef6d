"""Building graphs: names, inference of result tiles, and binding of symbolic sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from ladder.ir.extents import bind as bind_extent
from ladder.ir.extents import bind_shape, canonical, product
from ladder.ir.graph import Axis, Graph, Literal, Node
from ladder.ir.operator import Operator
from ladder.ir.ops import get_operator
from tile_types.errors import unknown_name
from tile_types.library import get_type
from tile_types.tile import Extent, Tile
from tile_types.ttype import TType

OUTER_PLACE = "dram"
"""Memory level of a graph's operands."""

DEFAULT_PLACE = {"kernel": OUTER_PLACE, "block": "shared"}
"""Memory level of results, by graph level."""


def node_attributes(node: Node, graph: Graph | None = None) -> dict[str, Any]:
    """Return all attributes of a node, defaults included; with its graph, also its context."""
    operator = get_operator(node.operator)
    attributes = dict(completed(node.operator, node.attributes))
    return _with_context(operator, attributes, graph.loops if graph else ())


def reduced_axis(graph: Graph | GraphBuilder, node: Node) -> int:
    """Return the axis along which a reduction runs, from the first on of what it reads."""
    return int(node_attributes(node)["axis"] % len(graph.tile(node.inputs[0]).shape))


def is_along_last(graph: Graph | GraphBuilder, node: Node) -> bool:
    """Tell whether a reduction runs along the last axis of what it reads."""
    return reduced_axis(graph, node) == len(graph.tile(node.inputs[0]).shape) - 1


@lru_cache(maxsize=4096)
def completed(operator: str, given: tuple[tuple[str, Literal], ...]) -> Mapping[str, Any]:
    """Return attributes of an operator by name, those that are not given as by default."""
    return get_operator(operator).complete(dict(given))


def _with_context(operator: Operator, attributes: dict[str, Any], loops: Sequence[Axis]) -> dict[str, Any]:
    if operator.role == "accumulate":
        attributes["extent"] = product(axis.extent for axis in loops)
    return attributes


def infer_tile(
    operator: Operator,
    tiles: Sequence[Tile],
    attributes: Mapping[str, Literal],
    level: str,
    loops: Sequence[Axis] = (),
) -> Tile:
    """Return the result's tile; raises ShapeError, DTypeError or LadderError for bad attributes."""
    return operator.infer(tiles, _with_context(operator, operator.complete(attributes), loops), level)


class GraphBuilder:
    """Adds nodes one by one and returns the graph at the end.

    Parameters
    ----------
    name
        Name of the graph.
    level
        ``"kernel"`` or ``"block"``.
    grid, loops
        Names and extents of a block graph's dimensions.

    Examples
    --------
    >>> g = GraphBuilder("double")
    >>> x = g.input("x", "float16", ("M", 8))
    >>> print(g.finish(g.add("add", x, x, name="y")))
    kernel double {
      %x = input() : float16[M, 8]
      %y = add(%x, %x) : float16[M, 8]
      return %y
    }
    """

    def __init__(
        self,
        name: str,
        level: str = "kernel",
        *,
        grid: Mapping[str, Extent] | None = None,
        loops: Mapping[str, Extent] | None = None,
    ) -> None:
        self.name = name
        self.level = level
        self.grid = _axes(grid)
        self.loops = _axes(loops)
        self._nodes: dict[str, Node] = {}
        self._tiles: dict[str, Tile] = {}
        self._taken: dict[str, int] = {}

    def input(
        self,
        name: str,
        ttype: str | TType,
        shape: Sequence[Extent],
        level: str | None = None,
        layout: Any = None,
    ) -> str:
        """Declare the next operand and return its value's name."""
        tile = Tile(get_type(ttype), tuple(map(canonical, shape)), level or OUTER_PLACE, layout)
        return self.insert(Node(self.fresh(name), "input", (), (), (tile,)))

    def add(
        self,
        operator: str,
        *inputs: str,
        name: str | None = None,
        level: str | None = None,
        layout: Any = None,
        **attributes: Literal,
    ) -> str:
        """Apply an operator; the result's tile is inferred. Returns the value's name.

        Raises UnknownNameError if the operator, an operand or an attribute does not exist.
        Raises ShapeError, DTypeError if the operands do not fit the operator.
        """
        row = get_operator(operator)
        tiles = [self.tile(value) for value in inputs]
        place = level or (OUTER_PLACE if row.role == "store" else DEFAULT_PLACE[self.level])
        tile = infer_tile(row, tiles, attributes, place, self.loops)
        tile = replace(tile, layout=layout)
        stored = row.stored(attributes)
        return self.insert(Node(self.fresh(name or operator), operator, inputs, stored, (tile,)))

    def nest(self, body: Graph, *inputs: str, name: str | None = None) -> tuple[str, ...]:
        """Add a node defined by a block graph; returns the names of its results."""
        tiles = tuple(body.tile(output) for output in body.outputs)
        return self._values(Node(self.fresh(name or body.name), body.level, inputs, (), tiles, body))

    def insert(self, node: Node) -> str:
        """Add a finished node as it is; returns the name of its first result."""
        return self._values(node)[0]

    def copy(self, node: Node, inputs: tuple[str, ...]) -> tuple[str, ...]:
        """Add a node with other operands, under its name or one that is free; returns its results' names."""
        return self._values(replace(node, name=self.fresh(node.name), inputs=inputs))

    def _values(self, node: Node) -> tuple[str, ...]:
        self._nodes[node.name] = node
        self._tiles.update(zip(node.values, node.tiles, strict=True))
        return node.values

    def fresh(self, wish: str) -> str:
        """Return ``wish`` or, if it is taken, ``wish_1``, ``wish_2`` ..."""
        name, count = wish, self._taken.get(wish, 0)
        while name in self._nodes:
            count += 1
            name = f"{wish}_{count}"
        self._taken[wish] = count
        return name

    def has(self, value: str) -> bool:
        """Tell whether a value of that name is defined."""
        return value in self._tiles

    def tile(self, value: str) -> Tile:
        """Return the tile of a value; raises UnknownNameError."""
        if value not in self._tiles:
            raise unknown_name(f"value in graph {self.name!r}", value, self._tiles)
        return self._tiles[value]

    def node(self, value: str) -> Node:
        self.tile(value)
        return self._nodes[value.partition(".")[0]]

    def finish(self, *outputs: str) -> Graph:
        for output in outputs:
            self.tile(output)
        return Graph(self.name, self.level, tuple(self._nodes.values()), outputs, self.grid, self.loops)


def _axes(extents: Mapping[str, Extent] | None) -> tuple[Axis, ...]:
    return tuple(Axis(name, canonical(extent)) for name, extent in (extents or {}).items())


Change = Callable[[GraphBuilder, Node, tuple[str, ...]], str | None]
"""Given a node and its operands in a new graph, adds a value that takes its place; None: there is none."""


def transformed(graph: Graph, change: Change) -> Graph:
    """Return the graph with nodes that a change replaces; others are copied."""
    builder = GraphBuilder(graph.name, graph.level)
    names: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(names[value] for value in node.inputs)
        found = change(builder, node, inputs)
        values = builder.copy(node, inputs) if found is None else (found,)
        names.update(zip(node.values, values, strict=True))
    return builder.finish(*(names[value] for value in graph.outputs))


def bind(graph: Graph, sizes: Mapping[str, Extent]) -> Graph:
    """Put numbers, or other extents, for named sizes everywhere in a graph; other names stay symbolic."""
    return replace(
        graph,
        nodes=tuple(_bind_node(node, sizes) for node in graph.nodes),
        grid=tuple(Axis(axis.name, bind_extent(axis.extent, sizes)) for axis in graph.grid),
        loops=tuple(Axis(axis.name, bind_extent(axis.extent, sizes)) for axis in graph.loops),
    )


def _bind_node(node: Node, sizes: Mapping[str, Extent]) -> Node:
    kinds = get_operator(node.operator).attributes
    attributes = tuple((name, _bind_value(kinds[name].kind, value, sizes)) for name, value in node.attributes)
    tiles = tuple(replace(tile, shape=bind_shape(tile.shape, sizes)) for tile in node.tiles)
    body = bind(node.body, sizes) if node.body is not None else None
    return replace(node, attributes=attributes, tiles=tiles, body=body)


def _bind_value(kind: str, value: Any, sizes: Mapping[str, Extent]) -> Any:
    if kind == "extent":
        return bind_extent(value, sizes)
    if kind == "extents":
        return bind_shape(value, sizes)
    if kind == "sizes":
        return tuple((name, bind_extent(extent, sizes)) for name, extent in value)
    return value


def is_by_element(node: Node) -> bool:
    """Tell whether a node computes each element of those at its place, conversions included."""
    return get_operator(node.operator).elementwise or node.operator == "convert"


def draws(node: Node) -> bool:
    """Tell whether a node draws random numbers: such nodes run once each, in their order."""
    return ("draws", True) in node.attributes


def prune(graph: Graph) -> Graph:
    """Remove nodes that no output needs.

    Inputs stay, they are the signature; so does what draws random numbers, on which later draws depend.
    """
    needed = set(graph.outputs)
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        if node.operator == "input" or draws(node) or needed & set(node.values):
            kept.append(node)
            needed |= set(node.inputs)
    return replace(graph, nodes=tuple(reversed(kept)))
