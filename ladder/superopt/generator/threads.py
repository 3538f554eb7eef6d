"""Thread graphs by fusion: chains of element-wise operators of a block graph stay in registers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.ir.build import GraphBuilder
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator


def fuse_threads(graph: Graph) -> Graph:
    """Return the graph with every group of element-wise operators of its block graphs as a thread graph.

    A value joins the group of its consumer if it has that one only, both are computed in the same
    stage (before or after the loop's accumulators), and it has the consumer's shape. A group's
    values, its result included, are in registers.
    """
    nodes = tuple(
        replace(node, body=_fused_block(node.body)) if node.body is not None else node for node in graph.nodes
    )
    return replace(graph, nodes=nodes)


def _fused_block(block: Graph) -> Graph:
    groups = _groups(block)
    last = {group[-1].name: group for group in groups}
    inside = {node.name for group in groups for node in group[:-1]}
    b = GraphBuilder(block.name, block.level)
    b.grid, b.loops = block.grid, block.loops
    for node in block.nodes:
        if node.name in last:
            b.insert(_thread(b, last[node.name]))
        elif node.name not in inside:
            b.insert(node)
    return b.finish(*block.outputs)


def _groups(block: Graph) -> list[list[Node]]:
    """Return groups of at least two operators, each in order; the last one's value is the group's."""
    consumers: dict[str, list[Node]] = {}
    for node in block.nodes:
        for value in node.inputs:
            consumers.setdefault(value, []).append(node)
    group_of: dict[str, list[Node]] = {}
    for node in reversed(block.nodes):
        if not _fusible(node):
            continue
        users = list({user.name: user for user in consumers.get(node.name, ())}.values())
        joins = len(users) == 1 and users[0].name in group_of and _fits(node, users[0])
        group = group_of[users[0].name] if joins else []
        group.append(node)
        group_of[node.name] = group
    found = {id(group): group[::-1] for group in group_of.values()}
    return [group for group in found.values() if sum(bool(node.inputs) for node in group) > 1]


def _fusible(node: Node) -> bool:
    """Element-wise operators, conversions and the numbers they use; stages never mix in one group.

    A group's values all come before the loop's accumulators or all after, since accumulators are not
    fusible and stages meet nowhere else.
    """
    return get_operator(node.operator).elementwise or node.operator in ("convert", "constant")


def _fits(node: Node, user: Node) -> bool:
    return node.operator == "constant" or node.tile.shape == user.tile.shape


def _thread(block: GraphBuilder, group: Sequence[Node]) -> Node:
    own = {node.name for node in group}
    outside = list(dict.fromkeys(value for node in group for value in node.inputs if value not in own))
    t = GraphBuilder(f"thread_{group[-1].name}", "thread")
    names: dict[str, str] = {}
    for value in outside:
        tile = block.tile(value)
        names[value] = t.input(f"{value}_in", tile.ttype, tile.shape, tile.level)
    for node in group:
        tiles = tuple(replace(tile, level="register") for tile in node.tiles)
        inputs = tuple(names[value] for value in node.inputs)
        names[node.name] = t.insert(replace(node, inputs=inputs, tiles=tiles))
    body = t.finish(names[group[-1].name])
    return Node(group[-1].name, "thread", tuple(outside), (), (body.tile(body.outputs[0]),), body)
