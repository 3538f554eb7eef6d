"""Which functions of a chain may be approximate on GPUs: those whose every result is rounded to 16 bits."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.ir.build import node_attributes
from ladder.ir.formulas import FORMULAS
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower.chain.element_types import HALVES, computed_type, stored_type
from ladder.partition.elements import FLOATS8

STEPS = ("floor", "round", "quotient", "less", "less_equal", "equal", "encode", "bits", "fmod")
"""Operators that make a step of their operand's last bit."""

APPROXIMATED = ("exp", "exp_ftz", "div", "div_ftz", "rsqrt", "log", "log1p", *FORMULAS)
"""Operators that may be approximate."""


def may_be_approximate(graph: Graph) -> bool:
    """Tell whether results are rounded to 16 bits, and no approximation is made a step of its last bit."""
    stored = {stored_type(graph.tile(value).ttype.name) for value in graph.outputs}
    near: set[str] = set()
    for node in graph.nodes:
        if near.intersection(node.inputs):
            if _is_step(graph, node):
                return False
            near.add(node.name)
        elif node.operator in APPROXIMATED:
            near.add(node.name)
    return stored <= set(HALVES)


def _is_step(graph: Graph, node: Node) -> bool:
    """Tell whether a node compares or rounds floats."""
    if not computed_type(graph.tile(node.inputs[0]).ttype.name).startswith("float"):
        return False
    if node.operator != "convert":
        return node.operator in STEPS
    whole = not computed_type(node.tile.ttype.name).startswith("float")
    return whole or bool(node_attributes(node)["exact"])


def approximable(graph: Graph) -> Mapping[str, str]:
    """Return the nodes that may be approximate whatever the chain stores -> their operators.

    All that is made of them passes the program's own rounding to 16 bits, which fused kernels leave out: a
    program without it would differ by more. None is made a step of, but codes of 8-bit floats: the nearest
    of a number near the middle of two is as far as the other.
    """
    users: dict[str, list[Node]] = {}
    for node in graph.nodes:
        for value in node.inputs:
            users.setdefault(value, []).append(node)
    stepped: set[str] = set()
    rounded: set[str] = set()
    for node in reversed(graph.nodes):
        name, readers = node.name, users.get(node.name, [])
        if any(reader.name in stepped or _is_unsafe(graph, reader) for reader in readers):
            stepped.add(name)
            continue
        inside = name not in graph.outputs and get_operator(node.operator).elementwise
        if inside and all(_rounds(reader) or reader.name in rounded for reader in readers):
            rounded.add(name)
    return {n.name: n.operator for n in graph.nodes if n.name in rounded and n.operator in APPROXIMATED}


def _is_unsafe(graph: Graph, node: Node) -> bool:
    return _is_step(graph, node) and node.tile.ttype.name not in FLOATS8


def _rounds(node: Node) -> bool:
    """Tell whether a node stands for a rounding to 16 bits that is left out."""
    halves = node.operator == "convert" and node.tile.ttype.name in HALVES
    return halves and not node_attributes(node)["exact"]
