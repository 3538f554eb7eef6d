"""The loop nest of a chain on CPUs: rows over threads, columns in vectors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any

from tvm import tirx

from ladder.ir.extents import product
from ladder.lower import builder as b
from ladder.lower.chain.cpu_lanes import Lanes, columns_beside
from ladder.lower.chain.cpu_nest import LANES, CpuNest
from ladder.lower.chain.cpu_tiles import SERIAL, CpuTiles
from ladder.lower.chain.indices import Index
from ladder.lower.chain.scatter import Chain
from ladder.lower.cpu import vectors as v
from ladder.partition.rows import REDUCTIONS
from tile_types.tile import Extent

Expr = Any

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
        """Emit the loop over rows."""
        if self.beside and extents:
            self.emit_lines(extents, serial)
            return
        long = self.long_rows()
        if long and not serial:
            self.emit_blocks(count, extents, long)
            return
        self.keep_rows(long)
        with b.loop(count) if serial else v.parallel(count) as row, self.ranged(row, count):
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
                with self.ranged(row, count):
                    self.emit_row(self.unravelled(row, extents))
        self.values.cells.clear()

    def emit_lines(self, extents: Sequence[Expr], serial: bool) -> None:
        """Emit the rows as lines of them, over threads, and rows one after the other."""
        *outer, last = extents
        count: Expr = 1
        for extent in outer:
            count = count * extent
        with (
            b.loop(count) if serial else v.parallel(count) as line,
            self.ranged(line, count),
            b.loop(last) as at,
            self.ranged(at, last),
        ):
            self.emit_row((*self.unravelled(line, outer), at))
        self.values.cells.clear()

    def emit_row(self, index: Index) -> None:
        """Emit all results of a row."""
        self.values.rows.clear()
        for value in self.graph.outputs:
            if 0 not in self.graph.tile(value).shape:
                self.result(value, index)
            self.values.forget()

    def result(self, value: str, row: Index) -> None:
        """Emit one result of a row."""
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
                with b.loop(rest[0]) as at, self.ranged(at, rest[0]):
                    nested((*outer, at), rest[1:])
                return
            for start, stop in cuts:
                vector = not inside and self.is_decided(value, lambda at: (*row, *outer, at), start, stop)
                self.vector_loop(start, stop, LANES if vector else 1, lambda at, lane: element((*outer, at)))

        nested((), columns)
