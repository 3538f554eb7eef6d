"""Programs with each function replaced by an input wherever its operands were proved equal at all extents.

A function of equal operands has equal values, whatever it is: so programs that are equal with inputs in place
of functions are equal. Each replacement rests on a proof of its own, of programs without functions.

Block graphs become programs of `whole` tensors first. A value of a block is a tile of one tensor, in which
every grid and loop dimension splits one axis or none. Operators of tiles give tiles of what the same
operators give of whole tensors, if each dimension splits all operands alike. A sum over an axis that the loop
splits is a part of the sum over all of it: an accumulator adds the parts, and nothing else may take one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes, prune, transformed
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.superopt.verifier.values import Conversions
from tile_types.errors import VerificationError
from tile_types.library import get_type
from tile_types.tile import Tile


@dataclass(frozen=True)
class Part:
    """A tile of a whole tensor.

    name: Of the tensor.
    split: The axis that each grid and loop dimension splits, counted from the last (-1); 0 for none.
    pending: Whether it is a part of a sum, which an accumulator has to complete.
    """

    name: str
    split: tuple[int, ...]
    pending: bool = False


def whole(graph: Graph) -> Graph:
    """Return a kernel graph without block graphs that computes the same.

    Raises VerificationError: Names what has no counterpart of whole tensors.
    """
    g = GraphBuilder(graph.name)
    names: dict[str, str] = {}
    for node in graph.nodes:
        inputs = tuple(names[value] for value in node.inputs)
        if node.body is not None:
            names.update(zip(node.values, _Block(g, node.body).results(inputs), strict=True))
        else:
            names.update(zip(node.values, g.copy(node, inputs), strict=True))
    return g.finish(*(names[output] for output in graph.outputs))


class _Block:
    """One block graph, of which the operators are added to a graph of whole tensors."""

    def __init__(self, g: GraphBuilder, body: Graph) -> None:
        self.g, self.body = g, body
        self.axes = (*body.grid, *body.loops)
        self.loops = range(len(body.grid), len(self.axes))

    def results(self, inputs: Sequence[str]) -> Iterator[str]:
        """Return the names of the whole tensors that are stored."""
        given = [Part(name, (0,) * len(self.axes)) for name in inputs]
        values = dict(zip((node.name for node in self.body.inputs), given, strict=True))
        for node in self.body.nodes:
            if node.operator != "input":
                values[node.name] = self._value(node, [values[value] for value in node.inputs])
        return (values[output].name for output in self.body.outputs)

    def _value(self, node: Node, operands: Sequence[Part]) -> Part:
        row = get_operator(node.operator)
        rule = _RULES.get(row.name, _Block._elementwise)
        if row.name not in _RULES and not (row.elementwise or row.name in ("constant", "convert")):
            raise self._refused(node, "it has no counterpart of whole tensors")
        if any(part.pending for part in operands) and row.name != "accumulate":
            raise self._refused(node, "it takes a part of a sum")
        found = rule(self, node, operands)
        self._require_tile(node, found)
        return found

    def _require_tile(self, node: Node, part: Part) -> None:
        """Check that tiles make up the axes of their tensor."""
        shape = self.g.tile(part.name).shape
        for axis in range(-len(shape), 0) if node.operator != "store" else ():
            cuts = [cut.extent for cut, at in zip(self.axes, part.split, strict=True) if at == axis]
            if product([*cuts, node.tile.shape[axis]]) != shape[axis]:
                raise self._refused(node, f"its tiles do not make up axis {axis}")

    def _elementwise(self, node: Node, operands: Sequence[Part]) -> Part:
        return Part(self._added(node, operands), self._joint(node, operands))

    def _joint(self, node: Node, operands: Sequence[Part]) -> tuple[int, ...]:
        """Return how dimensions split what operands broadcast to; an axis of one element is not split."""
        split = tuple(min((part.split[d] for part in operands), default=0) for d in range(len(self.axes)))
        for part in operands:
            shape = self.g.tile(part.name).shape
            for own, joint in zip(part.split, split, strict=True):
                if own != joint and len(shape) >= -joint and shape[joint] != 1:
                    raise self._refused(node, "a dimension splits its operands differently")
        return split

    def _added(self, node: Node, operands: Sequence[Part]) -> str:
        given: dict[str, Any] = dict(node.attributes)
        return self.g.add(node.operator, *(part.name for part in operands), **given)

    def _mapped(self, maps: Sequence[int], rank: int) -> tuple[int, ...]:
        """Return the split of maps that count axes from the first."""
        split = tuple(axis - rank if axis >= 0 else 0 for axis in maps)
        return (*split, *(0,) * (len(self.axes) - len(split)))

    def load(self, node: Node, operands: Sequence[Part]) -> Part:
        given = node_attributes(node)
        return Part(operands[0].name, self._mapped((*given["grid"], *given["loop"]), len(node.tile.shape)))

    def store(self, node: Node, operands: Sequence[Part]) -> Part:
        split = self._mapped(node_attributes(node)["grid"], len(node.tile.shape))
        if operands[0].split != split or self.g.tile(operands[0].name).shape != node.tile.shape:
            raise self._refused(node, "it stores other than the tiles of a tensor")
        return operands[0]

    def accumulate(self, node: Node, operands: Sequence[Part]) -> Part:
        """Complete a sum, or keep what is the same in all steps."""
        part, kind = operands[0], node_attributes(node)["kind"]
        if kind != ("sum" if part.pending else "last") or any(part.split[d] for d in self.loops):
            raise self._refused(
                node, "it accumulates neither parts of a sum nor what is the same in all steps"
            )
        return replace(part, pending=False)

    def sum(self, node: Node, operands: Sequence[Part]) -> Part:
        (part,), given = operands, node_attributes(node)
        rank = len(self.g.tile(part.name).shape)
        axis = given["axis"] % rank - rank
        if not given["keep"]:
            raise self._refused(node, "it drops an axis")
        split = tuple(0 if at == axis else at for at in part.split)
        return Part(self._added(node, operands), split, self._parted(node, part.split, axis))

    def matmul(self, node: Node, operands: Sequence[Part]) -> Part:
        """Rows are split as those of the first operand, columns as those of the second."""
        a, b = operands
        inner, outer = (-1, -2) if node_attributes(node)["transpose_b"] else (-2, -1)
        rows = tuple(0 if at == -1 else at for at in a.split)
        columns = tuple({inner: 0, outer: -1}.get(at, at) for at in b.split)
        pending = self._parted(node, a.split, -1)
        if pending != self._parted(node, b.split, inner) or any(
            x and y and x != y for x, y in zip(rows, columns, strict=True)
        ):
            raise self._refused(node, "a dimension splits its operands differently")
        split = tuple(map(min, rows, columns))
        return Part(self._added(node, operands), split, pending)

    def _parted(self, node: Node, split: Sequence[int], axis: int) -> bool:
        """Whether the whole loop splits an axis that is summed over; nothing else may."""
        cuts = [d for d, at in enumerate(split) if at == axis]
        if cuts not in ([], list(self.loops)):
            raise self._refused(node, "blocks, or some dimensions of the loop, share its sum")
        return bool(cuts)

    def _refused(self, node: Node, reason: str) -> VerificationError:
        return VerificationError(f"%{node.name} = {node.operator}(...) of {self.body.name!r}: {reason}")


_RULES: Mapping[str, Callable[[_Block, Node, Sequence[Part]], Part]] = {
    "load": _Block.load, "store": _Block.store, "accumulate": _Block.accumulate,
    "reduce_sum": _Block.sum, "matmul": _Block.matmul,
}  # fmt: skip
"""Operators that are not element-wise -> their rules; all others are refused."""


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
