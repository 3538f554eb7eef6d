"""Composite operators as element-wise operators that machines have: formulas, applied to a tile graph.

What is left is element-wise (sums, products, quotients, exponentials, roots, comparisons), reductions,
broadcasts and moves; all of a chain then meets the same rules, and shares what its parts have in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod

from ladder.ir.build import GraphBuilder, node_attributes, prune, transformed
from ladder.ir.extents import Shape
from ladder.ir.formulas import FORMULAS
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.rewrite.merge import merge_equal, softmax_maximum


@dataclass
class _OfNodes:
    """Writes nodes (`ladder.ir.formulas.Writer`): operands and results are values of the graph."""

    graph: GraphBuilder
    like: str
    """A value whose type the numbers have."""

    def __call__(self, operator: str, *operands: str | float) -> str:
        kind = self.graph.tile(self.like).ttype.name
        numbers = (
            x if isinstance(x, str) else self.graph.add("constant", value=x, type=kind) for x in operands
        )
        return self.graph.add(operator, *numbers)

    def kept(self, value: str) -> str:
        return value


def canonical(graph: Graph) -> Graph:
    """Return the graph of element-wise operators, reductions and views of one operand.

    Joins become choices between padded operands, operands are broadcast to their result's shape.
    """
    return merge_equal(transformed(decompose(graph), _of_whole_operands))


def _of_whole_operands(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
    """Add a join as choices, an element-wise operator of operands of its result's shape."""
    if node.operator == "concat":
        return _joined(builder, node, inputs)
    if node.operator == "gather":
        return _gathered(builder, node, *inputs)
    if not get_operator(node.operator).elementwise:
        return None
    stretched = tuple(_stretched(builder, value, node.tile.shape) for value in inputs)
    return builder.copy(node, stretched)[0]


def _gathered(builder: GraphBuilder, node: Node, x: str, ids: str) -> str:
    """Read as many elements as a gather does, and its numbers: the first ones, for all that is known."""
    shape, axis, along = node.tile.shape, *(node_attributes(node)[name] for name in ("axis", "along"))
    read = [*map(int, builder.tile(x).shape)]
    taken = prod(map(int, builder.tile(ids).shape if not along else shape[axis : axis + 1]))
    begin, first = (0,) * len(read), [*read[:axis], min(taken, read[axis]), *read[axis + 1 :]]
    found = builder.add("slice", x, begin=begin, shape=tuple(first), step=())
    high = tuple(taken - first[axis] if at == axis else 0 for at in range(len(read)))
    found = builder.add("pad", found, low=begin, high=high, value=0.0)
    found = found if along else builder.add("reshape", found, shape=shape)
    behind = 0 if along else len(read) - axis - 1
    numbers = builder.add("reshape", ids, shape=(*map(int, builder.tile(ids).shape), *(1,) * behind))
    return builder.add("select", _stretched(builder, numbers, shape), found, found)


def _stretched(builder: GraphBuilder, value: str, shape: Shape) -> str:
    return value if builder.tile(value).shape == shape else builder.add("broadcast", value, shape=shape)


def _joined(builder: GraphBuilder, node: Node, inputs: Sequence[str]) -> str:
    """Choose between operands by the position along the axis."""
    shape, axis = node.tile.shape, node_attributes(node)["axis"] % len(node.tile.shape)
    position = builder.add("iota", extent=shape[axis], axis=axis, rank=len(shape), type="int32")
    position = _stretched(builder, position, shape)
    begin, result = 0, ""
    for value in inputs:
        length = int(builder.tile(value).shape[axis])
        low = tuple(begin if at == axis else 0 for at in range(len(shape)))
        high = tuple(int(shape[axis]) - begin - length if at == axis else 0 for at in range(len(shape)))
        padded = builder.add("pad", value, low=low, high=high, value=0.0)
        if result:
            number = _stretched(builder, builder.add("constant", value=float(begin), type="int32"), shape)
            padded = builder.add("select", builder.add("less", position, number), result, padded)
        result, begin = padded, begin + length
    return result


def decompose(graph: Graph, whole: Collection[str] = ()) -> Graph:
    """Return the graph with composite operators split, equal nodes merged.

    whole: Operators that stay as they are: a device has functions of its own for them.
    """
    return _distinct(merge_equal(transformed(graph, partial(_formula, whole))))


def _distinct(graph: Graph) -> Graph:
    """Return the graph with a node of its own for every result: equal ones have become one."""
    outputs = list(graph.outputs)
    nodes = list(graph.nodes)
    for at, value in enumerate(outputs):
        if value in outputs[:at]:
            tile = replace(graph.tile(value), layout=None)
            again = Node(f"{value}_again{at}", "reshape", (value,), (("shape", tile.shape),), (tile,))
            nodes.append(again)
            outputs[at] = again.name
    return replace(graph, nodes=tuple(nodes), outputs=tuple(outputs))


def _formula(
    whole: Collection[str], builder: GraphBuilder, node: Node, inputs: tuple[str, ...]
) -> str | None:
    """Add what a composite operator is made of."""
    if node.operator in FORMULAS and node.operator not in whole:
        split: str = FORMULAS[node.operator](_OfNodes(builder, inputs[0]), inputs[0])
        return split
    if node.operator == "div" and softmax_maximum(builder, *inputs) is not None:
        return builder.add("div_ftz", *inputs)
    return None


def contracted(graph: Graph) -> Graph:
    """Return the graph with ``a * b + c`` as one operator, rounded once, where c is read or a number.

    For chains whose results are rounded to 16 bits. Two products stay apart: their difference may cancel.
    """
    readers = Counter(value for node in graph.nodes for value in node.inputs) + Counter(graph.outputs)
    builder = GraphBuilder(graph.name, graph.level)
    names: dict[str, str] = {}
    for node in graph.nodes:
        found = _contraction(graph, node, readers)
        if found is None:
            inputs = tuple(names[value] for value in node.inputs)
            names.update(zip(node.values, builder.copy(node, inputs), strict=True))
        else:
            names[node.name] = builder.add("fused", *(names[value] for value in found))
    return prune(builder.finish(*(names[value] for value in graph.outputs)))


def _contraction(graph: Graph, node: Node, readers: Mapping[str, int]) -> tuple[str, ...] | None:
    """Return a, b and c of ``a * b + c``; None if a node is no such sum."""
    if node.operator != "add":
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        product = graph.producer(value)
        if product.operator == "mul" and readers[value] == 1 and _is_read(graph, other):
            return (*product.inputs, other)
    return None


def _is_read(graph: Graph, value: str) -> bool:
    """Tell whether a value is an input or a number, as it is or converted."""
    node = graph.producer(value)
    while node.operator in ("convert", "reshape", "broadcast"):
        node = graph.producer(node.inputs[0])
    return node.operator in ("input", "constant")
