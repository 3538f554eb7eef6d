"""Vectorized reductions of CPU chains: each lane of a vector reduces one column.

Where every result depends on the last axis and reductions run along others (windows of an image with
channels last, means over its places), neighbouring columns read neighbouring elements. So a block of columns
keeps one total per lane in registers while the loops of the reductions run around it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tvm_ffi
from tvm import tirx

from ladder.ir.graph import Node
from ladder.lower import builder as b
from ladder.lower.chain.cpu_nest import CpuNest
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import Reduction, uses
from ladder.lower.cpu import vectors as v
from ladder.partition.rows import REDUCTIONS

Expr = Any

LANES = 16

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
        with b.loop(count) as number, nest.ranged(number, count):
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
        with b.loop(it.extent) as step, nest.ranged(step, it.extent):
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
            with (
                b.vector(self.lanes) as lane,
                nest.ranged(lane, self.lanes),
                nest.in_lane(lane, self.lanes),
                self.known(at := vector * self.lanes + lane),
            ):
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
