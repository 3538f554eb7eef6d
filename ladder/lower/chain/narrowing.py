"""Whole numbers of 64 bits that 32 bits hold: positions, and what masks and biases compute of them.

GPUs add, compare and convert numbers of 64 bits several times slower than those of 32, and programs count
positions in 64. Ranges of positions, numbers and narrower types are known, so are those of sums of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower.chain.scatter import Chain
from tile_types.library import get_type

Bounds = tuple[int, int]
"""The least and the largest number that a value may have."""

WIDE, NARROW = "int64", "int32"

TYPES: dict[str, Bounds] = {
    "bool": (0, 1),
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16)},
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32)},
}

LEAST, MOST = TYPES[NARROW]

ENDS: dict[str, Callable[[int, int], int]] = {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "minimum": min,
    "maximum": max,
}
"""Operators whose least and largest results are those of some ends of their operands' ranges."""

CHOOSING = ("select", "concat", "reduce_max", "scan_max")
"""Operators whose results are numbers of their operands."""

READERS = ("less", "less_equal", "equal", "convert", "gather")
"""Operators that make the same of numbers of 32 bits as of 64."""


def narrowed(chain: Chain) -> Chain:
    """Return the chain with int32 where a range that is known lets it serve for int64."""
    if not any(node.tile.ttype.name == WIDE and node.operator != "input" for node in chain.graph.nodes):
        return chain
    return replace(chain, graph=_Narrowing(chain.graph).made())


class _Narrowing:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.builder = graph, GraphBuilder(graph.name, graph.level)
        self.bounds: dict[str, Bounds] = {}
        """Values that have a narrow form -> their ranges."""
        self.narrow: dict[str, str] = {}
        self.plain: dict[str, str] = {}
        """Value -> its name in the new graph, as 32 bits and in its own type, as far as it is made."""

    def made(self) -> Graph:
        for node in self.graph.nodes:
            bounds = self.range_of(node)
            if bounds is not None and LEAST <= bounds[0] <= bounds[1] <= MOST:
                self.bounds[node.name] = bounds
            elif node.tile.ttype.name != WIDE and self.reads_narrow(node):
                self.plain[node.name] = self.copied(node, node.name, [*map(self.short, node.inputs)])
            else:
                values = self.builder.copy(node, tuple(map(self.own, node.inputs)))
                self.plain.update(zip(node.values, values, strict=True))
        return self.builder.finish(*map(self.own, self.graph.outputs))

    def is_wide(self, value: str) -> bool:
        return self.graph.tile(value).ttype.name == WIDE

    def reads_narrow(self, node: Node) -> bool:
        """Tell whether a node only reads numbers, all of which have a narrow form."""
        wide = [value for value in node.inputs if self.is_wide(value)]
        known = all(value in self.bounds for value in wide)
        return bool(wide) and known and node.operator in READERS

    def range_of(self, node: Node) -> Bounds | None:
        """Return the range of what a node computes in 64 bits; None if it is not known."""
        given = node_attributes(node)
        if node.tile.ttype.name != WIDE or node.operator == "input":
            return None
        if node.operator == "constant":
            return int(given["value"]), int(given["value"])
        if node.operator == "iota":
            first, count = given["begin"], given["extent"]
            known = isinstance(first, int) and isinstance(count, int)
            last = first + (count - 1) * given["step"] if known else 0
            return (min(first, last), max(first, last)) if known else None
        if node.operator == "convert":
            read = self.graph.tile(node.inputs[0]).ttype.name
            return TYPES.get(read, self.bounds.get(node.inputs[0]))
        found = [self.bounds.get(value) for value in node.inputs if self.is_wide(value)]
        ranges = [each for each in found if each is not None]
        if len(ranges) < len(found) or not found:
            return None
        if node.operator in ENDS:
            ends = [ENDS[node.operator](*pair) for pair in product(*ranges)]
            return min(ends), max(ends)
        if node.operator in ("neg", "abs"):
            most = max(map(abs, ranges[0]))
            return -most, most
        if node.operator in ("reduce_sum", "scan_sum"):
            count = self.graph.tile(node.inputs[0]).shape[given["axis"]]
            low, high = ranges[0]
            return (min(0, low * count), max(0, high * count)) if isinstance(count, int) else None
        moved = get_operator(node.operator).engine == "view" or node.operator in CHOOSING
        return (min(low for low, _ in ranges), max(high for _, high in ranges)) if moved else None

    def short(self, value: str) -> str:
        """Return a value in 32 bits, in the new graph; of other types as it is."""
        if value not in self.bounds:
            return self.own(value)
        if value not in self.narrow:
            node = self.graph.producer(value)
            inputs = [self.short(each) for each in node.inputs]
            same = node.operator == "convert" and self.builder.tile(inputs[0]).ttype.name == NARROW
            self.narrow[value] = inputs[0] if same else self.copied(node, f"{value}_short", inputs, NARROW)
        return self.narrow[value]

    def own(self, value: str) -> str:
        """Return a value in its own type, in the new graph: computed in 32 bits, and extended."""
        if value not in self.plain:
            node = self.graph.producer(value)
            moved = node.operator in ("iota", "constant") or get_operator(node.operator).engine == "view"
            if moved or (node.operator == "convert" and node.inputs[0] not in self.bounds):
                self.plain[value] = self.copied(node, value, [*map(self.own, node.inputs)])
            else:
                self.plain[value] = self.builder.add("convert", self.short(value), name=value, type=WIDE)
        return self.plain[value]

    def copied(self, node: Node, name: str, inputs: list[str], kind: str = "") -> str:
        """Add a node with other operands, of another type if one is named."""
        if kind:
            given = tuple((key, kind if key == "type" else value) for key, value in node.attributes)
            node = replace(node, attributes=given, tiles=(replace(node.tile, ttype=get_type(kind)),))
        return self.builder.insert(replace(node, name=self.builder.fresh(name), inputs=tuple(inputs)))
