"""Horizontal fusion of chains that read one value, and fusion of a chain into its only reader."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ladder.ir.build import draws
from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.partition.chains import LONGEST
from ladder.partition.rows import REDUCTIONS
from ladder.partition.subgraphs import Subgraph, extract, outside_inputs

MOST_INPUTS = 24
"""Tensors that one kernel reads at most."""

FEW = 64
"""Elements of results so small that a launch costs more than all of their work."""


def fuse_horizontally(graph: Graph, parts: Sequence[Subgraph]) -> list[Subgraph]:
    """Return parts, in an order in which they can run, with chains fused horizontally.

    Only chains without reductions: their results are computed one after the other by the same threads, so
    that nothing is computed twice. Chains of a few elements need not read one value.
    """
    parts = list(parts)
    at = 0
    while at < len(parts):
        mate = _mate(graph, parts, at)
        if mate is None:
            at += 1
        else:
            other = parts.pop(mate)
            parts[at] = _joined(graph, parts[at], other, (*parts[at].outputs, *other.outputs))
    return with_readers(graph, parts)


def with_readers(graph: Graph, parts: Sequence[Subgraph]) -> list[Subgraph]:
    """Return parts with each chain in the one that alone reads it, where that computes no element twice."""
    found = list(parts)
    readers: dict[str, list[Subgraph | None]] = {value: [None] for value in graph.outputs}
    for part in parts:
        for value in part.inputs:
            readers.setdefault(value, []).append(part)
    merged: dict[int, Subgraph] = {}
    for part in parts:
        now = merged.get(id(part), part)
        users = {id(user): user for value in now.outputs for user in readers.get(value, [])}
        (reader,) = users.values() if len(users) == 1 else (None,)
        if reader is None or not (_is_plain(now) and _is_plain(reader)):
            continue
        target = merged.get(id(reader), reader)
        if (
            _elements(graph, target) > _elements(graph, now)
            or len(now.inputs) + len(target.inputs) > MOST_INPUTS
            or not _is_short(now, target)
        ):
            continue
        merged[id(reader)] = joined = _joined(graph, now, target, target.outputs)
        found[found.index(target)] = joined
        found.remove(now)
    return found


def _elements(graph: Graph, part: Subgraph) -> float:
    """Return how many elements a chain writes; infinity if that depends on sizes."""
    counts = [product(graph.tile(value).shape) for value in part.outputs]
    return sum(count if isinstance(count, int) else math.inf for count in counts)


def _mate(graph: Graph, parts: Sequence[Subgraph], at: int) -> int | None:
    """Return a later chain that goes with this one and reads nothing that is made from it on.

    That is one that reads what this one reads, or of as few elements.
    """
    first = parts[at]
    if not _is_plain(first):
        return None
    changing = _changing(parts)
    made = set(first.outputs)
    for later in range(at + 1, len(parts)):
        part = parts[later]
        shared = set(first.inputs) & set(part.inputs) & changing
        few = len({*first.inputs, *part.inputs}) <= MOST_INPUTS
        possible = _is_plain(part) and few and not made & set(part.inputs) and _is_short(first, part)
        if possible and (shared or _are_tiny(graph, first, part)):
            return later
        made |= set(part.outputs)
    return None


def _changing(parts: Sequence[Subgraph]) -> set[str]:
    """Return the values that are computed from call to call."""
    made: set[str] = set()
    constant: set[str] = set()
    for part in parts:
        fixed = part.kind in ("chain", "view") and all(value in constant for value in part.inputs)
        (constant if fixed else made).update(part.outputs)
    return made


def _is_short(a: Subgraph, b: Subgraph) -> bool:
    """Tell whether a chain of two is not too long for one kernel."""
    return len({node.name for part in (a, b) for node in part.graph.nodes}) <= LONGEST


def _are_tiny(graph: Graph, a: Subgraph, b: Subgraph) -> bool:
    """Tell whether all results of two chains have the same few elements, and none is written in place."""
    shapes = {graph.tile(value).shape for value in (*a.outputs, *b.outputs)}
    count = product(next(iter(shapes)))
    in_place = "put" in (*a.operators, *b.operators)
    return len(shapes) == 1 and isinstance(count, int) and count <= FEW and not in_place


def _is_plain(part: Subgraph) -> bool:
    """Tell whether a part is a chain of neither reductions nor windows, nor of random numbers."""
    nodes = part.graph.nodes
    return (
        part.kind == "chain"
        and not {*REDUCTIONS, "map"} & {node.operator for node in nodes}
        and not any(map(draws, nodes))
    )


def _joined(graph: Graph, a: Subgraph, b: Subgraph, outputs: tuple[str, ...]) -> Subgraph:
    members = {n.name for part in (a, b) for n in part.graph.nodes if n.operator != "input"}
    region = extract(graph, members, outputs, "chain")
    return Subgraph("chain", region, outside_inputs(graph, members), outputs, a.reason or b.reason)
