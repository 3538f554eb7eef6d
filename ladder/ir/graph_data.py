"""Graphs as JSON-able data, equal tiles and attributes once: it reads back fast, where text is for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.ir.graph import Axis, Graph, Node
from tile_types.library import get_type
from tile_types.tile import Tile


def graph_to_data(graph: Graph) -> dict[str, Any]:
    """Return what `graph_from_data` reads back."""
    tiles: dict[Tile, int] = {}
    attributes: dict[str, int] = {}
    values: list[Any] = []
    nodes = []
    for node in graph.nodes:
        text = repr(node.attributes)  # equal numbers of different types are different attributes
        if text not in attributes:
            attributes[text] = len(values)
            values.append(node.attributes)
        places = [tiles.setdefault(tile, len(tiles)) for tile in node.tiles]
        body = None if node.body is None else graph_to_data(node.body)
        nodes.append([node.name, node.operator, node.inputs, attributes[text], places, body])
    return {
        "name": graph.name,
        "level": graph.level,
        "outputs": graph.outputs,
        "grid": [[axis.name, axis.extent] for axis in graph.grid],
        "loops": [[axis.name, axis.extent] for axis in graph.loops],
        "tiles": [[tile.ttype.name, tile.shape, tile.level, tile.layout] for tile in tiles],
        "attributes": values,
        "nodes": nodes,
    }


def graph_from_data(data: Mapping[str, Any]) -> Graph:
    """Return a graph, also after its data went through JSON.

    Raises KeyError, IndexError, TypeError, ValueError, LadderError if the data are of another form.
    """
    tiles = [
        Tile(get_type(ttype), as_tuple(shape), level, as_tuple(layout))
        for ttype, shape, level, layout in data["tiles"]
    ]
    attributes = [as_tuple(given) for given in data["attributes"]]
    nodes = tuple(
        Node(
            name,
            operator,
            tuple(inputs),
            attributes[at],
            tuple(tiles[place] for place in places),
            None if body is None else graph_from_data(body),
        )
        for name, operator, inputs, at, places, body in data["nodes"]
    )
    grid, loops = (tuple(Axis(name, extent) for name, extent in data[label]) for label in ("grid", "loops"))
    return Graph(data["name"], data["level"], nodes, tuple(data["outputs"]), grid, loops)


def as_tuple(value: Any) -> Any:
    """Return lists, of lists, as the tuples that they were before they went through JSON."""
    if isinstance(value, Mapping):
        return {name: as_tuple(item) for name, item in value.items()}
    return tuple(map(as_tuple, value)) if isinstance(value, list | tuple) else value
