"""Cuts a larger program into LAX subprograms, which the search takes, and the operators between them.

A LAX subprogram has multilinear operators, divisions, roots, maxima and at most one exponential on a path,
no root after one (Mirage, OSDI'25, §5). Every value gets a *stage*: that of its operands, or one more if
its operator would be a second exponential, or a root of an exponential, within the stage, or if an operand
comes of an operator that is not LAX. Operators of one stage that are connected are one part; each operator
that is not LAX is a part of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator

AFTER_EXPONENTIAL = ("exp", "root")
"""LAX classes that no exponential may precede."""


@dataclass(frozen=True)
class Part:
    """A connected piece of a program.

    Parameters
    ----------
    graph
        Its inputs and outputs have the names of the program's values.
    lax
        Whether equality with it can be decided.
    reason
        Why not: the operator.
    """

    graph: Graph
    lax: bool
    reason: str = ""


def partition(graph: Graph) -> tuple[Part, ...]:
    """Return the parts of a kernel graph, each after those whose results it takes."""
    stages = _stages(graph)
    computing = [node for node in graph.nodes if node.operator not in ("input", "constant")]
    groups = _connected(graph, computing, stages)
    order = sorted(groups, key=lambda group: (stages[group[0].name], graph.nodes.index(group[0])))
    return tuple(_part(graph, group) for group in order)


def _lax_class(graph: Graph, node: Node) -> str:
    return get_operator(node.operator).lax_class(node_attributes(node, graph))


def _stages(graph: Graph) -> dict[str, tuple[int, int]]:
    """Return (stage, 0) of each node, (stage, 1) of those that are not LAX: they follow their stage."""
    found: dict[str, tuple[int, int]] = {}
    raised: dict[str, bool] = {}
    for node in graph.nodes:
        kind = _lax_class(graph, node)
        before = [found[value] for value in node.inputs]
        stage = max((number + outside for number, outside in before), default=0)
        exponential = any(raised[v] and found[v] == (stage, 0) for v in node.inputs)
        if kind in AFTER_EXPONENTIAL and exponential:
            stage, exponential = stage + 1, False
        found[node.name] = (stage, int(kind == "other"))
        raised[node.name] = exponential or kind == "exp"
    return found


def _connected(graph: Graph, nodes: Sequence[Node], stages: dict[str, tuple[int, int]]) -> list[list[Node]]:
    """Return groups of LAX nodes of one stage that values connect, and single nodes of the others."""
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        near = [value for value in node.inputs if value in groups and stages[value] == stages[node.name]]
        joined = [node]
        if not stages[node.name][1]:
            unique = {id(groups[value]): groups[value] for value in near}
            joined = [*(member for group in unique.values() for member in group), node]
        for member in joined:
            groups[member.name] = joined
    return list({id(group): group for group in groups.values()}.values())


def _part(graph: Graph, group: Sequence[Node]) -> Part:
    names = {node.name for node in group}
    ordered = [node for node in graph.nodes if node.name in names]
    outside = dict.fromkeys(value for node in ordered for value in node.inputs if value not in names)
    sources = [_source(graph, value) for value in outside]
    used = {value for node in graph.nodes if node.name not in names for value in node.inputs}
    outputs = tuple(node.name for node in ordered if node.name in used or node.name in graph.outputs)
    body = Graph(f"{graph.name}_{ordered[-1].name}", graph.level, (*sources, *ordered), outputs)
    kind = _lax_class(graph, ordered[0])
    return Part(body, kind != "other", f"{ordered[0].operator} is outside LAX" if kind == "other" else "")


def _source(graph: Graph, value: str) -> Node:
    node = graph.producer(value)
    return node if node.operator == "constant" else Node(value, "input", (), (), (graph.tile(value),))
