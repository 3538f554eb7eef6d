"""Base of all loop nests of chains: arguments, ranges, loop splitting and reductions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from tvm import ir, tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir import scalars
from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Node
from ladder.ir.starts import start_names
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.element_types import computed_type, stored_type
from ladder.lower.chain.indices import Index, is_same, variables_of
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.values import Values
from ladder.partition.elements import FLOATS8
from ladder.partition.rows import SCANS, column_axes, loop_axes
from schedules.schedule import check
from tile_types.errors import ScheduleError
from tile_types.tile import Extent, Tile

BYTES = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8"), 1),
}

MOST_BRANCHES = 64
"""Of a result: joins of several axes that are cut in each other's branches multiply."""

COMBINE = {
    "reduce_sum": "add",
    "reduce_max": "maximum",
    "scan_sum": "add",
    "scan_max": "maximum",
    "scan_product": "mul",
    "scan_logsumexp": "logaddexp",
}
"""Reduction, or scan -> the operator that makes one of two values."""

NEUTRAL = {"add": 0, "mul": 1}
"""Such an operator -> what changes no value; others take the least there is."""


class Nest(ABC):
    """The loop nest of one chain, being emitted.

    align: Bytes at which arguments begin; 0: at an element.
    """

    def __init__(self, chain: Chain, align: int = 0) -> None:
        graph, self.scatters, self.orders = chain.graph, chain.scatters, chain.orders
        rows = loop_axes(graph, graph.outputs)
        self.of_columns = rows is None
        """Whether the last axis of results counts rows too."""
        if rows is None and (axes := column_axes(graph, graph.outputs)) is not None:
            rows = axes[0]
        if rows is None:
            raise ScheduleError(f"chain {graph.name!r} is no loop over rows")
        self.graph, self.rows, self.align = graph, rows, align
        self.sizes = self.declared_sizes(chain)
        self.recorder: list[tuple[str, Index]] | None = None
        """Notes what would be loaded, instead of loading."""
        self.conditions: list[list[Expr]] = []
        """Under which each of what `recorder` noted last would be."""
        self.branches = 0
        """Of the result being emitted."""
        self.values = Values(self.sizes, graph, self._load)
        self.buffers = {node.name: self.buffer(node.name, node.tile) for node in graph.inputs}
        self.results = {
            value: self.buffer(f"{value}_result", self.stored_tile(value)) for value in graph.outputs
        }
        starts = start_names(graph)
        for name, size in self.sizes.items():
            self.values.analyzer.bind(size, ir.Range(0 if name in starts else 1, 1 << 24))

    def declared_sizes(self, chain: Chain) -> dict[str, Any]:
        """Declare the symbolic sizes as arguments."""
        return {name: I.arg(name, I.int32()) for name in chain.sizes}

    def buffer(self, name: str, tile: Tile) -> Any:
        """Declare an argument; a number has one axis."""
        align = self.align or BYTES.get(stored_type(tile.ttype.name), 1)
        shape = [self.extent(extent) for extent in tile.shape]
        return b.tensor(name, shape or [1], b.tir_name(tile.ttype.name), align=align)

    def open_codes(self) -> None:
        """Emit views of floats of 8 bits as codes, to be read and written, after all attributes."""
        for tensors in (self.buffers, self.results):
            for name, tensor in tensors.items():
                if self.graph.tile(name).ttype.name in FLOATS8:
                    tensors[name] = b.as_bytes(tensor)

    def stored_tile(self, value: str) -> Tile:
        """Return the tile of the tensor that a result is written to."""
        if value in self.orders:
            return self.orders[value].tile
        scatter = self.scatters.get(value)
        return self.graph.tile(value) if scatter is None else scatter.base

    @contextmanager
    def placed(self, value: str, places: Sequence[Index]) -> Iterator[Sequence[Index]]:
        """Open what stores elements of one row of a result: yields where they lie in its tensor.

        A row that is scattered beyond the tensor's end is not stored; negative numbers count from the end.
        """
        scatter = self.scatters.get(value)
        if scatter is None:
            yield [self.counted(value, place) for place in places]
            return
        extent = self.extent(scatter.base.shape[scatter.axis])
        check(not scatter.combine, "no sums into rows by number in kernels of chains for this device")
        number = T.Cast("int32", self.buffers[scatter.ids][places[0][scatter.axis]])
        row = b.bind(T.Select(number < 0, number + extent, number))
        with b.when(tirx.And(row >= 0, row < extent)):
            yield [(*place[: scatter.axis], row, *place[scatter.axis + 1 :]) for place in places]

    def counted(self, value: str, place: Index) -> Index:
        """Return where an element of a result lies in its tensor."""
        if (order := self.orders.get(value)) is None:
            return place
        extents = [self.extent(order.tile.shape[axis]) for axis in order.axes[order.rows :]]
        column = place[order.rows] if len(place) > order.rows else 0
        counted = (*place[: order.rows], *self.unravelled(column, extents))
        return tuple(counted[order.axes.index(axis)] for axis in range(len(counted)))

    def _load(self, name: str, index: Index) -> Expr:
        if not self.values.looking:
            return self.load(name, index)
        if self.recorder is not None:
            self.recorder.append((name, index))
            self.conditions.append([self.values.simplified(guard) for guard in self.values.guards])
        return tirx.const(1, computed_type(self.graph.tile(name).ttype.name))

    def reads(self, value: str, index: Index) -> list[tuple[str, Index]]:
        """Return what an element is loaded from, in order; call it within `Values.only_loads`."""
        found: list[tuple[str, Index]] = []
        self.recorder, self.conditions = found, []
        self.values.at(value, index)
        self.recorder = None
        return found

    def address(self, name: str, index: Index) -> Expr:
        """Return the number of elements before one of an input."""
        flat: Expr = 0
        for at, extent in zip(index, self.graph.tile(name).shape, strict=True):
            flat = flat * self.extent(extent) + at
        return self.values.resolved(flat)

    def lie_together(self, results: Sequence[str], merged: int) -> bool:
        """Tell whether every read of results of one shape goes on with their last axes as with one."""
        shape = [self.extent(extent) for extent in self.graph.tile(results[0]).shape]
        outer = tuple(self.probe(f"m{axis}", extent) for axis, extent in enumerate(shape[:-merged]))
        at = self.probe("m", self.extent(product(self.graph.tile(results[0]).shape[-merged:])))
        index = (*outer, *self.unravelled(at, shape[-merged:]))
        with self.values.only_loads():
            addresses = [self.address(*read) for value in results for read in self.reads(value, index)]
            crossed = any(uses(part, (at,)) for comparison in self.values.open for part in comparison)
        along = (self.values.simplified(address - at) for address in addresses if uses(address, (at,)))
        return not crossed and not any(uses(rest, (at,)) for rest in along)

    @abstractmethod
    def load(self, name: str, index: Index) -> Expr:
        """Return an element of an input in the type that is computed with."""

    @abstractmethod
    def register(self, value: Expr) -> Expr:
        """Return a value that is computed once."""

    def scan(self, node: Node, index: Index) -> None:
        """Emit a scan of the row of an element into cells of `values`."""
        raise ScheduleError("only lanes of GPUs that hold a row scan it")

    @abstractmethod
    def reduce(self, node: Node, index: Index) -> None:
        """Emit a reduction into a cell of `values`."""

    def extent(self, extent: Extent) -> Expr:
        return self.values.extent(extent)

    def within(self, variable: Expr, extent: Expr) -> None:
        """Tell the analyzer the range of a variable, if it is one."""
        if not isinstance(variable, int | tirx.IntImm):
            self.values.analyzer.bind(variable, ir.Range(0, extent), True)

    @contextmanager
    def loop(self, extent: Expr) -> Iterator[Expr]:
        """Emit a loop whose range the analyzer knows."""
        with b.loop(extent) as at:
            self.within(at, extent)
            yield at

    def probe(self, name: str, extent: Expr) -> Any:
        """Return a variable that stands for a loop that is not emitted yet."""
        variable = tirx.Var(name, "int32")
        self.within(variable, extent)
        return variable

    def columns(self, value: str) -> list[Expr]:
        """Return the extents of a result's columns."""
        return [self.extent(extent) for extent in self.graph.tile(value).shape[self.rows :]]

    def row_extents(self) -> list[Expr]:
        return [self.extent(e) for e in self.graph.tile(self.graph.outputs[0]).shape[: self.rows]]

    def unravelled(self, flat: Expr, extents: Sequence[Expr]) -> Index:
        """Return the position along each axis of a number that counts them all."""
        index: list[Expr] = []
        for extent in reversed(extents[1:]):
            index.append(self.values.simplified(tirx.floormod(flat, extent)))
            flat = self.values.simplified(tirx.floordiv(flat, extent))
        return (flat, *reversed(index)) if extents else ()

    def neighbours(self, first: Expr, width: int, extents: Sequence[Expr]) -> list[Index]:
        """Return the index of each of ``width`` neighbouring elements, of which all axes count the first.

        Where rows are no whole vectors, nor vectors whole rows, positions are those of one number for each
        element: `Indices.resolved` finds what is read at them again.
        """
        inner, count, apart = 0, 1, False
        while inner < len(extents) and (inner == 0 or count % width) and isinstance(extents[~inner], int):
            count, inner = count * int(extents[~inner]), inner + 1
            apart = apart or bool(count % width and width % count)
        if not apart:
            return [self.unravelled(first + lane, extents) for lane in range(width)]
        found = []
        for lane in range(width):
            known = self.unravelled(first + lane, extents)
            number = tirx.Var("number", "int32") if self.values.looking else b.bind(first + lane)
            self.values.numbers[number] = first + lane
            found.append((*known[:-inner], *self.unravelled(number, extents)[-inner:]))
        return found

    def prepare(self, value: str, index: Index, inner: Index) -> None:
        """Emit the reductions that a value needs and that do not depend on ``inner`` loops.

        One that does may need others that do not: emitted within its loop, they would be computed each turn,
        and end with it.
        """
        for node, place in self.values.needed(value, index):
            if node.operator in SCANS:
                self.scan(node, place)
            elif any(uses(part, inner) for part in place):
                it = Reduction(self, node, place)
                probe = self.probe("k", it.extent)
                self.prepare(it.operand, it.at(probe), (*inner, probe))
            else:
                self.reduce(node, place)

    def branched(self, value: str, index: Index, inner: Index, body: Callable[[], None]) -> None:
        """Emit ``body()``, with branches around it for joins and borders that lie across rows.

        Within each branch the join is decided, so that loops over columns have no condition. Beyond
        `MOST_BRANCHES` what is left is decided at run time, element by element.
        """
        if not self.values.assumptions:
            self.branches = 0
        self.values.forget()
        with self.values.only_loads():
            if not self.values.needed(value, index):
                self.values.at(value, index)
            unknown = (*inner, *self.values.stand_ins.values())
            free = [c for c in self.values.open if not any(uses(part, unknown) for part in c)]
        if not free or self.branches >= MOST_BRANCHES:
            body()
            return
        self.branches += 1
        comparison = middle(free)

        def decided(holds: bool) -> Callable[[], None]:
            def emit() -> None:
                with self.values.assuming(comparison, holds):
                    self.branched(value, index, inner, body)

            return emit

        b.either(comparison[0] < comparison[1], decided(True), decided(False))

    def keep_cell(self, node: Node, index: Index, total: Expr) -> None:
        """Remember the result of a reduction."""
        place = tuple(map(self.values.simplified, index))
        self.values.cells[self.values.key(node.name, place)] = total

    def stored(self, value: str, found: Expr) -> Expr:
        dtype = stored_type(self.graph.tile(value).ttype.name)
        return found if str(found.ty.dtype) == dtype else T.Cast(dtype, found)

    def cuts(self, value: str, index: Index, probe: Any, extent: Expr) -> list[tuple[Expr, Expr]]:
        """Return the pieces of the last axis between joins and borders."""
        self.values.loops, self.values.breaks = [probe], {}
        with self.values.only_loads():
            if not self.values.needed(value, index):
                self.values.at(value, index)
        self.values.loops = []
        if not isinstance(extent, int):
            return [(0, extent)]
        marks = sorted({0, extent, *(at for at in self.values.breaks.get(probe, ()) if 0 < at < extent)})
        return list(pairwise(marks))


class Reduction:
    """Operands of a reduction, and how it combines them.

    index: Where its result is.

    Its operand has ``extent`` positions, of which ``neighbours`` lie one after the other along its axis.
    """

    def __init__(self, nest: Nest, node: Node, index: Index) -> None:
        self.operand, self.keep = node.inputs[0], node_attributes(node).get("keep", True)
        self.exclusive = node_attributes(node).get("exclusive", False)
        """Of a scan: whether elements are not taken into what they come to."""
        self.operator = node.operator
        shape = nest.graph.tile(self.operand).shape
        self.axis = node_attributes(node)["axis"] % len(shape)
        self.extent = self.neighbours = nest.extent(shape[self.axis])
        self.dtype = computed_type(node.tile.ttype.name)
        combine = COMBINE[node.operator]
        self.lower = nest.values.lowering(combine)
        self.index, self.register = index, nest.register
        known = combine in NEUTRAL
        self.neutral = tirx.const(NEUTRAL[combine], self.dtype) if known else least(node.tile.ttype.name)

    def combine(self, total: Expr, value: Expr) -> Expr:
        """Return a total with one more value; what the next total waits for is as short as may be."""
        with scalars.using({"keep": self.register}):
            return self.lower(value, total)

    def at(self, position: Expr) -> Index:
        """Return where the operand is read."""
        return self.read_for(self.index, position)

    def read_for(self, index: Index, position: Expr) -> Index:
        """Return where the operand is read for a result at another index."""
        rest = index[self.axis + 1 if self.keep else self.axis :]
        return (*index[: self.axis], position, *rest)


def middle(comparisons: Sequence[tuple[Expr, Expr]]) -> tuple[Expr, Expr]:
    """Return the middle one of those that the last join compares: what lies within others is left to them.

    So each of n operands is behind log n branches, and is made as often.
    """
    position = comparisons[-1][0]
    alike = [each for each in comparisons if is_same(each[0], position)]
    return alike[len(alike) // 2]


def least(name: str) -> Expr:
    """Return what no number of a type is less than, in the type that it is computed in."""
    dtype = computed_type(name)
    return tirx.const(float("-inf") if dtype.startswith("float") else tirx.min_value(name).value, dtype)


def uses(expression: Expr, variables: Sequence[Any]) -> bool:
    """Tell whether an expression depends on one of some variables."""
    found = variables_of(expression) if variables else ()
    return any(var.same_as(variable) for var in found for variable in variables)


def is_zero(value: Expr) -> bool:
    """Tell whether an expression is the number 0."""
    return bool(
        (isinstance(value, int) and value == 0) or (isinstance(value, tirx.IntImm) and value.value == 0)
    )
