"""Chains side by side: those that read one value and do not wait for each other become one launch."""

from __future__ import annotations

from collections.abc import Sequence

from ladder.ir.graph import Graph
from ladder.partition.parts import Part, extract, outside_inputs
from ladder.partition.rows import REDUCTIONS

MOST_INPUTS = 24
"""Tensors that one kernel reads at most."""


def join_siblings(graph: Graph, parts: Sequence[Part]) -> list[Part]:
    """Return parts, in an order in which they can run, with chains of neighbours joined.

    Only chains without reductions: their results are computed one after the other by the same threads, so
    that nothing is computed twice.
    """
    parts = list(parts)
    at = 0
    while at < len(parts):
        mate = _mate(parts, at)
        if mate is None:
            at += 1
        else:
            parts[at] = _joined(graph, parts[at], parts.pop(mate))
    return parts


def _mate(parts: Sequence[Part], at: int) -> int | None:
    """Return a later chain that reads what this one reads, and nothing that is made from it on."""
    first = parts[at]
    if not _is_plain(first):
        return None
    changing = _changing(parts)
    made = set(first.outputs)
    for later in range(at + 1, len(parts)):
        part = parts[later]
        shared = set(first.inputs) & set(part.inputs) & changing
        few = len({*first.inputs, *part.inputs}) <= MOST_INPUTS
        if _is_plain(part) and shared and few and not made & set(part.inputs):
            return later
        made |= set(part.outputs)
    return None


def _changing(parts: Sequence[Part]) -> set[str]:
    """Return the values that are computed from call to call."""
    made: set[str] = set()
    constant: set[str] = set()
    for part in parts:
        fixed = part.kind in ("chain", "view") and all(value in constant for value in part.inputs)
        (constant if fixed else made).update(part.outputs)
    return made


def _is_plain(part: Part) -> bool:
    """Tell whether a part is a chain of neither reductions nor windows."""
    return part.kind == "chain" and not {*REDUCTIONS, "map"} & {node.operator for node in part.graph.nodes}


def _joined(graph: Graph, a: Part, b: Part) -> Part:
    members = {n.name for part in (a, b) for n in part.graph.nodes if n.operator != "input"}
    outputs = (*a.outputs, *b.outputs)
    region = extract(graph, members, outputs, "chain")
    return Part("chain", region, outside_inputs(graph, members), outputs, a.reason or b.reason)
