"""Chains whose rows belong to teams of lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import tirx

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.combining import storing
from ladder.lower.chain.gpu_nest import SLOTS, GpuNest
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import uses
from schedules.schedule import check


class RowLoops:
    """The rows of a kernel, a team of lanes each."""

    def __init__(self, nest: GpuNest) -> None:
        self.nest = nest

    def emit(self) -> None:
        """Emit a row per team of lanes."""
        teams = self.nest.mapping.teams
        wave = self.nest.dialect.wave
        words = SLOTS * wave if self.nest.lanes > wave else 0
        check(teams == 1 or not words, "rows of several warps share no block: they meet at its barrier")
        blocks = tirx.floordiv(self.nest.count + teams - 1, teams)
        self.team(*self.nest.start(blocks, teams * self.nest.lanes, words))

    def team(self, block: Expr, thread: Expr) -> None:
        """Emit the row of a thread's team.

        block: Number of the block among those of these rows.
        """
        teams = self.nest.mapping.teams
        self.nest.lane = b.bind(tirx.floormod(thread, self.nest.lanes)) if teams > 1 else thread
        row = b.bind(block * teams + tirx.floordiv(thread, self.nest.lanes)) if teams > 1 else block
        if not (isinstance(self.nest.count, int) and self.nest.count % teams == 0):
            # Teams beyond the last row work on it too and store nothing: teams of a wave exchange together.
            self.nest.valid, row = b.bind(row < self.nest.count), b.bind(tirx.min(row, self.nest.count - 1))
        self.row(row)

    def row(self, row: Expr, before: Callable[[Index], None] = lambda index: None) -> None:
        """Emit every result of a row; calls ``before(index)`` first."""
        self.nest.within(row, self.nest.count)
        index = self.nest.bound_index(row, self.nest.row_extents())
        before(index)
        layouts = {value: self.row_layout(value) for value in self.nest.graph.outputs}
        if self.may_load_first():
            for value, (width, cuts) in layouts.items():
                self.load_first(value, index, width, cuts)
        for value, (width, cuts) in layouts.items():
            self.row_result(value, index, width, cuts)
            if not self.nest.mapping.num:
                self.nest.values.forget()

    def row_layout(self, value: str) -> tuple[int, list[tuple[Expr, Expr]]]:
        """Return the width and the pieces of a result's last column axis."""
        columns = self.nest.columns(value)
        if not columns:
            return self.nest.width(), []
        place = tuple(self.nest.probe(f"q{axis}", e) for axis, e in enumerate(self.nest.shape(value)))
        cuts = self.nest.cuts(value, place, place[-1], columns[-1])
        width = self.nest.width()
        whole = all(isinstance(e, int) and e % width == 0 for piece in cuts for e in piece)
        return (width if whole else 1), cuts

    def row_result(self, value: str, row: Index, width: int, cuts: Sequence[tuple[Expr, Expr]]) -> None:
        """Emit one result: its reductions by all lanes, then its columns."""
        columns = self.nest.columns(value)
        probes = tuple(self.nest.probe(f"c{axis}", extent) for axis, extent in enumerate(columns))
        self.nest.prepare(value, (*row, *probes), probes)
        if not columns:
            nest, valid = self.nest, self.nest.valid
            first = nest.lane == 0
            nest.alone, nest.valid = True, first if valid is None else tirx.And(valid, first)
            nest.store_vector(value, [row])  # all lanes compute it: other results may read it
            nest.alone, nest.valid = False, valid
            return
        for start, stop in cuts:
            self.column_piece(value, row, start, stop, width)

    def may_load_first(self) -> bool:
        """Whether blocks are few: then registers are plenty, and nothing hides the latency of late loads."""
        count, mapping = self.nest.count, self.nest.mapping
        few = isinstance(count, int) and count <= mapping.teams * self.nest.dialect.device.units
        return few and bool(mapping.num)

    def load_first(self, value: str, row: Index, width: int, cuts: Sequence[tuple[Expr, Expr]]) -> None:
        """Load what a result reads into registers before reductions, at whose barriers it would wait."""
        nest = self.nest
        for start, stop in cuts:
            for number, _ in nest.unrolled(self.items(value, start, stop, width)):
                place = self.place(value, row, start, stop, width, number)
                with nest.values.only_loads():
                    reads = nest.reads(value, place)
                    decided = not nest.values.open
                nest.vectors.width = width
                stand_ins = [*nest.values.stand_ins.values()]
                for name, index in reads if decided else ():
                    if not any(uses(part, stand_ins) for part in index):
                        nest.vectors.load(name, index)
                nest.vectors.width = 1

    def column_piece(self, value: str, row: Index, start: Expr, stop: Expr, width: int) -> None:
        """Emit a piece of the columns: vectors go round the lanes."""

        def item(number: Expr, valid: Expr | None) -> None:
            self.nest.alone = True
            *front, column = self.place(value, row, start, stop, width, number)
            if self.nest.mapping.num:
                places = [(*front, column + lane) for lane in range(width)]
                found = self.nest.elements(value, places)
                store = storing(self.nest, value, places, found)
                with b.where(valid, self.nest.valid):
                    store()
            else:
                self.nest.vector(value, tuple(front), column, width)
                self.nest.vectors.words.clear()
            self.nest.alone = False

        self.nest.round_lanes(self.items(value, start, stop, width), width, item)

    def items(self, value: str, start: Expr, stop: Expr, width: int) -> Expr:
        """Return the vectors of a piece of the columns."""
        items = self.nest.values.simplified(tirx.floordiv(stop - start, width))
        for extent in self.nest.columns(value)[:-1]:
            items = items * extent
        return self.nest.values.simplified(items)

    def place(self, value: str, row: Index, start: Expr, stop: Expr, width: int, number: Expr) -> Index:
        """Return the index of the first element of a vector of a piece of the columns."""
        simplified, columns = self.nest.values.simplified, self.nest.columns(value)
        chunks = simplified(tirx.floordiv(stop - start, width))
        column = start + simplified(tirx.floormod(number, chunks)) * width
        return (*row, *self.nest.unravelled(simplified(tirx.floordiv(number, chunks)), columns[:-1]), column)
