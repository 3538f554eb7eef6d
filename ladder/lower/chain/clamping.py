"""What conditions on a read leave as it is: positions that are brought inside before, and numbers of rows.

A branch of a join, or the inside of a border, is computed at positions that it may not have. What a condition
can guard is not read there; reductions are computed before the conditions, as are rows that data names, and
some types have no loads under conditions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower import Expr
from ladder.lower.chain.indices import Index, variables_of
from ladder.partition.rows import REDUCTIONS, operand_index

LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
"""Float of 8 bits -> its largest number."""


def clamped_axes(graph: Graph, unguarded: Collection[str]) -> Mapping[str, frozenset[int]]:
    """Return value -> the axes along which a position must lie inside, whatever the conditions on it.

    unguarded: Inputs that are read whatever the conditions.
    """
    found: dict[str, frozenset[int]] = {}
    for node in graph.nodes:
        axes = range(len(node.tile.shape))
        at_once = node.operator in (*REDUCTIONS, "gather") or node.name in unguarded
        own = frozenset(axes) if at_once else _passed_on(graph, node, found)
        found.update(dict.fromkeys(node.values, own))
    return found


def _passed_on(graph: Graph, node: Node, found: Mapping[str, frozenset[int]]) -> frozenset[int]:
    """Return the axes of a node's result on which such axes of its operands depend."""
    index = tuple(frozenset({str(axis)}) for axis in range(len(node.tile.shape)))
    depends: set[str] = set()
    for at, operand in enumerate(node.inputs):
        places = operand_index(graph, node, at, index) if found[operand] else ()
        depends.update(*(places[axis] for axis in found[operand]))
    return frozenset(map(int, depends))


def spread_values(graph: Graph) -> frozenset[str]:
    """Return what is computed once for several elements of what reads it, as a row's factor."""
    computed = {n.name: n.name for n in graph.nodes if get_operator(n.operator).elementwise}
    for node in graph.nodes:  # what is computed, in another shape
        if node.operator == "reshape" and node.inputs[0] in computed:
            computed[node.name] = computed[node.inputs[0]]
    return frozenset(
        computed[value]
        for node in graph.nodes
        for value in node.inputs
        if value in computed
        and graph.tile(value).shape != node.tile.shape
        and get_operator(node.operator).elementwise
    )


def is_read_under(index: Index, conditions: Sequence[Expr]) -> bool:
    """Tell whether where something is read depends on what conditions look at."""
    looked_at = {var for condition in conditions for var in variables_of(condition)}
    return any(not looked_at.isdisjoint(variables_of(part)) for part in index)


def every_axis(graph: Graph) -> Mapping[str, frozenset[int]]:
    """Return all axes of all values: for kernels without loads under conditions."""
    return {value: frozenset(range(len(graph.tile(value).shape))) for n in graph.nodes for value in n.values}


def is_within(graph: Graph, node: Node) -> bool:
    """Tell whether what a node converts is brought between numbers that its type has, on both sides."""
    most, bounds = LARGEST.get(node.tile.ttype.name, 0.0), set[str]()
    below = graph.producer(node.inputs[0])
    while below.operator in ("minimum", "maximum") and below.operator not in bounds:
        numbers = [value for value in below.inputs if graph.producer(value).operator == "constant"]
        if not any(abs(node_attributes(graph.producer(value))["value"]) <= most for value in numbers):
            return False
        bounds.add(below.operator)
        below = graph.producer(next((value for value in below.inputs if value not in numbers), numbers[0]))
    return len(bounds) == 2
