"""Register transposes of CPU chains: tiles are read along one axis and used along another.

A chain whose input is contiguous along an axis that is not its result's last one (a transpose lies between)
would touch a line of memory per element. Here `SIDE` rows by `SIDE` columns are read in vectors along the
rows, turned by shuffles, and used from the first-level cache as if the input lay as the result does.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tvm_ffi
from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.extents import product
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.cpu_nest import CpuNest
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import BYTES, is_zero, uses
from ladder.lower.cpu import vectors as v
from ladder.partition.rows import REDUCTIONS

SIDE = 16
"""Rows and columns that are turned at once."""

SERIAL = 1 << 14
"""Elements below which one thread does all: starting threads costs more."""

SUBTILES = (4, 2, 1)
"""Tiles of neighbouring rows that one thread takes in turn, most first: whole lines are read together."""


@dataclass(frozen=True)
class Turned:
    """One read that goes through registers.

    name: The input.
    index: What is read of it at the probes of `CpuTiles`.
    bits: Of its elements.
    """

    name: str
    index: Index
    bits: int


@dataclass
class CpuTiles:
    """The tiles of one kernel.

    axes: (first, last) of the result's axes that count as a tile's rows; those behind count as its columns.
    turned: What goes through registers.
    """

    nest: CpuNest
    axes: tuple[int, int]
    turned: list[Turned]

    @classmethod
    def of(cls, nest: CpuNest) -> CpuTiles | None:
        """Return the tiles of a chain with the most axes as rows; None if it has none."""
        shapes = {nest.graph.tile(value).shape for value in nest.graph.outputs}
        reduced = any(node.operator in REDUCTIONS for node in nest.graph.nodes)
        if reduced or nest.scatters or len(shapes) > 1:
            return None
        lasts = range(len(shapes.pop()) - 2, -1, -1)
        for axes in ((first, last) for last in lasts for first in range(last + 1)):
            tiles = cls(nest, axes, [])
            tiles.turned = tiles.along_rows()
            if tiles.turned:
                return tiles
        return None

    def __post_init__(self) -> None:
        nest, (first, last) = self.nest, self.axes
        shape = nest.graph.tile(nest.graph.outputs[0]).shape
        extents = [nest.extent(extent) for extent in shape]
        self.outer, self.group, self.behind = extents[:first], extents[first : last + 1], extents[last + 1 :]
        self.rows, self.columns = (
            nest.extent(product(s)) for s in (shape[first : last + 1], shape[last + 1 :])
        )
        count = product(shape)
        self.serial = isinstance(count, int) and count < SERIAL
        outer = [nest.probe(f"o{axis}", extent) for axis, extent in enumerate(self.outer)]
        self.probes = [*outer, nest.probe("row", self.rows), nest.probe("column", self.columns)]
        """Where reads are looked at: outer axes, row, column."""

    def place(self, outer: Sequence[Expr], row: Expr, column: Expr) -> Index:
        return (*outer, *self.nest.unravelled(row, self.group), *self.nest.unravelled(column, self.behind))

    def along_rows(self) -> list[Turned]:
        """Return the reads whose neighbours along rows, and not along columns, are neighbours in memory."""
        nest = self.nest
        if any(is_zero(nest.values.simplified(tirx.floordiv(e, SIDE))) for e in (self.rows, self.columns)):
            return []  # quotients of open sizes may be known to be small
        *outer, row, column = self.probes
        with nest.values.only_loads():
            reads = self.reads(self.place(outer, row, column))
            nest.values.forget()
            beside = self.reads(self.place(outer, row, column + 1))
            if nest.values.open or len(beside) != len(reads):
                return []  # joins and borders take loops that are cut
        found = []
        for (name, index), other in zip(reads, beside, strict=True):
            size = BYTES.get(stored_type(nest.graph.tile(name).ttype.name), 8)
            address = nest.address(name, index)
            across = nest.values.simplified(nest.address(*other) - address)
            along = uses(address, (row,)) and not uses(nest.values.simplified(address - row), (row,))
            if size in (2, 4) and along and not _small(across):
                found.append(Turned(name, index, 8 * size))
        return found

    def index(self, turned: Turned, place: Sequence[Expr]) -> Index:
        """Return the index of a read where the probes are at a place.

        It is never found by what is read there: on a diagonal, two reads are one.
        """
        placed = [tirx.IntImm("int32", at) if isinstance(at, int) else at for at in place]

        def put(variable: Any) -> Any:
            pairs = zip(self.probes, placed, strict=True)
            return next((at for probe, at in pairs if variable.same_as(probe)), variable)

        mapped = (
            i if isinstance(i, int) else tvm_ffi.structural_map(i, (tirx.Var, put)) for i in turned.index
        )
        return tuple(map(self.nest.values.simplified, mapped))

    def reads(self, place: Index) -> list[tuple[str, Index]]:
        """Return what the results at a place read, in order; call it within `Values.only_loads`."""
        return [read for value in self.nest.graph.outputs for read in self.nest.reads(value, place)]

    # ---- loops ---------------------------------------------------------------------------------------
    def emit(self) -> None:
        """Emit the whole tiles, then what is beside them, element by element."""
        nest = self.nest
        whole = nest.values.simplified(tirx.floordiv(self.rows, SIDE))
        together = next(n for n in SUBTILES if n == 1 or (isinstance(whole, int) and whole % n == 0))
        down = nest.values.simplified(tirx.floordiv(whole, together))
        across = nest.values.simplified(tirx.floordiv(self.columns, SIDE))
        with self.over(down) as (outer, tile):
            squares = [v.scratch(SIDE * SIDE, f"uint{turned.bits}") for turned in self.turned]
            with nest.loop(across) as block:
                for sub in range(together):
                    row = nest.values.simplified(tile * (together * SIDE) + sub * SIDE)
                    self.square(outer, row, block * SIDE, squares)
            self.beside(outer, tile * (together * SIDE), together * SIDE, across * SIDE)
        self.below(whole)

    @contextmanager
    def over(self, rows: Expr) -> Iterator[tuple[list[Expr], Expr]]:
        """Emit a loop over threads; yields the axes outside the rows, and the row."""
        count: Expr = rows
        for extent in self.outer:
            count = count * extent
        with self.nest.rows_over(count, self.serial) as number:
            *outer, row = self.nest.unravelled(number, [*self.outer, rows])
            yield outer, row
        self.nest.values.forget()

    def square(self, outer: Sequence[Expr], row: Expr, column: Expr, squares: Sequence[Any]) -> None:
        """Emit one tile: its reads turned, then its results."""
        nest = self.nest
        for turned, square in zip(self.turned, squares, strict=True):
            vectors = [self.read(turned, outer, row, column + at) for at in range(SIDE)]
            for at, value in enumerate(transposed(vectors)):
                b.store(square, value, v.lanes(at * SIDE, SIDE))
        with nest.loop(SIDE) as at, nest.vector(SIDE) as lane:
            for turned, square in zip(self.turned, squares, strict=True):
                index = self.index(turned, [*outer, row + at, column + lane])
                key = turned.name, tvm_ffi.structural_hash(nest.address(turned.name, index))
                nest.turned[key] = square[at * SIDE + lane]
            place = self.place(outer, row + at, column + lane)
            for value in nest.graph.outputs:
                nest.element(value, place)
        nest.turned.clear()
        nest.values.forget()

    def read(self, turned: Turned, outer: Sequence[Expr], row: Expr, column: Expr) -> Expr:
        """Return ``SIDE`` neighbouring rows of a column, as bits."""
        nest = self.nest
        *index, last = self.index(turned, [*outer, row, column])
        vector = nest.buffers[turned.name][(*index, v.lanes(last, SIDE))]
        return b.bind(T.reinterpret(f"uint{turned.bits}x{SIDE}", vector))

    def beside(self, outer: Sequence[Expr], first: Expr, rows: int, done: Expr) -> None:
        """Emit the columns of some rows that no tile has."""
        nest = self.nest
        rest = nest.values.simplified(self.columns - done)
        if is_zero(rest):
            return
        with nest.loop(rows) as at, nest.loop(rest) as column:
            for value in nest.graph.outputs:
                nest.element(value, self.place(outer, first + at, done + column))
        nest.values.forget()

    def below(self, whole: Expr) -> None:
        """Emit the rows that no tile has."""
        nest = self.nest
        rest = nest.values.simplified(self.rows - whole * SIDE)
        if is_zero(rest):
            return
        with self.over(rest) as (outer, row), nest.loop(self.columns) as column:
            for value in nest.graph.outputs:
                nest.element(value, self.place(outer, whole * SIDE + row, column))


def _small(distance: Expr) -> bool:
    """Tell whether neighbours lie in one place or side by side."""
    return isinstance(distance, int | tirx.IntImm) and int(distance) in (0, 1)


def transposed(vectors: Sequence[Expr]) -> list[Expr]:
    """Return vectors whose element i of number j is element j of the given number i.

    As many rounds of shuffles as the logarithm of their number: each interleaves the first half with the
    second.
    """
    count = len(vectors)
    found, half = list(vectors), count // 2
    riffle = [
        [number // 2 + number % 2 * count for number in range(first, first + count)] for first in (0, count)
    ]
    for _ in range(count.bit_length() - 1):
        pairs = [(found[at], found[at + half]) for at in range(half)]
        found = [b.bind(T.Shuffle(list(pair), indices)) for pair in pairs for indices in riffle]
    return found
