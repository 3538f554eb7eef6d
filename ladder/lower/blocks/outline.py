"""Outlining: operators of a kernel graph that are in no block graph become block graphs of their own.

Values of 16-bit types go to memory; a product, or a chain of operators that compute rows, up to such a value
is one kernel. Products share columns among blocks and step along K; chains take a row per block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.lower.blocks.analysis import HALVES
from tile_types.errors import ScheduleError

COLUMNS, DEPTHS = (64, 32, 16, 8), (64, 32, 16)
"""Columns of a block's tile of a product, and elements along K of a step: the first that divide."""


def outlined(graph: Graph) -> Graph:
    """Return a kernel graph whose every operator is a block graph.

    Raises ScheduleError: Names an operator that no block graph computes.
    """
    if all(node.operator in ("input", "block") for node in graph.nodes):
        return graph
    return _Rewriter(graph).graph()


class _Rewriter:
    """Rewrites one graph."""

    def __init__(self, graph: Graph) -> None:
        self.old, self.new = graph, GraphBuilder(graph.name)
        self.names: dict[str, str] = {}

    def graph(self) -> Graph:
        for node in self.old.nodes:
            if node.operator == "input":
                self.names[node.name] = self.new.input(node.name, node.tile.ttype, node.tile.shape)
            elif node.body is not None:
                values = self.new.nest(node.body, *map(self._value, node.inputs), name=node.name)
                self.names.update(zip(node.values, values, strict=True))
        return self.new.finish(*map(self._value, self.old.outputs))

    def _value(self, name: str) -> str:
        """Return a value in memory, by a kernel if there is none yet."""
        if name not in self.names:
            region = self._region(name)
            own = {node.name for node in region}
            operands = dict.fromkeys(value for node in region for value in node.inputs if value not in own)
            sources = [self._value(value) for value in operands]
            body = _block(region, dict(zip(operands, sources, strict=True)), self.new)
            self.names[name] = self.new.nest(body, *sources)[0]
        return self.names[name]

    def _region(self, name: str) -> list[Node]:
        """Return the nodes that compute a value from what is in memory, in order."""
        wanted = {name}
        for node in reversed(self.old.nodes):
            if node.name in wanted:
                wanted |= {value for value in node.inputs if not self._is_stored(value)}
        return [node for node in self.old.nodes if node.name in wanted]

    def _is_stored(self, name: str) -> bool:
        producer = self.old.producer(name)
        return producer.operator in ("input", "block") or self.old.tile(name).ttype.name in HALVES


def _block(region: Sequence[Node], operands: Mapping[str, str], kernel: GraphBuilder) -> Graph:
    """Return the block graph of a region; ``operands``: its names for values of the kernel graph."""
    products = [node for node in region if node.operator == "matmul"]
    make = _Product if products else _Rows
    return make(region, operands, kernel).graph()


class _Rows:
    """A chain of element-wise operators and of reductions along rows: a row per block."""

    def __init__(self, region: Sequence[Node], operands: Mapping[str, str], kernel: GraphBuilder) -> None:
        self.region, self.operands, self.kernel = region, operands, kernel
        self.result = region[-1].tile.known_shape
        self.rank = len(self.result)

    def graph(self) -> Graph:
        for node in self.region:
            self._require(node)
        grid = {f"A{axis}g": extent for axis, extent in enumerate(self.result[:-1])}
        b = GraphBuilder(f"{self.region[-1].name}_block", "block", grid=grid, loops={})
        names = {name: self._load(b, source) for name, source in self.operands.items()}
        for node in self.region:
            inputs = [names[value] for value in node.inputs]
            names[node.name] = b.add(node.operator, *inputs, **_attributes(node))
        last = names[self.region[-1].name]
        return b.finish(b.add("store", last, grid=tuple(range(self.rank - 1)), shape=self.result))

    def _require(self, node: Node) -> None:
        shape = node.tile.known_shape
        simple = get_operator(node.operator).elementwise or node.operator in ("convert", "constant")
        if node.operator in ("reduce_sum", "reduce_max"):
            simple = node_attributes(node)["axis"] % len(shape) == len(shape) - 1
        if not simple or len(shape) not in (0, self.rank):
            raise ScheduleError(f"%{node.name}: {node.operator} is not lowered as a kernel of its own")

    def _load(self, b: GraphBuilder, source: str) -> str:
        tile = self.kernel.tile(source)
        shape = tile.known_shape
        if len(shape) != self.rank:
            raise ScheduleError(f"%{source} of rank {len(shape)} beside results of rank {self.rank}")
        grid = tuple(axis if shape[axis] > 1 else -1 for axis in range(self.rank - 1))
        whole, row = b.input(f"{source.lower()}_in", tile.ttype, shape), (*(1,) * (self.rank - 1), shape[-1])
        return b.add("load", whole, name=source.lower(), grid=grid, loop=(), shape=row)


class _Product:
    """A product, rounded."""

    def __init__(self, region: Sequence[Node], operands: Mapping[str, str], kernel: GraphBuilder) -> None:
        self.region, self.operands, self.kernel = region, operands, kernel
        if [node.operator for node in region] not in (["matmul"], ["matmul", "convert"]):
            names = ", ".join(f"%{node.name} ({node.operator})" for node in region)
            raise ScheduleError(f"{names}: a product is a kernel of its own without other operators")

    def graph(self) -> Graph:
        product, result = self.region[0], self.region[-1]
        transposed = bool(node_attributes(product)["transpose_b"])
        *batch, rows, columns = result.tile.known_shape
        first, second = (self.kernel.tile(self.operands[name]) for name in product.inputs)
        depth, rank = first.known_shape[-1], len(result.tile.known_shape)
        wide, deep = _divisor(columns, COLUMNS, result), _divisor(depth, DEPTHS, result)
        grid = {**{f"A{axis}g": extent for axis, extent in enumerate(batch)}, "Ng": columns // wide}
        b = GraphBuilder(f"{result.name}_block", "block", grid=grid, loops={"Kl": depth // deep})
        n_axis, k_axis = (rank - 2, rank - 1) if transposed else (rank - 1, rank - 2)
        lead = tuple(range(rank - 2))
        ones = (1,) * (rank - 2)
        places = (
            (first, (*lead, -1), rank - 1, (*ones, rows, deep)),
            (second, (*lead, n_axis), k_axis, (*ones, wide, deep) if transposed else (*ones, deep, wide)),
        )
        tiles = []
        for name, (tile, axes, loop, shape) in zip(product.inputs, places, strict=True):
            if len(tile.known_shape) != rank:
                raise ScheduleError(
                    f"%{result.name}: operands of one rank are multiplied by a kernel of its own"
                )
            source = self.operands[name]
            whole = b.input(f"{source.lower()}_in", tile.ttype, tile.known_shape)
            tiles.append(b.add("load", whole, name=source.lower(), grid=axes, loop=(loop,), shape=shape))
        value = b.add("accumulate", b.add("matmul", *tiles, **_attributes(product)))
        if result is not product:
            value = b.add("convert", value, **_attributes(result))
        return b.finish(b.add("store", value, grid=(*lead, rank - 1), shape=result.tile.known_shape))


def _divisor(extent: int, choices: Sequence[int], node: Node) -> int:
    found = next((choice for choice in choices if extent % choice == 0), None)
    if found is None:
        raise ScheduleError(f"%{node.name}: none of {choices} divides {extent}")
    return found


def _attributes(node: Node) -> dict[str, Any]:
    """Return what a node's operator is given; types are those of its result."""
    attributes: dict[str, Any] = dict(node.attributes)
    if node.operator in ("convert", "constant", "matmul"):
        attributes["type"] = node.tile.ttype.name
    return attributes
