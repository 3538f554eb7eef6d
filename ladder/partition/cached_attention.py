"""Attention over caches: the chains that make its q, and put new rows into the caches, join it as one part.

The kernel of attention then makes these rows itself: they are few, and a launch takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ladder.ir.graph import Graph
from ladder.partition.attention import node_of
from ladder.partition.prologues import Links
from ladder.partition.subgraphs import Subgraph, extract, needed, outside_inputs


def with_cached_attention(
    graph: Graph, parts: Sequence[Subgraph], fits: Callable[[Graph], bool]
) -> list[Subgraph]:
    """Return parts with chains in the attention that alone reads them.

    fits: Tells whether a kernel computes the graph of such a part.
    """
    found, links = list(parts), Links(graph, parts)
    for part in parts:
        chains = _rows_before(part, links)
        whole = _joined(graph, chains, part) if chains else None
        if whole is not None and fits(whole.graph):
            gone = {id(chain) for chain in chains}
            found = [whole if item is part else item for item in found if id(item) not in gone]
    return found


def rows_of(graph: Graph) -> Graph:
    """Return the chain of such a part: its results are q, and the caches of keys and values."""
    return needed(graph, node_of(graph).inputs[:3])


def _rows_before(part: Subgraph, links: Links) -> list[Subgraph]:
    """Return the chains that make q, keys and values of attention for it alone, none where others do."""
    if part.kind != "attention":
        return []
    rows = [part.outside[value] for value in node_of(part.graph).inputs[:3]]
    chains = [*{id(chain): chain for value in rows if (chain := links.maker.get(value))}.values()]
    made = [value for chain in chains for value in chain.outputs]
    own = len({*rows}) == 3 and {*made} == {*rows} and rows[0] not in links.graph.outputs
    own = own and all(chain.kind == "chain" for chain in chains)
    own = own and all(links.readers.get(value) == [part] for value in rows)
    return chains if own else []


def _joined(graph: Graph, chains: Sequence[Subgraph], part: Subgraph) -> Subgraph:
    members = {n.name for item in (*chains, part) for n in item.graph.nodes if n.operator != "input"}
    rows = [value for chain in chains for value in chain.outputs]
    outputs = (*part.outputs, *(value for value in rows if graph.producer(value).operator == "put"))
    region, inputs = extract(graph, members, outputs), outside_inputs(graph, members)
    return Subgraph("cached_attention", region, inputs, outputs, part.reason)
