"""What is padded by its own elements, which small windows read without storing it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ladder.ir.graph import Graph, Node
from ladder.partition.repeats import read_and_taken
from ladder.partition.rows import REDUCTIONS
from ladder.partition.subgraphs import engine
from ladder.partition.views import is_inlined


def is_bordered(graph: Graph, node: Node) -> bool:
    """Tell whether a node joins ends of a value's own elements to it."""
    return node.operator == "concat" and len({_source(graph, value) for value in node.inputs}) == 1


def is_turned(graph: Graph, node: Node) -> bool:
    """Tell whether a node may be such an end, turned around: it takes no more elements than there are."""
    if node.operator != "map":
        return False
    read, taken = read_and_taken(graph, node)
    return 0 < taken <= read


def _source(graph: Graph, value: str) -> str:
    """Return what a value has elements of, through views and joins of ends."""
    node = graph.producer(value)
    if not node.inputs or not any(moves(graph, node) for moves in (is_inlined, is_turned, is_bordered)):
        return value
    return _source(graph, node.inputs[0])


def is_given(users: Mapping[str, Sequence[Node | None]], node: Node) -> bool:
    """Tell whether results have an element for each of a node's; else it is only read by reductions.

    users: Value -> the nodes that read it; None: it is a result.
    """
    ahead = [node.name]
    while ahead:
        for user in users[ahead.pop()]:
            if user is None or engine(user) != "chain":
                return True
            ahead += [] if user.operator in REDUCTIONS else user.values
    return False
