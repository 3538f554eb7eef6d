"""Values that are computed again by each chain that reads them, where that reads no more than storing them.

As of ``x - mean``, which reads x: what reads the difference may as well read x and the mean.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import ceil

from ladder.ir.build import draws
from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.partition.chains import MOST_ON_GPUS
from ladder.partition.elements import lacking
from ladder.partition.nested_sums import sums_of_sums
from ladder.partition.repeats import (
    LONG_ON_GPUS,
    LONG_WORK,
    MOST_NESTED,
    WORK,
    calls_again,
    joins_nested,
    works_again,
)
from ladder.partition.rows import REDUCTIONS, SCANS, column_axes, row_axes
from ladder.partition.strided_rows import strided_rows
from ladder.partition.subgraphs import Subgraph, extract, needed, outside_inputs

MOVING = ("map", "gather", "put", "pad", "concat", "repeat", "slice", "transpose", *SCANS)
"""Operators of chains that read an element several times, or not in the order of memory."""

NUMBERS = 16
"""Elements of the largest value over those of others that count nothing: numbers of rows."""


def with_recomputed(graph: Graph, parts: Sequence[Subgraph], kind: str) -> list[Subgraph]:
    """Return the parts without chains whose elements all their readers may compute, on a device of a kind."""
    found, at = list(parts), 0
    while at < len(found):
        part = found[at]
        users = [user for user in found if set(user.inputs) & set(part.outputs)]
        joined = [_computing(graph, part, user, kind) for user in users] if _is_light(graph, part) else []
        instead = {id(user): one for user, one in zip(users, joined, strict=False) if one is not None}
        if instead and len(instead) == len(users):
            found = [instead.get(id(one), one) for one in found if one is not part]
        else:
            at += 1
    return found


def without_stored(graph: Graph, parts: Sequence[Subgraph], kind: str) -> list[Subgraph]:
    """Return the parts with fewer results: those that their readers compute of others, or of what is read.

    As of a square that is summed, or shares of a sum: what reads them may as well read x and the sum.
    """
    found = list(parts)
    for at, part in enumerate(parts):
        for value in part.outputs if part.kind == "chain" else ():
            again = _computed_apart(graph, found[at], value)
            users = [user for user in found if value in user.inputs]
            if again is None or not users or not _is_light(graph, again, _moving_again(again)):
                continue
            joined = [_computing(graph, again, user, kind) for user in users]
            rest = _with_results(graph, found[at], value, again.inputs, kind)
            instead = {id(user): one for user, one in zip(users, joined, strict=True) if one is not None}
            if rest is not None and len(instead) == len(users):
                found = [instead.get(id(one), one) for one in found]
                found[at] = rest
    return found


def _computed_apart(graph: Graph, part: Subgraph, value: str) -> Subgraph | None:
    """Return what computes a result of others, numbers of rows and what a part reads; None if nothing."""
    own = {node.name: node for node in part.graph.nodes if node.operator != "input"}
    count, others = product(graph.tile(value).shape), {*part.outputs} - {value}
    ahead, members = [value], set[str]()
    while ahead:
        node = own.get(ahead.pop())
        if node is None or node.name in members or others.intersection(node.values):
            continue
        few = product(node.tile.shape)
        if node.operator in (*REDUCTIONS, *SCANS):
            if not (isinstance(few, int) and isinstance(count, int) and NUMBERS * few <= count):
                return None
            continue
        members.add(node.name)
        ahead += node.inputs
    if not members:
        return None
    region = extract(graph, members, (value,), "chain")
    return Subgraph("chain", region, outside_inputs(graph, members), (value,))


def _with_results(
    graph: Graph, part: Subgraph, value: str, read: Sequence[str], kind: str
) -> Subgraph | None:
    """Return a part that gives what is read of it instead of a value; None if that is no chain."""
    own = {node.name for node in part.graph.nodes if node.operator != "input"}
    outputs = tuple(
        other for other in dict.fromkeys((*part.outputs, *read)) if other in own and other != value
    )
    if not outputs:
        return None
    whole = needed(extract(graph, own, outputs), outputs)
    members = {node.name for node in whole.nodes if node.operator != "input"}
    region = extract(graph, members, outputs, "chain")
    loops = row_axes(region, outputs) is not None or column_axes(region, outputs) is not None
    if not loops or lacking(region, kind):
        return None
    return Subgraph("chain", region, outside_inputs(graph, members), outputs, part.reason)


def _moving_again(part: Subgraph) -> set[str]:
    """Return operators by which a part moves elements, but reads none several times, or few."""
    once, (value,) = {"pad", "slice"}, part.outputs
    few = [product(n.tile.shape) for n in part.graph.nodes if n.operator == "gather"]
    most = product(part.graph.tile(value).shape)
    numbers = all(isinstance(n, int) and isinstance(most, int) and NUMBERS * n <= most for n in few)
    return {*once, "gather"} if numbers else once


def _is_light(graph: Graph, part: Subgraph, passed: Collection[str] = ()) -> bool:
    """Tell whether a part is a chain of few operations by element, and no result."""
    nodes = part.graph.nodes
    if part.kind != "chain" or set(part.outputs) & set(graph.outputs) or any(map(draws, nodes)):
        return False
    operators = {node.operator for node in nodes}.difference(passed)
    work = sum(WORK.get(node.operator, 1) for node in nodes)
    return not operators & {*MOVING, *REDUCTIONS, *LONG_ON_GPUS} and work < LONG_WORK


def _computing(graph: Graph, part: Subgraph, user: Subgraph, kind: str) -> Subgraph | None:
    """Return a chain with what it reads of another one; None if it would read more, or be no such chain."""
    moving = {node.operator for node in user.graph.nodes} & {*MOVING}
    if user.kind != "chain" or moving - {"transpose"}:
        return None
    members = {node.name for one in (part, user) for node in one.graph.nodes if node.operator != "input"}
    whole = needed(extract(graph, members, user.outputs), user.outputs)
    members = {node.name for node in whole.nodes if node.operator != "input"}
    region, inputs = extract(graph, members, user.outputs, "chain"), outside_inputs(graph, members)
    before, after = (_bytes(graph, values) for values in (user.inputs, inputs))
    if before is None or after is None or after > before:
        return None
    loops = [_loops(chain) for chain in (user.graph, region)]
    again = calls_again(region, user.outputs, LONG_ON_GPUS) or works_again(region, user.outputs)
    long = len(members) > MOST_ON_GPUS or joins_nested(region) > MOST_NESTED
    summed = any(sums_of_sums(region, node) for node in region.nodes)
    if loops[0] != loops[1] or again or long or summed or lacking(region, kind):
        return None
    return Subgraph("chain", region, inputs, user.outputs, user.reason)


def _loops(graph: Graph) -> tuple[object, ...]:
    """Return what a chain is a loop over."""
    found = strided_rows(graph)
    rows = None if found is None else tuple(found.orders.values())
    return row_axes(graph, graph.outputs), column_axes(graph, graph.outputs), rows


def _bytes(graph: Graph, values: Sequence[str]) -> int | None:
    """Return the bytes of some values, but for those of much fewer elements than others; None if open."""
    counts = [product(graph.tile(value).shape) for value in values]
    known = [count for count in counts if isinstance(count, int)]
    if len(known) < len(counts):
        return None
    sizes = zip(known, (graph.tile(value).ttype.elem_bits for value in values), strict=True)
    return sum(ceil(n * bits / 8) for n, bits in sizes if NUMBERS * n >= max(known))
