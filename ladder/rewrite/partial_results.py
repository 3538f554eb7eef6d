"""Slices of what is computed by element compute their elements alone.

A slice is a view, and what it views would be computed whole: a quarter of it is wanted where every second
element along two axes is, as after a blur.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from ladder.ir.build import GraphBuilder, is_by_element, node_attributes, transformed
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node

LEAST_UNREAD = 2
"""Times as many elements as a slice has that must be computed for it, at least."""


def computed_in_part(graph: Graph) -> Graph:
    """Return a graph in which slices are taken of operands, where nothing else reads the result."""
    readers = Counter(value for node in graph.nodes for value in node.inputs) + Counter(graph.outputs)
    found = {n.name for n in graph.nodes if n.operator == "slice" and _reads_little(graph, n, readers)}
    if not found:
        return graph

    def one(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        return _of_slices(builder, node, inputs[0]) if node.name in found else None

    return replace(transformed(graph, one), grid=graph.grid)


def _reads_little(graph: Graph, node: Node, readers: Counter[str]) -> bool:
    """Tell whether a slice leaves most of what is computed by element for it alone."""
    whole = graph.producer(node.inputs[0])
    by_element = is_by_element(whole)
    if not by_element or readers[whole.name] > 1:
        return False
    extents = (*node.tile.shape, *whole.tile.shape, *node_attributes(node)["begin"])
    if not all(isinstance(extent, int) for extent in extents):
        return False
    read, made = int(product(node.tile.shape)), int(product(whole.tile.shape))
    return 0 < read * LEAST_UNREAD <= made


def _of_slices(builder: GraphBuilder, node: Node, value: str) -> str:
    """Add what computes a value, of slices of its operands."""
    whole, given = builder.node(value), node_attributes(node)
    rank = len(node.tile.shape)
    steps = given["step"] or (1,) * rank

    def part(operand: str) -> str:
        shape = builder.tile(operand).known_shape
        own = [
            (0, 1, 1) if extent == 1 else (given["begin"][axis], node.tile.shape[axis], steps[axis])
            for axis, extent in enumerate(shape, rank - len(shape))
        ]
        begin, extents, step = zip(*own, strict=True) if own else ((), (), ())
        return builder.add("slice", operand, begin=begin, shape=extents, step=step) if own else operand

    parts = map(part, whole.inputs)
    attributes: dict[str, Any] = dict(whole.attributes)
    return builder.add(whole.operator, *parts, **attributes)
