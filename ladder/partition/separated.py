"""Products of weights side by side as products of their own, for kernels that read the weights apart."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.partition.found_program import Slice, sliced_product
from tile_types.tile import Tile


def separated(graph: Graph, members: Collection[str], slices: Iterable[Slice]) -> tuple[Graph, set[str]]:
    """Return a graph in which some rows of weights are inputs, multiplied by products of their own.

    members: Nodes among which slices of products are to be replaced.
    slices: The rows; each becomes an input of that name.
    Returns: The graph, and the members: those whose values nothing reads any more are gone from both.
    """
    wanted = {(item.value, item.begin, item.rows): item for item in slices}
    if not wanted:
        return graph, set(members)
    nodes: list[Node] = []
    found = set(members)
    inputs: dict[str, Node] = {}
    for node in graph.nodes:
        product = sliced_product(graph, node) if node.name in found and node.operator == "slice" else None
        if product is None:
            nodes.append(node)
            continue
        new, weight = _product_of(graph, node, product, wanted)
        inputs[weight.name] = weight
        nodes += new
        found |= {n.name for n in new}
    whole = {item.value for item in wanted.values()}
    return _pruned(replace(graph, nodes=(*inputs.values(), *nodes)), found | whole)


def _product_of(
    graph: Graph, node: Node, product: Node, wanted: dict[tuple[str, int, int], Slice]
) -> tuple[list[Node], Node]:
    """Return the nodes that compute a slice's value by a product of its own, and their weight."""
    chain = [graph.producer(product.inputs[1])]
    while chain[-1].operator == "convert":
        chain.append(graph.producer(chain[-1].inputs[0]))
    rows = int(node.tile.shape[-1])
    item = wanted[chain[-1].name, int(node_attributes(node)["begin"][-1]), rows]
    weight = replace(chain[-1], name=str(item), tiles=(_with_rows(chain[-1], 0, rows),))
    new, value = [], weight.name
    for step in reversed(chain[:-1]):
        new.append(
            replace(
                step, name=f"{node.name}_{step.name}", inputs=(value,), tiles=(_with_rows(step, 0, rows),)
            )
        )
        value = new[-1].name
    last = f"{node.name}_{product.name}"
    new.append(
        replace(product, name=last, inputs=(product.inputs[0], value), tiles=(_with_rows(product, -1, rows),))
    )
    new.append(Node(f"{last}_in_type", "convert", (last,), (("type", node.tile.ttype.name),),
                    (replace(new[-1].tile, ttype=node.tile.ttype),)))  # fmt: skip
    shape = (("shape", node.tile.shape),)
    new.append(Node(node.name, "reshape", (new[-1].name,), shape, (node.tile,)))
    return new, weight


def _with_rows(node: Node, axis: int, extent: int) -> Tile:
    """Return a node's tile with another extent along an axis."""
    shape = list(node.tile.shape)
    shape[axis] = extent
    return replace(node.tile, shape=tuple(shape))


def _pruned(graph: Graph, members: set[str]) -> tuple[Graph, set[str]]:
    """Return a graph without members that nothing reads, and the members that are left."""
    while True:
        read = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs)
        dead = {n.name for n in graph.nodes if n.name in members and not read & set(n.values)}
        if not dead:
            return graph, {n.name for n in graph.nodes if n.name in members and n.operator != "input"}
        graph = replace(graph, nodes=tuple(node for node in graph.nodes if node.name not in dead))
        members = members - dead
