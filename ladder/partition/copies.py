"""Copies of a chain's results in another order, made by the chain itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.ir.graph import Graph
from ladder.partition.chains import MOST_CHAIN_NODES
from ladder.partition.rows import column_axes, row_axes
from ladder.partition.subgraphs import Subgraph, extract, outside_inputs
from ladder.partition.views import is_inlined


def absorb_copies(graph: Graph, parts: Sequence[Subgraph], again: bool) -> list[Subgraph]:
    """Let chains write what only copies of their results are read for in the order in which it is read.

    A part that reads one result of a chain and only renames its positions becomes part of that chain; the
    result itself is stored no more unless somebody else reads it. ``again`` as `row_axes` takes it.
    """
    found = list(parts)
    for copy in parts:
        if copy.kind != "chain" or len(copy.inputs) != 1 or not _only_moves(copy):
            continue
        maker = next((p for p in found if p.kind == "chain" and copy.inputs[0] in p.outputs), None)
        if maker is None or "put" in maker.operators or _has_columns(maker):
            continue
        if (joined := _joined(graph, found, maker, copy, again)) is not None:
            found = [joined if part is maker else part for part in found if part is not copy]
    return found


def _has_columns(part: Subgraph) -> bool:
    """Tell whether a chain is a loop over columns: in another order its rows would lie apart."""
    rows = row_axes(part.graph, part.graph.outputs)
    return rows is None and column_axes(part.graph, part.graph.outputs) is not None


def _only_moves(part: Subgraph) -> bool:
    nodes = [node for node in part.graph.nodes if node.operator != "input"]
    return all(is_inlined(part.graph, node) and node.operator != "map" for node in nodes)


def _joined(
    graph: Graph, parts: Sequence[Subgraph], maker: Subgraph, copy: Subgraph, again: bool
) -> Subgraph | None:
    """Return a chain with a copy of its result; None if the two are no loop over rows."""
    (value,) = copy.inputs
    others = [part for part in parts if part is not copy]
    kept = value in graph.outputs or any(value in part.inputs for part in others)
    outputs = tuple(v for v in maker.outputs if kept or v != value) + copy.outputs
    members = {node.name for part in (maker, copy) for node in part.graph.nodes if node.operator != "input"}
    region = extract(graph, members, outputs, "chain")
    if len(members) > MOST_CHAIN_NODES or row_axes(region, outputs, again) is None:
        return None
    return replace(maker, graph=region, inputs=outside_inputs(graph, members), outputs=outputs)
