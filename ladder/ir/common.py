"""Graph to graph: equal nodes become one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ladder.ir.build import GraphBuilder
from ladder.ir.graph import Graph
from ladder.ir.ops import get_operator


def merge_equal(graph: Graph) -> Graph:
    """Keep the first of all nodes that apply one operator to the same values.

    Library calls stay as often as they are made: they may draw random numbers.
    """
    builder = GraphBuilder(graph.name, graph.level)
    renamed: dict[str, str] = {}
    seen: dict[Any, tuple[str, ...]] = {}
    for node in graph.nodes:
        inputs = tuple(renamed[value] for value in node.inputs)
        copy = replace(node, inputs=inputs)
        key = (node.operator, inputs, node.attributes, node.tiles, node.body)
        values = seen.get(key) if get_operator(node.operator).role == "value" else None
        if values is None:
            builder.insert(copy)
            values = seen[key] = copy.values
        renamed.update(zip(node.values, values, strict=True))
    return builder.finish(*(renamed[output] for output in graph.outputs))
