"""Grouped products of a program, which kernels of ours compute where the device has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.runtime.stored_experts import can_serve
from targets import TileDevice

CALLS: Mapping[str, bool] = {
    "aten._grouped_mm.default": False,
    "transformers.grouped_mm_fallback.default": True,
}
"""Operators that multiply rows by the matrix of their group -> whether rows of no group are zeros."""

PRODUCT = "ladder.grouped_product.default"
SLOTTED = "ladder.named_product.default"
"""The same of rows each of which names its matrix."""

LAID_OUT = "ladder.laid_out.default"
"""What copies rows into an order of memory, or gives them as they are."""


def with_grouped_products(graph: Graph, device: TileDevice) -> Graph:
    """Return a graph whose grouped products are calls of `ladder.runtime.stored_experts.grouped_product`.

    That looks at how matrices lie, and calls the program's own operator where no kernel reads them so; rows
    may lie in any way.
    """
    return replace(graph, nodes=tuple(_rewritten(graph, node, device) for node in graph.nodes))


def _rewritten(graph: Graph, node: Node, device: TileDevice) -> Node:
    given = node_attributes(node) if node.operator == "call" else {}
    whole = CALLS.get(str(given.get("target")))
    if whole is None or given["keywords"] or len(given["arguments"]) != 3 or len(node.inputs) != 3:
        return node
    if given["arguments"] != (("%", 0), ("%", 1), ("%", 2)):
        return node
    x, matrices, ends = (graph.tile(value) for value in node.inputs)
    dtype, shape = x.ttype.name, matrices.shape
    if len(x.shape) != 2 or len(shape) != 3 or len(ends.shape) != 1 or matrices.ttype.name != dtype:
        return node
    if node.tile.ttype.name != dtype or not all(isinstance(extent, int) for extent in shape):
        return node
    if not can_serve(device, dtype, int(shape[1]), int(shape[2])):
        return node
    given |= {"target": PRODUCT, "arguments": (*given["arguments"], whole)}
    rows = graph.producer(node.inputs[0])
    laid = rows.operator == "call" and node_attributes(rows)["target"] == LAID_OUT
    inputs = (rows.inputs[0] if laid else node.inputs[0], *node.inputs[1:])
    return replace(node, inputs=inputs, attributes=tuple(sorted(given.items())))
