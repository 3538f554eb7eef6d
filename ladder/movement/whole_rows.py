"""Rows joined of a few parts that have much in common, as of matrices that are written out: a thread has one.

Threads of single elements would compute what all parts need for each of them, or every part for one.
"""

from __future__ import annotations

from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.ir.ops import get_operator

MOST_WHOLE, LEAST_PARTS, WORK_OF_PART = 16, 3, 2
"""Elements of such a row, parts that it is joined of, and element-wise operators of a chain for each."""


def whole_axes(graph: Graph) -> int:
    """Return the trailing axes of a chain's result of which a thread has all elements; 0: none."""
    joins = [len(node.inputs) for node in graph.nodes if node.operator == "concat"]
    parts = max(joins, default=0)
    computed = sum(get_operator(node.operator).elementwise for node in graph.nodes)
    if len(graph.outputs) > 1 or parts < LEAST_PARTS or computed < parts * WORK_OF_PART:
        return 0
    shape = graph.tile(graph.outputs[0]).shape
    counts = {axes: product(shape[-axes:]) for axes in range(1, len(shape))}
    fitting = (a for a, count in counts.items() if isinstance(count, int) and parts <= count <= MOST_WHOLE)
    return max(fitting, default=0)
