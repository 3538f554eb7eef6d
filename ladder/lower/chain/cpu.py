"""The loop nest of a chain on CPUs: rows over threads, columns in vectors.

Vectorized reductions of CPU chains: each lane of a vector reduces one column.

Where every result depends on the last axis and reductions run along others (windows of an image with
channels last, means over its places), neighbouring columns read neighbouring elements. So a block of columns
keeps one total per lane in registers while the loops of the reductions run around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import tvm_ffi
from tvm import tirx

from ladder.ir.extents import product
from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.cpu_nest import LANES, CpuNest
from ladder.lower.chain.cpu_tiles import SERIAL, CpuTiles
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import Reduction, uses
from ladder.lower.chain.scatter import Chain
from ladder.lower.cpu import vectors as v
from ladder.partition.rows import REDUCTIONS
from tile_types.tile import Extent

VECTORS = (4, 2, 1)
"""Vectors of columns whose totals are kept side by side, most first."""


@dataclass(frozen=True)
class Total:
    """The totals of one reduction in a block of columns.

    node: Name of the reduction.
    place: Index of its result, in terms of the block's column.
    cells: One total per column of the block.
    """

    node: str
    place: Index
    cells: Any


@dataclass(frozen=True)
class Lanes:
    """One result of a chain, column block by column block.

    value: The result.
    row: Index of its row.
    """

    nest: CpuNest
    value: str
    row: Index

    def emit(self, extent: int) -> None:
        """Emit all columns: blocks of several vectors, of one, then what is left in a shorter one."""
        start = 0
        for vectors in VECTORS:
            count = (extent - start) // (vectors * LANES)
            self.blocks(start, extent, count, vectors, LANES)
            start += count * vectors * LANES
        self.blocks(start, extent, 1, 1, extent - start)

    def blocks(self, start: int, extent: int, count: int, vectors: int, lanes: int) -> None:
        """Emit some blocks one after the other."""
        if not count or not lanes:
            return
        nest = self.nest
        with nest.loop(count) as number:
            first = start + number * (vectors * lanes)
            Block(nest, nest.probe("column", extent), first, vectors, lanes).emit(self.value, self.row)


@dataclass(frozen=True)
class Block:
    """Neighbouring columns whose reductions run beside one another.

    column: Variable that stands for the column.
    first: The first column.
    vectors, lanes: Vectors of columns, and columns of a vector.
    totals: Of the reductions around the code that is being emitted.
    """

    nest: CpuNest
    column: Any
    first: Expr
    vectors: int
    lanes: int
    totals: list[Total] = field(default_factory=list)

    def emit(self, value: str, row: Index) -> None:
        """Emit the reductions, then the elements."""
        nest = self.nest
        before = dict(nest.values.cells)
        place = (*row, self.column)
        for node, index in nest.values.needed(value, place):
            self.reduce(node, index)

        def elements() -> None:
            self.each_vector(lambda at: nest.element(value, self.placed(place, at)))

        nest.branched(value, place, (self.column,), elements)
        self.totals.clear()
        nest.values.cells.clear()
        nest.values.cells.update(before)
        nest.values.forget()

    def reduce(self, node: Node, index: Index) -> None:
        """Emit a reduction of every column; what it needs of others runs inside its loop."""
        nest = self.nest
        it = Reduction(nest, node, index)
        cells = v.scratch(self.vectors * self.lanes, it.dtype)
        self.each_vector(lambda at: b.store(cells, it.neutral, at))
        with nest.loop(it.extent) as step:
            mark, known = len(self.totals), dict(nest.values.cells)
            operand = it.at(step)
            for inner, place in nest.values.needed(it.operand, operand):
                self.reduce(inner, place)

            def add(at: Expr, it: Reduction = it, operand: Index = operand) -> None:
                with nest.values.keeping(nest.register):
                    found = nest.values.at(it.operand, self.placed(operand, at))
                b.store(cells, it.combine(cells[at], found), at)

            nest.branched(it.operand, operand, (self.column,), partial(self.each_vector, add))
            del self.totals[mark:]
            nest.values.cells.clear()
            nest.values.cells.update(known)
        self.totals.append(Total(node.name, index, cells))
        nest.values.cells[nest.values.key(node.name, self.simple(index))] = tirx.const(0, it.dtype)

    def each_vector(self, body: Callable[[Expr], None]) -> None:
        """Emit ``body(number of the column in the block)`` for all columns, vector by vector."""
        nest = self.nest
        for vector in range(self.vectors):
            with nest.vector(self.lanes) as lane, self.known(at := vector * self.lanes + lane):
                body(at)
            nest.values.forget()

    @contextmanager
    def known(self, at: Expr) -> Iterator[None]:
        """Let the totals of a column be what reductions give."""
        cells = self.nest.values.cells
        before = dict(cells)
        for total in self.totals:
            cells[self.nest.values.key(total.node, self.placed(total.place, at))] = total.cells[at]
        yield
        cells.clear()
        cells.update(before)

    def placed(self, index: Index, at: Expr) -> Index:
        """Return an index for the column of that number in the block."""
        column = self.first + at

        def put(variable: Any) -> Any:
            return column if variable.same_as(self.column) else variable

        mapped = (i if isinstance(i, int) else tvm_ffi.structural_map(i, (tirx.Var, put)) for i in index)
        return self.simple(tuple(mapped))

    def simple(self, index: Index) -> Index:
        return tuple(map(self.nest.values.simplified, index))


def columns_beside(nest: CpuNest) -> int:
    """Return how many columns, one result beside the other, reductions of a chain can run for; 0 if for none.

    All results have them as their last axis, and whatever is read lies beside its neighbour for the next
    column, or is the same.
    """
    shapes = {nest.graph.tile(value).shape for value in nest.graph.outputs}
    reduced = any(node.operator in REDUCTIONS for node in nest.graph.nodes)
    shape = next(iter(shapes))
    if not reduced or nest.scatters or len(shapes) > 1 or nest.rows != len(shape):
        return 0
    extent = shape[-1] if shape else 1
    empty = any(0 in node.tile.shape for node in nest.graph.nodes)
    if not isinstance(extent, int) or extent < 2 or empty:
        return 0
    row = tuple(nest.probe(f"r{axis}", nest.extent(e)) for axis, e in enumerate(shape[:-1]))
    column = nest.probe("column", extent)
    with nest.values.only_loads():
        reads = [read for value in nest.graph.outputs for read in _reads(nest, value, (*row, column))]
        if any(uses(part, (column,)) for comparison in nest.values.open for part in comparison):
            return 0
    along = [nest.address(*read) for read in reads]
    lie = all(
        not uses(nest.values.simplified(address - column), (column,))
        for address in along
        if uses(address, (column,))
    )
    return extent if lie and any(uses(address, (column,)) for address in along) else 0


def _reads(nest: CpuNest, value: str, index: Index) -> list[tuple[str, Index]]:
    """Return what an element is made of, through reductions."""
    found = nest.reads(value, index)
    for node, place in nest.values.needed(value, index):
        it = Reduction(nest, node, place)
        found += _reads(nest, it.operand, it.at(nest.probe("k", it.extent)))
    return found


BLOCK = 1 << 13
"""Elements of a block of rows at least, where rows are kept on the heap: a thread allocates once for all."""

ROW = 256
"""Elements of a row below which more axes are taken together."""


class CpuChain(CpuNest):
    """The loop nest of a chain: rows over threads, columns in vectors."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain)
        self.merged = self.merged_axes()
        """Trailing axes that run as one."""
        if self.merged > 1:
            self.rows = len(self.graph.tile(self.graph.outputs[0]).shape) - self.merged
        self.beside = columns_beside(self)
        """Columns that have reductions of their own, beside one another."""
        if self.beside:
            self.rows -= 1

    def merged_axes(self) -> int:
        """Return how many trailing axes run as one: those of short rows that lie together everywhere."""
        shapes = {self.graph.tile(value).shape for value in self.graph.outputs}
        reduced = any(node.operator in REDUCTIONS for node in self.graph.nodes)
        if reduced or self.scatters or len(shapes) > 1:
            return 1
        (shape,) = shapes
        merged = 1
        while (
            merged < len(shape) - 1
            and self.is_short(shape[-merged:])
            and self.lie_together(self.graph.outputs, merged + 1)
        ):
            merged += 1
        return merged

    def is_short(self, shape: Sequence[Extent]) -> bool:
        """Tell whether axes have too few elements for vectors to pay."""
        count = product(shape)
        return isinstance(count, int) and count < ROW

    def emit(self) -> None:
        """Emit tiles where an input lies along other axes, else the rows and, in each, every result."""
        tiles = CpuTiles.of(self)
        if tiles is not None:
            tiles.emit()
            return
        extents = self.row_extents()
        shape = self.graph.tile(self.graph.outputs[0]).shape[: self.rows]
        count = extents[0] if len(extents) == 1 else self.extent(product(shape))
        elements = [self.extent(product(self.graph.tile(value).shape)) for value in self.graph.outputs]
        if all(isinstance(number, int) for number in elements):
            self.emit_rows(count, extents, serial=max(elements) < SERIAL)
            return
        largest = elements[0]
        for number in elements[1:]:
            largest = tirx.max(largest, number)
        b.either(
            largest < SERIAL,
            lambda: self.emit_rows(count, extents, serial=True),
            lambda: self.emit_rows(count, extents, serial=False),
        )

    def emit_rows(self, count: Expr, extents: Sequence[Expr], serial: bool) -> None:
        if self.beside and extents:
            self.emit_lines(extents, serial)
            return
        long = self.long_rows()
        if long and not serial:
            self.emit_blocks(count, extents, long)
            return
        self.keep_rows(long)
        with self.rows_over(count, serial) as row:
            self.emit_row(self.unravelled(row, extents))
        self.values.cells.clear()

    def keep_rows(self, long: Mapping[tuple[str, str], Expr]) -> None:
        """Emit the memory of rows that are no arrays on the stack."""
        self.memory_of_rows = {key: v.heap(length, key[1]) for key, length in long.items()}

    def emit_blocks(self, count: Expr, extents: Sequence[Expr], long: Mapping[tuple[str, str], Expr]) -> None:
        """Emit blocks of rows over threads: the rows of a block are kept in the same memory."""
        longest = reduce(tirx.max, long.values(), 1)
        size = self.held(tirx.max(1, tirx.floordiv(BLOCK, longest)))
        with v.parallel(self.held(tirx.floordiv(count + size - 1, size))) as block:
            self.keep_rows(long)
            with b.loop(self.held(tirx.min(size, count - block * size))) as at:
                row = b.bind(block * size + at)
                self.within(row, count)
                self.emit_row(self.unravelled(row, extents))
        self.values.cells.clear()

    def emit_lines(self, extents: Sequence[Expr], serial: bool) -> None:
        """Emit the rows as lines of them, over threads, and rows one after the other."""
        *outer, last = extents
        count: Expr = 1
        for extent in outer:
            count = count * extent
        with self.rows_over(count, serial) as line, self.loop(last) as at:
            self.emit_row((*self.unravelled(line, outer), at))
        self.values.cells.clear()

    def emit_row(self, index: Index) -> None:
        self.values.rows.clear()
        for value in self.graph.outputs:
            if 0 not in self.graph.tile(value).shape:
                self.result(value, index)
            self.values.forget()

    def result(self, value: str, row: Index) -> None:
        if self.beside:
            Lanes(self, value, row).emit(self.beside)
            return
        columns = self.columns(value)
        probes = tuple(self.probe(f"c{axis}", extent) for axis, extent in enumerate(columns))
        self.prepare(value, (*row, *probes), probes)

        def element(index: Index) -> None:
            self.element(value, (*row, *index))

        if self.merged > 1:
            total = self.extent(product(self.graph.tile(value).shape[self.rows :]))
            at = self.probe("c", total)

            def merged(at: Expr) -> Index:
                return (*row, *self.unravelled(at, columns))

            self.branched(
                value,
                (*row, *self.unravelled(at, columns)),
                (at,),
                lambda: self.vector_loop(
                    0,
                    total,
                    LANES if self.is_decided(value, merged, 0, total) else 1,
                    lambda at, lane: element(self.unravelled(at, columns)),
                ),
            )
        elif columns:
            place = (*row, *probes)
            self.branched(
                value, place, probes, lambda: self.each_column(value, row, columns, probes, element)
            )
        else:
            element(())

    def each_column(
        self, value: str, row: Index, columns: Sequence[Expr], probes: Index, element: Callable[[Index], None]
    ) -> None:
        """Emit the loops over columns; the last in vectors unless a reduction runs within."""
        inside = bool(self.values.needed(value, (*row, *probes)))
        cuts = self.cuts(value, (*row, *probes), probes[-1], columns[-1])

        def nested(outer: Index, rest: Sequence[Expr]) -> None:
            if len(rest) > 1:
                with self.loop(rest[0]) as at:
                    nested((*outer, at), rest[1:])
                return
            for start, stop in cuts:
                vector = not inside and self.is_decided(value, lambda at: (*row, *outer, at), start, stop)
                self.vector_loop(start, stop, LANES if vector else 1, lambda at, lane: element((*outer, at)))

        nested((), columns)
