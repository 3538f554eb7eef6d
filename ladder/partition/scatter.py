"""Writes into an argument of the model: where nothing reads the old argument, they happen there.

So do sums into rows by number, where a part of the plan alone has made what they are added to.

A cache of keys or values that the model updates (``cache.index_copy_(2, position, k)``) is a ``put`` node
whose result the argument takes: the chain that computes the new rows writes them there. Functional forms of
operators that write arguments are told so, and make no copy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.partition.rows import row_axes
from ladder.partition.subgraphs import Subgraph, engine, extract, is_form, outside_inputs
from ladder.partition.views import inlined_chain, is_inlined
from targets import TileDevice
from tile_types.tile import Extent

Users = Mapping[str, list[Node | None]]


def in_place(
    graph: Graph, users: Users, updated: Mapping[str, str], device: TileDevice | None = None
) -> list[Node]:
    """Return the ``put`` nodes that may write into an argument, or into what is made for them alone.

    updated: Result of the graph -> the input that takes it.
    """
    found = []
    for node in graph.nodes:
        if node.operator != "put" or users[node.inputs[0]] != [node]:
            continue
        given, last = node_attributes(node), len(node.tile.shape) - 1
        argument = updated.get(node.name) == node.inputs[0]
        if given["combine"]:
            base = graph.producer(node.inputs[0])
            own = engine(base) == "chain" and not is_inlined(graph, base)
            own = own or base in found or _number_of(graph, base.name) is not None
            if (argument or own) and _combines(graph, node, device):
                found.append(node)
        elif argument and given["axis"] != last:
            found.append(node)
    return found


ORDERED = ("int32", "int64")
"""Types whose elements in memory are compared as they are."""


def _combines(graph: Graph, node: Node, device: TileDevice | None) -> bool:
    """Tell whether kernels combine rows with what is there, in order of nothing.

    Float32 in memory are compared as integers, where no NaN of the base has a sign.
    """
    kind, combine = node.tile.ttype.name, node_attributes(node)["combine"]
    if device is None or device.kind != "cuda" or graph.tile(node.inputs[2]).ttype.name != kind:
        return False
    if combine == "add":
        return kind != "bfloat16" or "vector.red" in device.features
    if kind == "float32":
        number = _number_of(graph, node.inputs[0])
        return number is not None and number == number
    return kind in ORDERED


def _number_of(graph: Graph, value: str) -> float | None:
    """Return the number that all elements of a value are; None if they are of other values."""
    node = graph.producer(value)
    while node.operator in ("broadcast", "reshape"):
        node = graph.producer(node.inputs[0])
    return float(node_attributes(node)["value"]) if node.operator == "constant" else None


def with_own_numbers(graph: Graph) -> Graph:
    """Return the graph with a base of its own for each ``put`` that combines with numbers all alike."""
    read = Counter(value for node in graph.nodes for value in node.inputs) + Counter(graph.outputs)
    nodes: list[Node] = []
    for node in graph.nodes:
        base = graph.producer(node.inputs[0]) if node.operator == "put" else node
        shared = base is not node and base.operator == "broadcast" and read[base.name] > 1
        if shared and node_attributes(node)["combine"] and _number_of(graph, base.name) is not None:
            own = replace(base, name=f"{base.name}_of_{node.name}", tiles=base.tiles)
            nodes.append(own)
            node = replace(node, inputs=(own.name, *node.inputs[1:]))
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes)) if len(nodes) > len(graph.nodes) else graph


def with_own_bases(graph: Graph, updated: Mapping[str, str]) -> Graph:
    """Return the graph with functional forms that write arguments themselves; `updated` as of `in_place`."""
    read = Counter(value for node in graph.nodes for value in node.inputs) + Counter(graph.outputs)

    def told(node: Node) -> Node:
        if not is_form(node):
            return node
        pairs = enumerate(_bases(node))
        own = tuple(at for at, (base, made) in pairs if updated.get(made) == base and read[base] == 1)
        bases, places, _, *rest = node_attributes(node)["arguments"]
        given = {**dict(node.attributes), "arguments": (bases, places, own, *rest)}
        return replace(node, attributes=tuple(given.items()))

    return replace(graph, nodes=tuple(map(told, graph.nodes)))


def _bases(form: Node) -> list[tuple[str, str]]:
    """Return what a functional form writes, and what it gives for it."""
    bases = [form.inputs[at] for _, at in node_attributes(form)["arguments"][0]]
    return [*zip(bases, form.values[len(form.values) - len(bases) :], strict=True)]


def with_scatters(
    graph: Graph, users: Users, chains: Sequence[Subgraph], scatters: Sequence[Node]
) -> list[Subgraph]:
    """Return the chains with every ``put`` in the one that computes its rows, or in one that copies them."""
    parts = list(chains)
    for node in scatters:
        rows = node.inputs[2]
        views, source = inlined_chain(graph, rows)
        at = next((at for at, part in enumerate(parts) if source in part.outputs), None)
        extended = (
            None if at is None or source is None else _extended(graph, users, parts[at], views, source, node)
        )
        if extended is not None and at is not None:
            parts[at] = extended
        else:
            own = set() if node.inputs[1] in views else {*views}  # where rows go is read from memory
            parts.append(_part(graph, {*own, node.name}, (node.name,), "rows are written in place"))
    return parts


def _extended(
    graph: Graph, users: Users, part: Subgraph, views: Sequence[str], source: str, node: Node
) -> Subgraph | None:
    """Return a chain that also scatters rows, or None if that is no loop over rows."""
    members = {n.name for n in part.graph.nodes if n.operator != "input"} | {*views, node.name}
    if graph.producer(node.inputs[1]).name in members:
        return None  # where rows go is read from memory
    inside = all(reader is not None and reader.name in members for reader in users[source])
    outputs = [value for value in part.outputs if value != source or not inside]
    if not _is_chain(graph, members, [*outputs, node.inputs[2]], node.name):
        return None
    return _part(graph, members, (*outputs, node.name), part.reason)


def _is_chain(graph: Graph, members: set[str], outputs: Sequence[str], put: str) -> bool:
    computed = {name for name in members - {put} if graph.producer(name).operator != "put"}
    values = _rows_of(graph, outputs)
    return row_axes(extract(graph, computed, values, "chain"), values, again=False) is not None


def _rows_of(graph: Graph, outputs: Sequence[str]) -> list[str]:
    """Return the results of a chain, those of ``put`` nodes by the rows that are put."""
    made = map(graph.producer, outputs)
    return [n.inputs[2] if n.operator == "put" else v for n, v in zip(made, outputs, strict=True)]


def without_puts(graph: Graph) -> tuple[Graph, list[str]]:
    """Return a chain's graph without its ``put`` nodes, and its results: the rows that are put."""
    kept = tuple(node for node in graph.nodes if node.operator != "put")
    values = _rows_of(graph, graph.outputs)
    return replace(graph, nodes=kept, outputs=tuple(values)), values


def _part(graph: Graph, members: set[str], outputs: tuple[str, ...], reason: str) -> Subgraph:
    region = extract(graph, members, outputs, "chain")
    return Subgraph("chain", region, outside_inputs(graph, members), outputs, reason)


def written(part: Subgraph) -> dict[str, str]:
    """Return result -> the value of the model in whose memory it is written."""
    found = {node.name: part.outside[node.inputs[0]] for node in _puts(part)}
    for node in filter(is_form, part.graph.nodes):
        pairs, own = _bases(node), node_attributes(node)["arguments"][2]
        found.update((pairs[at][1], part.outside[pairs[at][0]]) for at in own)
    return found


def numbered(part: Subgraph) -> list[tuple[str, Extent, bool]]:
    """Return the values of the model that say where rows go, how many are there, and `from_end`."""
    places = [(node, node_attributes(node)) for node in _puts(part)]
    return [(part.outside[node.inputs[1]], node.tile.shape[g["axis"]], g["from_end"]) for node, g in places]


def rows_put(part: Subgraph) -> set[str]:
    """Return the values whose rows a chain writes by number: a kernel writes each to one place."""
    return {node.inputs[2] for node in _puts(part)}


def _puts(part: Subgraph) -> list[Node]:
    """Return what writes rows within a chain, or within attention that makes them."""
    own = part.kind in ("chain", "cached_attention")
    return [node for node in part.graph.nodes if own and node.operator == "put"]
