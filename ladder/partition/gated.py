"""Gated products: ``gate(x · Gᵀ) * (x · Uᵀ)`` as one part, where both products are halves of one.

Horizontal fusion has laid the weights one after the other already, so nothing is packed anew: a kernel of few
activation rows gives each warp rows of both halves, and its epilogue is what the chain computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.gemm import PACKED_ROWS, Gemm
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import unary_operators
from ladder.partition.subgraphs import Subgraph, extract, outside_inputs

EXACT = ("relu",)
"""Operators whose result needs no rounding where their operand was rounded."""

Serves = Callable[[Gemm, int], bool]
"""(Gated product, activation rows) -> whether a kernel computes it, and the product without its gate too."""


def with_gates(graph: Graph, parts: Sequence[Subgraph], serves: Serves) -> list[Subgraph]:
    """Return parts with gates in the products that alone they read."""
    found, readers = list(parts), readers_of(parts)
    for part in parts:
        if part.kind != "gemm" or part.gemm is None or not _may_be_gated(part.gemm, part):
            continue
        after = only_readers(graph, readers, part)
        whole = None if after is None else _joined(graph, part, after, serves)
        if after is not None and whole is not None:
            found = [item for item in found if item is not part and item not in after[:-1]]
            found[found.index(after[-1])] = whole
    return found


def _may_be_gated(gemm: Gemm, part: Subgraph) -> bool:
    others = (gemm.epilogue, gemm.experts, gemm.windows, gemm.residual, gemm.factor, gemm.token_group)
    return not (any(others) or gemm.batch_invariant or gemm.n % (2 * PACKED_ROWS) or len(part.outputs) > 1)


def readers_of(parts: Sequence[Subgraph]) -> dict[str, list[Subgraph]]:
    """Return value -> the parts that read it."""
    readers: dict[str, list[Subgraph]] = {}
    for part in parts:
        for value in dict.fromkeys(part.inputs):
            readers.setdefault(value, []).append(part)
    return readers


def only_readers(
    graph: Graph, readers: Mapping[str, Sequence[Subgraph]], part: Subgraph
) -> list[Subgraph] | None:
    """Return the views, one of the other, and the chain that alone read what a product gives."""
    after: list[Subgraph] = []
    value = part.outputs[0]
    while True:
        ahead = readers.get(value, ())
        if len(ahead) != 1 or value in graph.outputs or ahead[0].inputs != (value,):
            return None
        after += ahead
        if len(ahead[0].outputs) != 1 or ahead[0].kind not in ("view", "chain"):
            return None
        if ahead[0].kind == "chain":
            return after
        value = ahead[0].outputs[0]


def _joined(graph: Graph, part: Subgraph, after: Sequence[Subgraph], serves: Serves) -> Subgraph | None:
    """Return a product with its gate; None if what reads it is none, or no kernel computes it."""
    value, result = part.outputs[0], after[-1].outputs[0]
    gate = gate_between(graph, value, result)
    rows = product(graph.tile(value).shape[:-1])
    if gate is None or part.gemm is None or not isinstance(rows, int):
        return None
    gemm = replace(part.gemm, gate=gate.operator, gate_last=gate.last)
    if not serves(gemm, rows):
        return None
    members = {n.name for item in (part, *after) for n in item.graph.nodes if n.operator != "input"}
    region = extract(graph, members, [result])
    inputs = outside_inputs(graph, members)
    if set(inputs) != set(part.inputs):
        return None
    return Subgraph("gemm", region, inputs, (result,), "", gemm, part.roles)


def gate_between(graph: Graph, product: str, result: str) -> Gate | None:
    """Return the gate that makes a result of a product's two halves; None if something else does."""
    return _Match(graph, product).gate(result)


@dataclass(frozen=True)
class Gate:
    """An operator of a gate, and whether the second half of the product is its operand."""

    operator: str
    last: bool


class _Match:
    """Finds a gate between a product and a result; every step must be rounded to the product's type."""

    def __init__(self, graph: Graph, product: str) -> None:
        self.graph, self.product = graph, product
        self.ttype = graph.tile(product).ttype.name
        self.width = graph.tile(product).shape[-1]

    def gate(self, result: str) -> Gate | None:
        node, rounded = self.behind(result)
        if node.operator != "mul" or len(node.inputs) != 2 or not self.is_whole(result):
            return None
        if not rounded or self.graph.tile(result).ttype.name != self.ttype:
            return None
        for one, other in (node.inputs, node.inputs[::-1]):
            applied, exact = self.behind(one)
            if applied.operator not in unary_operators() or not (exact or applied.operator in EXACT):
                continue
            halves = self.half(applied.inputs[0]), self.half(other)
            if set(halves) == {0, 1}:
                return Gate(applied.operator, halves[0] == 1)
        return None

    def is_whole(self, result: str) -> bool:
        """Tell whether a result has an element for each pair of the product's."""
        shape = self.graph.tile(self.product).shape
        elements = product(self.graph.tile(result).shape)
        return isinstance(elements, int) and 2 * elements == product(shape)

    def behind(self, value: str) -> tuple[Node, bool]:
        """Return what computes a value below conversions and changes of shape.

        Also whether it was rounded to the product's type, and nothing else, on the way.
        """
        types = [self.graph.tile(value).ttype.name]
        node = self.graph.producer(value)
        while node.operator in ("convert", "reshape"):
            value = node.inputs[0]
            types.append(self.graph.tile(value).ttype.name)
            node = self.graph.producer(value)
        return node, self.ttype in types and {*types} <= {self.ttype, "float32"}

    def half(self, value: str) -> int | None:
        """Return which half of the product's columns a value is; None if it is something else."""
        node, plain = self.behind(value)
        if node.operator != "slice" or not plain:
            return None
        source = node.inputs[0]
        begin = node_attributes(node)["begin"]
        behind, shape = self.graph.tile(source).shape, node.tile.shape
        if shape[:-1] != behind[:-1] or any(begin[:-1]) or behind[-1] != self.width:
            return None
        if not isinstance(self.width, int) or shape[-1] != self.width // 2 or not self.is_product(source):
            return None
        return {0: 0, self.width // 2: 1}.get(begin[-1])

    def is_product(self, value: str) -> bool:
        """Tell whether a value is the product, possibly in another shape."""
        while value != self.product:
            node = self.graph.producer(value)
            if node.operator != "reshape":
                return False
            value = node.inputs[0]
        return True
