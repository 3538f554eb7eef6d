"""Reductions of what other reductions give, by the lanes of a row together.

Lanes that took the positions of the outer one would each reduce an inner one alone. Where nothing is computed
between two of one operator, they are one over the positions of both; where the outer one has few positions,
the lanes reduce what each needs together, position by position.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower import Expr
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import Nest, Reduction, uses

MOST_INNER, LEAST_INNER = 16, 256
"""Reductions that the lanes of a row make one after the other for an outer one; elements of each at least."""


class MergedReduction(Reduction):
    """A reduction and one that it reads as it is, by the same operator, over the positions of both.

    outer: Whose positions change last.
    node: What it reads, a reduction.
    """

    def __init__(self, nest: Nest, outer: Reduction, node: Node) -> None:
        super().__init__(nest, node, ())
        self.nest, self.outer = nest, outer
        self.extent = nest.values.simplified(outer.extent * self.extent)

    def at(self, position: Expr) -> Index:
        place = self.outer.at(tirx.floordiv(position, self.neighbours))
        ((_, index),) = self.nest.values.needed(self.outer.operand, place)
        return self.read_for(index, tirx.floormod(position, self.neighbours))


def merged(nest: Nest, it: Reduction, inner: Index = ()) -> Reduction:
    """Return a reduction together with those that it reads as they are and that have its operator.

    inner: Variables of loops around it that are not emitted yet: what depends on them is not emitted either.
    """
    while True:
        probe = nest.probe("k", it.extent)
        nest.prepare(it.operand, it.at(probe), (*inner, probe))
        inside = nest.values.needed(it.operand, it.at(probe))
        if len(inside) != 1:
            return it
        ((node, place),) = inside
        same = node.operator == it.operator and is_moved(nest.graph, it.operand, node)
        if not same or not any(uses(part, (probe,)) for part in place):
            return it
        it = MergedReduction(nest, it, node)


def is_of_few(nest: Nest, it: Reduction, inside: Sequence[tuple[Node, Index]], position: Expr) -> bool:
    """Tell whether a reduction has few positions, for each of which long reductions are made first.

    position: The variable that stands for one, of which ``inside`` depends.
    """
    if not isinstance(it.extent, int) or not 0 < it.extent * len(inside) <= MOST_INNER:
        return False
    extents = [merged(nest, Reduction(nest, node, place), (position,)).extent for node, place in inside]
    return all(isinstance(extent, int) and extent >= LEAST_INNER for extent in extents)


def is_moved(graph: Graph, value: str, node: Node) -> bool:
    """Tell whether a value has elements of a node's result as they are: nothing is computed of them."""
    while value != node.name:
        producer = graph.producer(value)
        if get_operator(producer.operator).engine != "view":
            return False
        (value,) = producer.inputs
    return True
