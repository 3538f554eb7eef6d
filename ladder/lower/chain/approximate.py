"""Chains in which approximate GPU instructions may compute exponentials, quotients and roots."""

from __future__ import annotations

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower.chain.element_types import HALVES, computed_type, stored_type

STEPS = ("floor", "round", "less", "less_equal", "equal", "encode")
"""Operators that make a step of their operand's last bit."""


def may_be_approximate(graph: Graph) -> bool:
    """Tell whether results are rounded to 16 bits, and nothing before makes a step of a float's last bit."""
    stored = {stored_type(graph.tile(value).ttype.name) for value in graph.outputs}
    return stored <= set(HALVES) and not any(_is_step(graph, node) for node in graph.nodes)


def _is_step(graph: Graph, node: Node) -> bool:
    """Tell whether a node compares or rounds floats."""
    if not node.inputs or not computed_type(graph.tile(node.inputs[0]).ttype.name).startswith("float"):
        return False
    if node.operator != "convert":
        return node.operator in STEPS
    whole = not computed_type(node.tile.ttype.name).startswith("float")
    return whole or bool(node_attributes(node)["exact"])
