"""Programs with each function replaced by an input wherever its operands were proved equal at all extents.

A function of equal operands has equal values, whatever it is: so programs that are equal with inputs in place
of functions are equal. Each replacement rests on a proof of its own, of programs without functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from ladder.ir.build import GraphBuilder, prune, transformed
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.superopt.verifier.values import Conversions
from ladder.superopt.verifier.whole import whole
from tile_types.errors import VerificationError
from tile_types.library import get_type
from tile_types.tile import Tile

Prove = Callable[[Graph, Graph, Fraction, int], bool]
"""``(first, second, delta, number)``: whether programs without functions are equal; proofs are numbered."""

MOST_PROOFS = 64

FUNCTIONS = frozenset({"exp", "root", "maximum", "other"})
"""LAX classes of what is replaced."""


def _reciprocal_root(g: GraphBuilder, x: str) -> str:
    one = g.add("constant", value=1.0, type=g.tile(x).ttype.name)
    return g.add("div", one, g.add("sqrt", x))


def _silu(g: GraphBuilder, x: str) -> str:
    return g.add("mul", x, g.add("sigmoid", x))


def _tanh(g: GraphBuilder, x: str) -> str:
    one = g.add("constant", value=1.0, type=g.tile(x).ttype.name)
    half = g.add("sigmoid", g.add("add", x, x))
    return g.add("sub", g.add("add", half, half), one)


EXPANDED: dict[str, Callable[[GraphBuilder, str], str]] = {
    "rsqrt": _reciprocal_root, "silu": _silu, "tanh": _tanh,
}  # fmt: skip
"""Operators that are replaced by others and a function."""


def expanded(graph: Graph) -> Graph:
    """Return a kernel graph with operators made of functions taken apart, and inputs numbered."""
    return transformed(graph, _expanded)


def _expanded(g: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
    if node.operator == "input":
        return g.insert(replace(node, name=g.fresh("in")))
    rule = EXPANDED.get(node.operator)
    return rule(g, *inputs) if rule else None


@dataclass(frozen=True)
class _Value:
    """A function's value: which input it became, and what it is of."""

    name: str
    node: Node
    side: int


@dataclass
class _Abstraction:
    """The programs while their functions are being replaced."""

    prove: Prove
    delta: Fraction
    nodes: tuple[list[Node], list[Node]] = field(default_factory=lambda: ([], []))
    values: list[_Value] = field(default_factory=list)
    proofs: int = 0

    def add(self, side: int, graph: Graph) -> list[str]:
        """Take over the nodes of a program; returns what its outputs are called now."""
        conversions = Conversions.of(graph)
        unknown = {*conversions.unknown, *conversions.rounded}
        renamed: dict[str, str] = {}
        for number, node in enumerate(graph.nodes):
            inputs = tuple(renamed.get(value, value) for value in node.inputs)
            known = replace(node, inputs=inputs)
            if id(node) in unknown:
                renamed[node.name] = self._value(side, known, number)
            elif get_operator(node.operator).lax_class({}) in FUNCTIONS:
                real = self._as_real(side, known, [graph.tile(value) for value in node.inputs], conversions)
                renamed[node.name] = value = self._value(side, real, number)
                if real.tile != node.tile:
                    self.nodes[side].append(_conversion(node.name, value, node.tile))
                    del renamed[node.name]
            else:
                self.nodes[side].append(known)
        return [renamed.get(output, output) for output in graph.outputs]

    def _as_real(self, side: int, node: Node, tiles: Sequence[Tile], conversions: Conversions) -> Node:
        """Return a function with operands and result in one type wherever theirs stand for real numbers."""
        inputs = list(node.inputs)
        for number, (value, tile) in enumerate(zip(node.inputs, tiles, strict=True)):
            if _real(tile, conversions) != tile:
                inputs[number] = f"{node.name}_{number}"
                self.nodes[side].append(_conversion(inputs[number], value, _real(tile, conversions)))
        return replace(node, inputs=tuple(inputs), tiles=(_real(node.tile, conversions),))

    def _value(self, side: int, node: Node, number: int) -> str:
        """Return the input that stands for a function's value: that of equal operands, or a new one."""
        for value in self.values:
            if _alike(value.node, node) and self._equal(value, side, node):
                return value.name
        made = _Value(f"function_{side}_{number}", node, side)
        self.values.append(made)
        return made.name

    def _equal(self, value: _Value, side: int, node: Node) -> bool:
        self.proofs += 1
        if self.proofs > MOST_PROOFS:
            raise VerificationError(f"more than {MOST_PROOFS} pairs of functions to compare")
        first, second = self.graph(value.side, value.node.inputs), self.graph(side, node.inputs)
        tiles = [[graph.tile(output) for output in graph.outputs] for graph in (first, second)]
        same = [[(tile.ttype, tile.shape) for tile in each] for each in tiles]
        return same[0] == same[1] and self.prove(first, second, self.delta / MOST_PROOFS, self.proofs)

    def graph(self, side: int, outputs: Sequence[str]) -> Graph:
        """Return a program of the inputs and all values of functions so far."""
        inputs = [node for node in self.nodes[0] if node.operator == "input"]
        more = [Node(value.name, "input", (), (), (value.node.tile,)) for value in self.values]
        rest = [node for node in self.nodes[side] if node.operator != "input"]
        return prune(Graph("abstracted", "kernel", (*inputs, *more, *rest), tuple(outputs)))


def _conversion(name: str, value: str, tile: Tile) -> Node:
    return Node(name, "convert", (value,), get_operator("convert").stored({"type": tile.ttype.name}), (tile,))


def _real(tile: Tile, conversions: Conversions) -> Tile:
    """Return a tile in the program's first floating-point type, if its own is as fine."""
    real = conversions.is_real(tile.ttype.name) and conversions.precision
    return replace(tile, ttype=get_type(conversions.precision[0])) if real else tile


def _alike(a: Node, b: Node) -> bool:
    return (a.operator, a.attributes, len(a.inputs), a.tile.ttype) == (
        b.operator, b.attributes, len(b.inputs), b.tile.ttype,
    )  # fmt: skip


def abstracted(first: Graph, second: Graph, prove: Prove, delta: Fraction) -> tuple[Graph, Graph] | None:
    """Return two programs with inputs in place of functions.

    prove: Proves programs without functions equal.
    delta: Bound on the error of all these proofs together.
    Returns: The programs, with the same inputs; None if one has block graphs that no whole tensors stand for,
        no functions, or too many.
    """
    found = _Abstraction(prove, delta)
    try:
        outputs = [found.add(side, expanded(whole(graph))) for side, graph in enumerate((first, second))]
    except VerificationError:
        return None
    return (found.graph(0, outputs[0]), found.graph(1, outputs[1])) if found.values else None
