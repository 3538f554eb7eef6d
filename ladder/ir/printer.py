"""Textual form of graphs; `ladder.ir.parser.parse` is its inverse."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ladder.ir.graph import Axis, Graph, Literal, Node
from tile_types.errors import VerificationError
from tile_types.tile import Tile

INDENT = "  "


def print_graph(graph: Graph) -> str:
    """Return the text of a graph, one node per line, nested graphs indented."""
    return "\n".join(_graph_lines(graph))


def _graph_lines(graph: Graph) -> list[str]:
    head = f"{graph.level} {graph.name}{_axes('grid', graph.grid)}{_axes('loops', graph.loops)} {{"
    lines = [head]
    for node in graph.nodes:
        lines += [INDENT + line for line in _node_lines(node)]
    lines.append(f"{INDENT}return {', '.join(f'%{output}' for output in graph.outputs)}".rstrip())
    return [*lines, "}"]


def _axes(label: str, axes: Sequence[Axis]) -> str:
    return f" {label}({', '.join(f'{axis.name}={axis.extent}' for axis in axes)})" if axes else ""


def _node_lines(node: Node) -> list[str]:
    operands = [f"%{value}" for value in node.inputs]
    attributes = [f"{name}={print_literal(value)}" for name, value in node.attributes]
    tiles = ", ".join(map(print_tile, node.tiles))
    line = f"%{node.name} = {node.operator}({', '.join(operands + attributes)}) : {tiles}"
    if node.body is None:
        return [line]
    body = _graph_lines(node.body)
    return [f"{line} = {body[0]}", *body[1:]]


def print_tile(tile: Tile) -> str:
    """Return ``float16[M, 64]``, with ``@level`` unless dram and ``{layout}`` unless canonical."""
    level = "" if tile.level == "dram" else f"@{tile.level}"
    layout = "" if tile.layout is None else f"{{{print_literal(tile.layout)}}}"
    return f"{tile.ttype.name}[{', '.join(map(str, tile.shape))}]{level}{layout}"


def print_literal(value: Literal) -> str:
    """Return the text of an attribute: numbers, "text", true, false, none, (tuples).

    Raises VerificationError if the value is none of these.
    """
    if value is None or isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, int | float):
        return repr(value)  # a NaN of any sign and payload is "nan"
    if isinstance(value, tuple):
        items = [print_literal(item) for item in value]
        return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"
    raise VerificationError(f"{value!r} of type {type(value).__name__} has no textual form")
