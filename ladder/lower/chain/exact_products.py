"""Products of halves, which float32 holds exactly: one instruction adds them to something."""

from __future__ import annotations

from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator


def is_exact_product(graph: Graph, node: Node) -> bool:
    """Tell whether a float32 product is exact, of halves as they lie in memory: it is added in one step."""
    if node.operator != "mul" or node.tile.ttype.name != "float32":
        return False
    return all(_is_stored_half(graph, value) for value in node.inputs)


def _is_stored_half(graph: Graph, value: str) -> bool:
    """Tell whether a value has elements of an input of float16, or zeros, as float32."""
    node = graph.producer(value)
    while node.operator in ("convert", "map") or (
        node.inputs and get_operator(node.operator).engine == "view"
    ):
        if len(node.inputs) > 1 or node.tile.ttype.name not in ("float16", "float32"):
            return False
        node = graph.producer(node.inputs[0])
    return get_operator(node.operator).role == "input" and node.tile.ttype.name == "float16"
