"""Reductions along axes before the last on GPUs: sums over rows of a matrix, means over an image's positions.

A block takes neighbouring columns: a lane reduces a vector of them over every n-th position, so that a warp
reads whole sectors; lanes join what they found by shuffles, then through shared memory. What is reduced may
be made of other reductions of the same columns, as a deviation is of a mean: each of these `Phase` s leaves
its results in shared memory for all lanes. Results of single numbers are stored by the lane that has their
column; those of an element for each position (softmax, norms) by all lanes, which read their positions again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.extents import product
from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.dialect import from_words, words_of
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.indices import Index, is_same
from ladder.lower.chain.nest import BYTES, Reduction, is_zero, uses
from ladder.lower.chain.nested_reductions import is_moved
from schedules.schedule import check

VECTOR_LOADS, SINGLE_LOADS = 4, 8
"""Positions that a lane loads before it reduces them: of vectors, and of single elements."""

HELD_WORDS = 32
"""Registers in which a lane keeps what it read for the first reduction, for the next and for results."""

MOST_WORDS = 12 << 10
"""32-bit words of shared memory that blocks have on every GPU."""


@dataclass(frozen=True)
class Series:
    """Reductions of one column, each of what the next gives, nothing computed between: the outermost first.

    place: Where the outermost one's result is.
    extents: Of the axis of each.
    read: Reductions of the column that it is computed of.
    """

    nodes: tuple[Node, ...]
    place: Index
    extents: tuple[Expr, ...]
    read: frozenset[str]


Phase = Sequence[Series]
"""Reductions over the same positions that one loop makes together."""


class ColumnReductions:
    """The kernel of a chain that reduces along axes before its results' last one.

    Raises ScheduleError if it has another form.
    """

    def __init__(self, nest: GpuNest) -> None:
        self.nest, self.width, self.lanes = nest, nest.mapping.num, nest.mapping.across
        self.threads, self.wave = nest.lanes, nest.dialect.wave
        graph = nest.graph
        shapes = {graph.tile(value).shape for value in graph.outputs}
        shape = next(iter(shapes))
        check(not nest.scatters and bool(shape), "results of columns are numbers, or scattered")
        self.axes = nest.mapping.axes
        self.leading = nest.rows if nest.of_columns else len(shape) - self.axes
        """Axes of results before those of positions."""
        check(nest.of_columns or (len(shapes) == 1 and len(shape) == nest.rows), "results are no columns")
        check(0 < self.axes <= len(shape), "columns have no axis")
        check(all(isinstance(extent, int) for extent in shape[-self.axes :]), "the number of columns is open")
        self.outer = [nest.extent(extent) for extent in shape[: self.leading]]
        self.across = [int(extent) for extent in shape[-self.axes :]]
        self.columns = prod(self.across)
        check(self.columns % self.width == 0, "columns are no whole vectors")
        self.probes = {value: self.positions(value) for value in graph.outputs}
        self.spread = [value for value, at in self.probes.items() if not all(is_zero(each) for each in at)]
        """Results of an element for each position."""
        index = tuple(nest.probe(f"w{axis}", extent) for axis, extent in enumerate(self.outer))
        self.phases = _phases([*self.series(index, nest.probe("w", self.columns)).values()])
        self.warps = self.threads // self.wave
        self.set = self.lanes * self.width
        """Columns of a block."""
        check(self.set <= self.threads, "a block has more columns than threads")
        check(self.words() <= MOST_WORDS, "parts of columns take more shared memory than a block has")
        self.held: dict[Index, list[tuple[Index, Expr | None, dict[Any, Any]]]] = {}
        """Extents of positions -> of each that a lane has: its index, whether it is one, and what is read."""

    # ---- what is reduced -----------------------------------------------------------------------------
    def positions(self, value: str) -> Index:
        """Return what stands for the position of a result along its axes between the outer and the last."""
        extents = [
            self.nest.extent(extent)
            for extent in self.nest.graph.tile(value).shape[self.leading : -self.axes]
        ]
        return tuple(0 if is_same(e, 1) else self.nest.probe(f"m{at}", e) for at, e in enumerate(extents))

    def place(self, row: Index, position: Index, column: Expr) -> Index:
        """Return the index of an element of a column."""
        return (*row, *position, *self.nest.unravelled(column, self.across))

    def series(self, row: Index, column: Expr) -> dict[str, Series]:
        """Return the reductions that results of a column are made of, those that others read first."""
        found: dict[str, Series] = {}
        for value in self.nest.graph.outputs:
            for node, place in self.nest.values.needed(value, self.place(row, self.probes[value], column)):
                self.follow(node, place, column, found)
        check(bool(found), "nothing is reduced")
        return found

    def follow(self, node: Node, place: Index, column: Expr, found: dict[str, Series]) -> None:
        """Add a reduction, after those that it reads and that do not depend on its position."""
        nest, name = self.nest, node.name
        if name in found:
            key = nest.values.key
            check(key(name, found[name].place) == key(name, place), "a reduction is read at several places")
            return
        nodes, extents, probes, read = [node], list[Expr](), list[Any](), set[str]()
        at = place
        while True:
            it = Reduction(nest, nodes[-1], at)
            check(BYTES.get(it.dtype) in (4, 8), "reductions of columns are of 32 or 64 bits")
            extents.append(it.extent)
            probes.append(nest.probe(f"k{len(probes)}", it.extent))
            at = it.at(probes[-1])
            inside = nest.values.needed(it.operand, at)
            along = [one for one in inside if any(uses(part, probes) for part in one[1])]
            for other, other_place in (one for one in inside if one not in along):
                self.follow(other, other_place, column, found)
                read.add(other.name)
            if not along:
                break
            check(len(along) == 1 and len(inside) == 1, "several reductions are reduced together")
            moved = is_moved(nest.graph, it.operand, along[0][0])
            check(
                moved and along[0][0].operator == node.operator, "what is reduced is computed of reductions"
            )
            nodes.append(along[0][0])
            at = along[0][1]
        for own, other in zip(nest.unravelled(column, self.across), at[-self.axes :], strict=True):
            apart = nest.values.simplified(other - own)
            check(isinstance(apart, int) and apart == 0, "a reduction reads other columns than its result's")
        found[name] = Series(tuple(nodes), place, tuple(extents), frozenset(read))

    def words(self) -> int:
        """Return the words of shared memory: parts of each warp, and what they are together."""
        return (self.warps + 1) * self.set * sum(self.slots(phase)[-1] for phase in self.phases)

    def slots(self, phase: Phase) -> list[int]:
        """Return where the words of each series of a phase begin, of one column, and where they end."""
        sizes = [BYTES[self.reduction(one).dtype] // 4 for one in phase]
        return [*accumulate(sizes, initial=0)]

    # ---- the kernel ----------------------------------------------------------------------------------
    def emit(self) -> None:
        nest = self.nest
        vectors = self.columns // self.width
        chunks = -(-vectors // self.lanes)
        blocks = prod(self.outer, start=chunks)
        block, thread = nest.start(blocks, self.threads, self.words())
        rows = self.wave // self.lanes
        lane = b.bind(tirx.floordiv(tirx.floormod(thread, self.wave), rows))
        first = b.bind(tirx.floordiv(thread, self.wave) * rows + tirx.floormod(thread, rows))
        chunk = b.bind(tirx.floormod(block, chunks)) if chunks > 1 else 0
        row = nest.bound_index(tirx.floordiv(block, chunks), self.outer)
        vector = b.bind(tirx.min(chunk * self.lanes + lane, vectors - 1))
        nest.within(vector, vectors)
        columns = [vector * self.width + at for at in range(self.width)]
        every = [self.series(row, column) for column in columns]
        begin = 0
        for number, phase in enumerate(self.phases):
            mine = [[series[one.nodes[0].name] for series in every] for one in phase]
            self.share(mine, self.reduced(mine, first), thread, lane, begin)
            size = self.set * self.slots(phase)[-1]
            whole = begin + self.warps * size
            self.join(phase, thread, begin, whole)
            if number + 1 < len(self.phases) or self.spread:
                nest.dialect.sync()
                self.keep(mine, lane * self.width, whole)
            begin = whole + size
        column = b.bind(chunk * self.set + thread)
        if len(self.spread) < len(self.probes):
            with b.when(tirx.And(thread < self.set, column < self.columns)):
                nest.within(column, self.columns)
                self.finish(row, column, thread)
        for value in self.spread:
            self.spread_result(value, row, columns, first)

    def spread_result(self, value: str, row: Index, columns: Sequence[Expr], first: Expr) -> None:
        """Emit the elements of a result in a lane's vector of columns, at every n-th position."""
        nest, shape = self.nest, self.nest.shape(value)[self.leading : -self.axes]
        dtype = stored_type(nest.graph.tile(value).ttype.name)
        for position, within in self.rounds(shape, first):
            places = [self.place(row, position, column) for column in columns]
            found = nest.elements(value, places)
            with b.where(within), nest.placed(value, places) as target:
                nest.vectors.store(nest.results[value], dtype, target, found)

    def rounds(self, extents: Sequence[Expr], first: Expr) -> Iterator[tuple[Index, Expr | None]]:
        """Emit a lane's loop over positions: yields each and whether it is one; beyond, it is the last one.

        None: it is. So many are unrolled in a turn that loads do not wait for one another; what is read of
        few positions stays in registers.
        """
        nest, count, step = self.nest, prod(extents), self.threads // self.lanes
        if self.holds(count, step):
            key = tuple(extents)
            if key not in self.held:
                numbers = range(0, count, step)
                self.held[key] = [(*self.position(at + first, extents, count, step), {}) for at in numbers]
            nest.vectors.holds = True
            for position, within, words in self.held[key]:
                nest.values.forget()
                nest.vectors.words = words
                yield position, within
            nest.vectors.holds = False
        else:
            loads = loads_of(count, step, VECTOR_LOADS if self.width > 2 else SINGLE_LOADS)
            share = step * loads
            with nest.loop(nest.values.simplified(tirx.floordiv(count + share - 1, share))) as turn:
                for part in range(loads):
                    nest.values.forget()
                    nest.vectors.words = {}
                    yield self.position((turn * loads + part) * step + first, extents, count, share)
        nest.vectors.words = {}
        nest.values.forget()

    def position(
        self, number: Expr, extents: Sequence[Expr], count: Expr, share: int
    ) -> tuple[Index, Expr | None]:
        """Emit the index of a position by its number, of those that lanes take in whole shares."""
        number = b.bind(number)
        if isinstance(count, int) and count % share == 0:
            self.nest.within(number, count)
            return self.nest.bound_index(number, extents), None
        at = b.bind(tirx.min(number, count - 1))
        self.nest.within(at, count)
        return self.nest.bound_index(at, extents), number < count

    def holds(self, count: Expr, step: int) -> bool:
        """Tell whether what a lane reads of all its positions stays in registers for what reads it again."""
        if not isinstance(count, int) or len(self.phases) + len(self.spread) < 2:
            return False
        each = 0
        for node in self.nest.graph.inputs:
            elements = product(node.tile.shape)
            vector = not isinstance(elements, int) or elements >= self.columns
            size = BYTES.get(stored_type(node.tile.ttype.name), 8)
            each += max(1, size * self.width // 4) if vector else 1
        return -(-count // step) * each <= HELD_WORDS

    def reduced(self, mine: Sequence[Sequence[Series]], first: Expr) -> list[b.Variable]:
        """Emit what a lane finds of its vector of columns, one series after the other."""
        nest, lead = self.nest, mine[0][0]
        its = [self.reduction(one) for series in mine for one in series]
        totals = [b.Variable(it.dtype, it.neutral) for it in its]
        for spread, within in self.rounds(lead.extents, first):
            found: list[Expr] = []
            for series in mine:
                inner = [self.innermost(one, spread) for one in series]
                found += nest.elements(series[0].nodes[-1].inputs[0], inner)
            for it, total, value in zip(its, totals, found, strict=True):
                value = value if within is None else T.if_then_else(within, value, it.neutral)
                total.set(it.combine(total.value, value))
        return totals

    def reduction(self, series: Series) -> Reduction:
        return Reduction(self.nest, series.nodes[0], series.place)

    def innermost(self, series: Series, positions: Index) -> Index:
        """Return where the innermost operand is read."""
        at = series.place
        for number, (node, position) in enumerate(zip(series.nodes, positions, strict=True)):
            it = Reduction(self.nest, node, at)
            at = it.at(position)
            if number + 1 < len(series.nodes):
                ((_, at),) = self.nest.values.needed(it.operand, at)
        return at

    def share(
        self,
        mine: Sequence[Sequence[Series]],
        totals: Sequence[b.Variable],
        thread: Expr,
        lane: Expr,
        begin: int,
    ) -> None:
        """Emit what the lanes of a warp found together, one set per warp in shared memory."""
        nest, rows = self.nest, self.wave // self.lanes
        its = [self.reduction(one) for series in mine for one in series]
        found = [b.bind(total.value) for total in totals]
        distance = 1
        while distance < rows:
            moved = [nest.moved(value, it.dtype, distance) for it, value in zip(its, found, strict=True)]
            found = [b.bind(it.combine(*pair)) for it, *pair in zip(its, found, moved, strict=True)]
            distance *= 2
        warp = tirx.floordiv(thread, self.wave)
        *slots, size = self.slots([series[0] for series in mine])
        with b.when(tirx.floormod(thread, rows) == 0):
            for at, (it, value) in enumerate(zip(its, found, strict=True)):
                number, column = divmod(at, self.width)
                place = begin + (warp * size + slots[number]) * self.set + lane * self.width + column
                self.store(it, value, place)
        nest.dialect.sync()

    def join(self, phase: Phase, thread: Expr, begin: int, whole: int) -> None:
        """Emit what all warps found of a column, for each column by one lane, from ``whole`` on."""
        *slots, size = self.slots(phase)
        with b.when(thread < self.set):
            for slot, one in zip(slots, phase, strict=True):
                it = self.reduction(one)
                places = [begin + (warp * size + slot) * self.set + thread for warp in range(self.warps)]
                total, *others = (self.number(it, place) for place in places)
                for other in others:
                    total = b.bind(it.combine(total, other))
                self.store(it, total, whole + slot * self.set + thread)

    def store(self, it: Reduction, value: Expr, place: Expr) -> None:
        """Emit that a number of a column is left in shared memory, a set of columns for each word."""
        for at, word in enumerate(words_of(value, it.dtype)):
            b.store(self.nest.dialect.shared, word, place + at * self.set)

    def number(self, it: Reduction, place: Expr) -> Expr:
        """Return a number of a column that `store` left in shared memory."""
        words = range(BYTES[it.dtype] // 4)
        return from_words([self.nest.dialect.shared[place + at * self.set] for at in words], it.dtype)

    def keep(self, mine: Sequence[Sequence[Series]], column: Expr, whole: int) -> None:
        """Let what is reduced next read a phase's results of a lane's columns."""
        for slot, series in zip(self.slots([each[0] for each in mine]), mine, strict=False):
            for at, one in enumerate(series):
                total = self.number(self.reduction(one), whole + slot * self.set + column + at)
                self.nest.keep_cell(one.nodes[0], one.place, b.bind(total))

    def finish(self, row: Index, column: Expr, thread: Expr) -> None:
        """Emit numbers that are computed of all reductions of a column, by the lane that joined them."""
        found, whole = self.series(row, column), 0
        for phase in self.phases:
            *slots, size = self.slots(phase)
            whole += self.warps * self.set * size
            for slot, one in zip(slots, phase, strict=True):
                series = found[one.nodes[0].name]
                total = self.number(self.reduction(series), whole + slot * self.set + thread)
                self.nest.keep_cell(series.nodes[0], series.place, b.bind(total))
            whole += self.set * size
        for value, position in self.probes.items():
            if value not in self.spread:
                self.nest.store_vector(value, [self.place(row, position, column)])


def loads_of(count: Expr, step: int, most: int) -> int:
    """Return the loads of a turn: as few as take no turn more, where the number of positions is known."""
    if not isinstance(count, int):
        return most
    each = -(-count // step)
    return max(1, -(-each // -(-each // most)))


def _phases(found: Sequence[Series]) -> list[list[Series]]:
    """Return reductions in groups that one loop makes: of the same positions, and none made of another."""
    phases: list[list[Series]] = []
    for one in found:
        last = phases[-1] if phases else []
        if last and _alike(last[0], one) and not any(other.nodes[0].name in one.read for other in last):
            last.append(one)
        else:
            phases.append([one])
    return phases


def _alike(one: Series, other: Series) -> bool:
    """Tell whether two series reduce the same numbers of positions, axis by axis."""
    pairs = zip(one.extents, other.extents, strict=False)
    return len(one.extents) == len(other.extents) and all(is_same(*pair) for pair in pairs)
