"""Sums of sums that kernels do not have in one: what the inner ones give is stored."""

from __future__ import annotations

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.partition.repeats import known
from ladder.partition.rows import REDUCTIONS
from ladder.partition.subgraphs import engine

MANY_SUMMED = 1 << 12
"""Elements from which on reductions are stored before what is computed of them is reduced on GPUs."""

FEW_NEIGHBOURS = 32
"""Elements side by side that fill no lines, of rows whose next ones lie far apart."""

MUCH_SUMMED = 1 << 20
"""Elements of what such sums read for which another launch costs less."""


def _summed_below(graph: Graph, node: Node) -> Node | None:
    """Return the reduction that a reduction reads, through views; None if there is none."""
    if node.operator not in REDUCTIONS:
        return None
    below = graph.producer(node.inputs[0])
    while engine(below) == "view":
        below = graph.producer(below.inputs[0])
    return below if below.operator in REDUCTIONS else None


def sums_across(graph: Graph, node: Node) -> bool:
    """Tell whether a reduction reads, through views, one along an axis that is not the last in memory."""
    below = _summed_below(graph, node)
    if below is None:
        return False
    read = graph.producer(below.inputs[0])
    axis = node_attributes(below)["axis"] % len(read.tile.shape)
    return below is not graph.producer(node.inputs[0]) and product(read.tile.shape[axis + 1 :]) != 1


def sums_between(graph: Graph, node: Node) -> bool:
    """Tell whether a reduction reads one of few neighbours, of much, that others lie between, as of groups.

    A block would read a few elements here and there, and other blocks those between them.
    """
    below = _summed_below(graph, node)
    if below is None:
        return False
    read, made = (graph.tile(reducing.inputs[0]).shape for reducing in (below, node))
    inner, outer = (node_attributes(n)["axis"] % len(s) for n, s in ((below, read), (node, made)))
    few = isinstance(read[inner], int) and read[inner] <= FEW_NEIGHBOURS and inner == len(read) - 1
    between = product(made[outer + 1 :])
    return few and between != 1 and known(product(read)) >= MUCH_SUMMED


def sums_of_sums(graph: Graph, node: Node) -> bool:
    """Tell whether a reduction reads what is computed of one, element by element, that reads many."""
    if node.operator not in REDUCTIONS:
        return False
    ahead, count = [(node.inputs[0], False)], product(graph.tile(node.inputs[0]).shape)
    seen: set[tuple[str, bool]] = set()
    while ahead:
        value, computed = place = ahead.pop()
        below = graph.producer(value)
        if place in seen or product(below.tile.shape) != count:
            continue
        seen.add(place)
        if below.operator in REDUCTIONS:
            if computed and known(product(graph.tile(below.inputs[0]).shape)) >= MANY_SUMMED:
                return True
            continue
        if engine(below) not in ("view", "chain"):
            continue
        computed = computed or engine(below) != "view"
        ahead += [(operand, computed) for operand in below.inputs]
    return False
