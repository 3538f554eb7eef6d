"""The loop nest of a chain on CPUs: rows over threads, columns in vectors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tvm import ir, tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.lower import builder as b
from ladder.lower.chain.symbols import size_names
from ladder.lower.chain.values import Index, Values, computed_type, stored_type
from ladder.lower.cpu import vectors as v
from ladder.lower.cpu.activations import as_float
from ladder.partition.rows import row_axes
from targets import TileDevice
from tile_types.errors import ScheduleError
from tile_types.tile import Extent, Tile

Expr = Any

LANES = 16
SERIAL = 1 << 14
"""Elements below which one thread does all: starting threads costs more."""

BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}

COMBINE = {"reduce_sum": lambda a, b: a + b, "reduce_max": tirx.max}
"""Reduction -> how two values become one."""


def emit_chain(graph: Graph, device: TileDevice, name: str) -> Any:
    """Emit the PrimFunc ``(sizes..., inputs..., outputs...)`` of a chain.

    Raises
    ------
    ScheduleError
        If the chain is no loop over rows.
    DTypeError
        If a type has no TIR form.
    """
    del device
    rows = row_axes(graph, graph.outputs)
    if rows is None:
        raise ScheduleError(f"chain {graph.name!r} is no loop over rows")
    with b.function(name) as result:
        _Nest(graph, rows).emit()
    return result.func


class _Nest:
    """The loop nest of one chain."""

    def __init__(self, graph: Graph, rows: int) -> None:
        self.graph = graph
        self.rows = rows
        self.sizes = {name: I.arg(name, I.int32()) for name in size_names(graph)}
        self.values = Values(graph, self.load, self.sizes)
        self.buffers = {node.name: self.buffer(node.name, node.tile) for node in graph.inputs}
        self.results = {value: self.buffer(f"{value}_result", graph.tile(value)) for value in graph.outputs}
        for size in self.sizes.values():
            self.values.analyzer.bind(size, ir.Range(1, 1 << 24))

    def buffer(self, name: str, tile: Tile) -> Any:
        dtype = stored_type(tile.ttype.name)
        shape = [self.values.extent(extent) for extent in tile.shape]
        return b.tensor(name, shape or [1], dtype, align=BYTES.get(dtype, 1))

    def load(self, name: str, index: Index) -> Expr:
        tile = self.graph.tile(name)
        value = self.buffers[name][index or (0,)]
        kind, wanted = tile.ttype.name, computed_type(tile.ttype.name)
        if kind in ("float16", "bfloat16"):
            return as_float(value, kind)
        return value if stored_type(kind) == wanted else T.Cast(wanted, value)

    def extent(self, extent: Extent) -> Expr:
        return self.values.extent(extent)

    def emit(self) -> None:
        """Emit the rows and, in each, every result."""
        shape = self.graph.tile(self.graph.outputs[0]).shape[: self.rows]
        extents = [self.extent(extent) for extent in shape]
        total = max_known(product(self.graph.tile(value).shape) for value in self.graph.outputs)
        count = extents[0] if len(extents) == 1 else self.extent(product(shape))
        serial = total is not None and total < SERIAL
        with (b.loop(count) if serial else v.parallel(count)) as row, self.ranged(row, count):
            index = _unravelled(self.values, row, extents)
            for value in self.graph.outputs:
                self.result(value, index)
                self.values.forget()

    @contextmanager
    def ranged(self, variable: Any, stop: Expr, start: Expr = 0) -> Iterator[None]:
        """Tell the analyzer the range of a loop."""
        self.values.analyzer.bind(variable, ir.Range(start, stop), True)
        yield

    def result(self, value: str, row: Index) -> None:
        """Emit one result of a row."""
        columns = [self.extent(extent) for extent in self.graph.tile(value).shape[self.rows :]]
        probes = tuple(tirx.Var(f"c{axis}", "int32") for axis in range(len(columns)))
        for probe, extent in zip(probes, columns, strict=True):
            self.values.analyzer.bind(probe, ir.Range(0, extent), True)
        self.prepare(value, (*row, *probes), probes)

        def element(index: Index) -> None:
            self.prepare(value, (*row, *index), ())
            found = self.values.at(value, (*row, *index))
            dtype = stored_type(self.graph.tile(value).ttype.name)
            stored = found if str(found.ty.dtype) == dtype else T.Cast(dtype, found)
            b.store(self.results[value], stored, *((*row, *index) or (0,)))

        if columns:
            self.columns(value, row, columns, probes, element)
        else:
            element(())

    def columns(
        self, value: str, row: Index, columns: Sequence[Expr], probes: Index, element: Callable[[Index], None]
    ) -> None:
        """Emit the loops over columns; the last in vectors unless a reduction runs within."""
        inside = bool(self.values.needed(value, (*row, *probes)))
        cuts = self.cuts(value, row, columns, probes)

        def nested(outer: Index, rest: Sequence[Expr]) -> None:
            if len(rest) > 1:
                with b.loop(rest[0]) as at, self.ranged(at, rest[0]):
                    nested((*outer, at), rest[1:])
                return
            for start, stop in cuts:
                self.vector_loop(start, stop, lambda at: element((*outer, at)), vectors=not inside)

        nested((), columns)

    def cuts(self, value: str, row: Index, columns: Sequence[Expr], probes: Index) -> list[tuple[Expr, Expr]]:
        """Return the pieces of the last axis between joins and borders."""
        last = probes[-1]
        self.values.loops, self.values.breaks = [last], {}
        if not self.values.needed(value, (*row, *probes)):
            self.values.at(value, (*row, *probes))
        self.values.forget()
        self.values.loops = []
        extent = columns[-1]
        if not isinstance(extent, int):
            return [(0, extent)]
        marks = sorted({0, extent, *(at for at in self.values.breaks.get(last, ()) if 0 < at < extent)})
        return list(zip(marks[:-1], marks[1:], strict=True))

    def vector_loop(
        self, start: Expr, stop: Expr, body: Callable[[Expr], None], *, vectors: bool = True
    ) -> None:
        """Emit ``body(i)`` for start <= i < stop: whole vectors, then the rest one by one."""
        count = self.values.simplified(stop - start)
        whole = count // LANES if vectors else 0
        if not (isinstance(whole, int) and whole == 0):
            with b.loop(whole) as chunk, self.ranged(chunk, whole), b.vector(LANES) as lane, self.ranged(
                lane, LANES
            ):
                body(start + chunk * LANES + lane)
            self.values.forget()
        rest = self.values.simplified(count - whole * LANES)
        if not (isinstance(rest, int) and rest == 0) and not _is_zero(rest):
            begin = start + whole * LANES
            with b.loop(rest) as at, self.ranged(at, rest):
                body(begin + at)
            self.values.forget()

    def prepare(self, value: str, index: Index, inner: Index) -> None:
        """Emit the reductions that a value needs and that do not depend on ``inner`` loops."""
        for node, place in self.values.needed(value, index):
            if not any(_uses(part, inner) for part in place):
                self.reduce(node, place)

    def reduce(self, node: Node, index: Index) -> None:
        """Emit one reduction into a cell."""
        operand, attributes = node.inputs[0], node_attributes(node)
        shape = self.graph.tile(operand).shape
        axis = attributes["axis"] % len(shape)
        extent, dtype = self.extent(shape[axis]), computed_type(node.tile.ttype.name)
        combine = COMBINE[node.operator]
        neutral = tirx.const(0, dtype) if node.operator == "reduce_sum" else tirx.min_value(dtype)

        def at(position: Expr) -> Index:
            keep = attributes["keep"]
            return (*index[:axis], position, *index[axis + 1 if keep else axis :])

        probe = tirx.Var("k", "int32")
        self.values.analyzer.bind(probe, ir.Range(0, extent), True)
        self.prepare(operand, at(probe), (probe,))
        nested = bool(self.values.needed(operand, at(probe)))
        self.values.forget()
        lanes = 1 if nested or (isinstance(extent, int) and extent < LANES) else LANES
        sums = v.scratch(lanes, dtype)
        b.store(sums, _splat(neutral, lanes), v.lanes(0, lanes))

        def add(position: Expr, lane: Expr) -> None:
            self.prepare(operand, at(position), ())
            b.store(sums, combine(sums[lane], self.values.at(operand, at(position))), lane)

        whole = extent // lanes if lanes > 1 else 0
        if lanes > 1:
            with b.loop(whole) as chunk, self.ranged(chunk, whole), b.vector(lanes) as lane, self.ranged(
                lane, lanes
            ):
                add(chunk * lanes + lane, lane)
            self.values.forget()
        rest = self.values.simplified(extent - whole * lanes)
        if not _is_zero(rest):
            with b.loop(rest) as place, self.ranged(place, rest):
                add(whole * lanes + place, 0)
            self.values.forget()
        total = sums[0]
        for lane in range(1, lanes):
            total = combine(total, sums[lane])
        self.values.cells[self.values.key(node.name, tuple(map(self.values.simplified, index)))] = b.bind(total)


def max_known(counts: Iterable[Extent]) -> int | None:
    """Return the largest of some counts, None if one is symbolic."""
    known = list(counts)
    return None if any(isinstance(count, str) for count in known) else max(map(int, known))


def _splat(value: Expr, lanes: int) -> Expr:
    return v.splat(value, lanes) if lanes > 1 else value


def _is_zero(value: Expr) -> bool:
    return (isinstance(value, int) and value == 0) or (isinstance(value, tirx.IntImm) and value.value == 0)


def _uses(expression: Expr, variables: Sequence[Any]) -> bool:
    if isinstance(expression, int) or not variables:
        return False
    from tvm.tirx.analysis import undefined_vars

    names = {id(variable) for variable in variables}
    found = undefined_vars(tirx.Evaluate(expression), [])
    return any(any(var.same_as(variable) for variable in variables) for var in found) if names else False


def _unravelled(values: Values, flat: Expr, extents: Sequence[Expr]) -> Index:
    """Return the row index along each axis."""
    index: list[Expr] = []
    for extent in reversed(extents[1:]):
        index.append(values.simplified(tirx.floormod(flat, extent)))
        flat = values.simplified(tirx.floordiv(flat, extent))
    return (flat, *reversed(index)) if extents else ()
