"""The loop nest of a chain on GPUs, as its `Mapping` says and a `Dialect` spells it.

Threads alone take vectors of neighbouring elements of any row. Lanes that share a row hold its vectors in
registers from the first reduction to the last result where it fits, else read it again; reductions end in
shuffles, then in shared memory. What lies in memory along another axis than the result goes through shared
memory (`exchange`). Reductions of a few elements (windows) run in one thread each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import reduce
from typing import Any

from tvm import ir, tirx
from tvm.script import tirx as T

from ladder.ir.extents import product
from ladder.ir.graph import Node
from ladder.lower import builder as b
from ladder.lower.chain.dialect import Dialect
from ladder.lower.chain.indices import Index
from ladder.lower.chain.means import Means
from ladder.lower.chain.nest import BYTES, Nest, Reduction, uses
from ladder.lower.chain.puts import Chain
from ladder.lower.chain.stencils import reduce_vectors, stencil_width
from ladder.lower.chain.values import stored_type
from ladder.lower.chain.vectors import WIDE, Vectors
from ladder.movement.mapping import Mapping
from ladder.partition.rows import REDUCTIONS
from schedules.schedule import check

Expr = Any
Piece = tuple[str, int, int, Expr, Expr]
"""(result, trailing axes that count as one, width, start, stop)."""

SLOTS = 32
"""Reductions over a block that one kernel can hold; each has its own place, so one barrier is enough."""


class GpuNest(Nest):
    """One kernel being emitted.

    Parameters
    ----------
    chain
        What it computes.
    dialect
        How the GPU's kernels are written.
    mapping
        How it lies over the GPU.
    cheap
        Whether functions may be approximate, see `ladder.lower.chain.approximate`.
    """

    def __init__(self, chain: Chain, dialect: Dialect, mapping: Mapping, cheap: bool = False) -> None:
        super().__init__(chain, align=WIDE)
        graph, self.dialect = self.graph, dialect
        self.mapping, self.lanes = mapping, mapping.lanes
        self.vectors = Vectors(dialect, graph, self.values, self.buffers, self.address)
        self.values.lowerings = {**dialect.functions, **(dialect.cheap if cheap else {})}
        self.values.rounded = lambda value, kind: dialect.rounded_through(value, kind, self.values.named)
        self.alone = False
        widths = {stencil_width(graph, value) for value in graph.outputs if graph.tile(value).shape}
        self.stencil_width = widths.pop() if self.lanes == 1 and len(widths) == 1 else 1
        """Neighbouring elements of the results of windows that a thread has."""
        self.kept = _kept
        tiles = {node.name: node.tile for node in graph.inputs}
        self.values.zeroed = {n for n, t in tiles.items() if BYTES.get(stored_type(t.ttype.name)) in (2, 4)}
        self.values.clamped |= self.values.dependents(tiles.keys() - self.values.zeroed)
        self.slot = 0
        self.later: list[tuple[Expr | None, Callable[[], None]]] | None = None
        """Stores that wait until a thread has read all of its vectors."""
        self.valid: Expr | None = None
        """Whether the vector that is made now is to be stored; None: it is."""
        self.turns: dict[Any, list[tuple[Expr, Expr | None]]] = {}
        self.before_row: Callable[[Index], None] = lambda index: None
        """Called with each row's index once it is known."""

    def register(self, value: Expr) -> Expr:
        return _kept(value)

    def load(self, name: str, index: Index) -> Expr:
        return self.vectors.load(name, index)

    def emit(self) -> None:
        """Emit the whole kernel."""
        self.count = known(self.extent(product(self.graph.tile(self.graph.outputs[0]).shape[: self.rows])))
        if self.mapping.tile[0]:
            from ladder.lower.chain.exchange import emit_tiles

            emit_tiles(self)
        elif self.lanes == 1:
            self.emit_vectors()
        elif (means := Means.of(self)) is not None:
            means.emit()
        else:
            self.emit_rows()

    def start(self, blocks: Expr, threads: int, words: int = 0) -> tuple[Expr, Expr]:
        """Begin the device's part; returns the block's and the thread's number.

        Parameters
        ----------
        words
            32-bit words of shared memory.
        """
        block, self.thread = self.dialect.start(blocks, threads, words)
        return block, self.thread

    # what lies in vectors ----------------------------------------------------------------------------
    def layout(self, value: str) -> tuple[int, int]:
        """Return (trailing axes that count as one, width) with the fewest memory instructions per element."""
        shape = self.graph.tile(value).shape
        dtype = stored_type(self.graph.tile(value).ttype.name)
        best, cost = (1, 1), float("inf")
        widths = [WIDE // BYTES.get(dtype, 16) >> k for k in range(4)]
        if value in self.puts:  # rows that are put lie apart
            widths = [w for w in widths if w > 1 and isinstance(shape[-1], int) and shape[-1] % w == 0]
        axes = self.rows if self.lanes > 1 else 0
        most = 1 if self.mapping.spread > 1 else len(shape) - axes
        for merged in range(most, 0, -1):
            trailing = product(shape[len(shape) - merged :])
            for width in [w for w in widths if w > 1]:
                if isinstance(trailing, int) and trailing % width == 0:
                    found = self.instructions(value, merged, width)
                    if found < cost:
                        best, cost = (merged, width), found
        if best == (1, 1):  # no vectors, but fewer positions to work out
            while best[0] < most and self.lie_together([value], best[0] + 1):
                best = (best[0] + 1, 1)
        return best

    def instructions(self, value: str, merged: int, width: int) -> float:
        """Return the memory instructions per element if vectors run along the last ``merged`` axes."""
        shape = self.graph.tile(value).shape
        extents = [self.extent(extent) for extent in shape]
        outer = tuple(self.probe(f"o{axis}", extent) for axis, extent in enumerate(extents[:-merged]))
        chunk = self.probe("chunk", self.extent(product(shape[-merged:])) // width)
        reads: list[list[tuple[str, Expr]]] = []
        with self.values.only_loads():
            for lane in range(width):
                index = (*outer, *self.unravelled(chunk * width + lane, extents[-merged:]))
                reads.append([(name, self.address(name, at)) for name, at in self.reads(value, index)])
                self.values.forget()
            crossed = merged > 1 and any(uses(part, (chunk,)) for c in self.values.open for part in c)
        if crossed or len({len(row) for row in reads}) > 1:
            return float("inf")
        total = 1.0
        for column in zip(*reads, strict=True):
            name, base = column[0]
            steps = [self.values.simplified(at - base) for _, at in column]
            along = all(step == lane for lane, step in enumerate(steps))
            if all(step == 0 for step in steps) or (along and self.vectors.is_aligned(name, base, width)):
                total += 1
            else:
                total += width
        return total / width

    @contextmanager
    def scalars(self) -> Iterator[None]:
        """Load no vectors meanwhile: what is made is only looked at."""
        width, self.vectors.width = self.vectors.width, 1
        yield
        self.vectors.width = width

    # threads alone -----------------------------------------------------------------------------------
    def emit_vectors(self) -> None:
        """Emit one vector per thread, for every result and every piece of its columns."""
        self.alone = True
        plans = [plan for value in self.graph.outputs for plan in self.pieces(value)]
        counts = [known(self.items(*plan)) for plan in plans]
        most: Expr = counts[0]
        for count in counts[1:]:
            both = isinstance(most, int) and isinstance(count, int)
            most = max(most, count) if both else tirx.max(most, count)
        threads, turns = self.mapping.threads, max(1, self.mapping.num)
        share = threads * turns
        block, thread = self.start(tirx.floordiv(most + share - 1, share), threads)
        first = b.bind(block * share + thread)
        groups = [
            (count, [p for p, c in zip(plans, counts, strict=True) if same(c, count)]) for count in counts
        ]
        for at, (count, together) in enumerate(groups):
            if any(same(count, other) for other, _ in groups[:at]):
                continue
            whole = isinstance(count, int) and same(count, most) and count % share == 0
            with nullcontext() if whole or turns > 1 else b.when(first < count):
                self.flat_items(first, turns, None if whole or turns == 1 else count, together)
            self.values.forget()
            self.values.cells.clear()

    def flat_items(self, first: Expr, turns: int, count: Expr | None, plans: Sequence[Piece]) -> None:
        """Emit the vectors that a thread has of pieces with equally many; what it reads, it reads once.

        Parameters
        ----------
        first
            Its first vector.
        turns
            How many it has; they are stored after all are read.
        count
            How many there are, if some of a thread's may lie beyond: it reads the last one then.
        """
        self.later = []
        for turn in range(turns):
            item = b.bind(first + turn * self.mapping.threads) if turns > 1 else first
            self.valid = None if count is None else item < count
            item = item if count is None else b.bind(tirx.min(item, count - 1))
            self.places: dict[Any, tuple[Expr, Index]] = {}
            for plan in plans:
                self.flat_item(item, *plan)
            self.vectors.words.clear()
        for valid, store in self.later or ():
            with self.where(valid):
                store()
        self.later = None

    def pieces(self, value: str) -> list[Piece]:
        """Return the pieces of a result's last axis; a number has one."""
        shape = [self.extent(extent) for extent in self.graph.tile(value).shape]
        if not self.has_columns(value):
            return [(value, 1, 1, 0, 1)]
        if self.reductions() and len(shape) == self.rows:
            return [(value, 1, self.stencil_width, 0, shape[-1])]
        merged, width = (1, 1) if self.reductions() else self.layout(value)
        if merged > 1:
            return [(value, merged, width, 0, self.extent(product(self.graph.tile(value).shape[-merged:])))]
        probes = tuple(self.probe(f"p{axis}", extent) for axis, extent in enumerate(shape))
        cuts = self.cuts(value, probes, probes[-1], shape[-1])
        whole = all(isinstance(e, int) and e % width == 0 for piece in cuts for e in piece)
        return [(value, 1, width if whole else 1, start, stop) for start, stop in cuts]

    def items(self, value: str, merged: int, width: int, start: Expr, stop: Expr) -> Expr:
        """Return how many vectors a piece has over all rows."""
        shape = self.graph.tile(value).shape
        if not self.has_columns(value):
            return self.count
        return self.extent(product(shape[:-merged])) * tirx.floordiv(stop - start, width)

    def has_columns(self, value: str) -> bool:
        shape = self.graph.tile(value).shape
        alone = bool(self.reductions()) and len(shape) == self.rows and self.stencil_width == 1
        return bool(shape) and not alone

    def reductions(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.operator in REDUCTIONS]

    def flat_item(self, item: Expr, value: str, merged: int, width: int, start: Expr, stop: Expr) -> None:
        """Emit the vector that a thread has."""
        shape = [self.extent(extent) for extent in self.graph.tile(value).shape]
        if not self.has_columns(value):
            self.store_vector(value, [self.unravelled(item, shape)])
            return
        chunks = known(self.values.simplified(tirx.floordiv(stop - start, width)))
        key = (str(chunks), *map(str, shape[:-merged]))
        if key not in self.places:
            chunk = b.bind(self.values.simplified(tirx.floormod(item, chunks)))
            self.within(chunk, chunks)
            row = b.bind(self.values.simplified(tirx.floordiv(item, chunks)))
            self.places[key] = chunk, self.outer_index(row, shape[:-merged])
        chunk, outer = self.places[key]
        self.vector(value, outer, start + chunk * width, width)

    def outer_index(self, row: Expr, extents: Sequence[Expr]) -> Index:
        """Return a row's position along each axis, as the mapping orders rows."""
        spread = self.mapping.spread
        if spread == 1:
            return self.bound_index(row, extents)
        check(len(extents) > 1 and int(extents[-2]) % spread == 0, "rows alternate over no axis")
        whole = tirx.floordiv(extents[-2], spread)
        *front, high, last, low = self.bound_index(row, [*extents[:-2], whole, extents[-1], spread])
        return (*front, self.values.simplified(high * spread + low), last)

    def within(self, variable: Expr, extent: Expr) -> None:
        """Tell the analyzer the range of a variable, if it is one."""
        if not isinstance(variable, int | tirx.IntImm):
            self.values.analyzer.bind(variable, ir.Range(0, extent), True)

    def bound_index(self, flat: Expr, extents: Sequence[Expr]) -> Index:
        """Return the position along each axis in registers, with their ranges known."""
        index = tuple(b.bind(part) for part in self.unravelled(flat, extents))
        for part, extent in zip(index, extents, strict=True):
            self.within(part, extent)
        return index

    def vector(self, value: str, outer: Index, column: Expr, width: int) -> None:
        """Emit ``width`` neighbouring elements of a result."""
        trailing = [self.extent(extent) for extent in self.graph.tile(value).shape[len(outer) :]]
        places = [(*outer, *self.unravelled(column + lane, trailing)) for lane in range(width)]

        def body() -> None:
            self.vectors.width = width
            words = self.vectors.words
            self.vectors.words = dict(words) if self.values.assumed else words
            self.store_vector(value, places)
            self.vectors.width, self.vectors.words = 1, words

        if width == 1 or self.decided_alike(value, places):
            body()
            return
        self.branched(value, places[0], (), body)  # nothing is loaded while conditions are looked for

    def decided_alike(self, value: str, places: Sequence[Index]) -> bool:
        """Tell whether joins and borders depend on nothing in which a vector's elements differ.

        Its loads then have conditions of their own; else there is a branch around the whole.
        """
        if any(node.operator in REDUCTIONS for node in self.graph.nodes):
            return False
        found = []
        for place in (places[0], places[-1]):
            with self.values.only_loads():
                self.reads(value, place)
                found.append([self.values.key("below", comparison) for comparison in self.values.open])
        return found[0] == found[1]

    def store_vector(self, value: str, places: Sequence[Index]) -> None:
        """Compute elements and store them, in wide accesses."""
        found = []
        if len(places) > 1 and self.stencil_width > 1:
            reduce_vectors(self, value, places)
        for lane, place in enumerate(places):
            self.vectors.lane = lane
            self.prepare(value, place, ())
            with self.values.keeping(_kept):
                found.append(self.values.at(value, place))
        self.vectors.lane = 0
        dtype = stored_type(self.graph.tile(value).ttype.name)

        def store() -> None:
            with self.placed(value, places) as target:
                self.vectors.store(self.results[value], dtype, target, found)

        if self.later is not None and not self.values.assumed:
            self.later.append((self.valid, store))
            return
        with self.where(self.valid):
            store()

    # rows --------------------------------------------------------------------------------------------
    def emit_rows(self) -> None:
        """Emit a row per team of lanes."""
        teams = self.mapping.teams
        wave = self.dialect.wave
        words = SLOTS * wave if self.lanes > wave else 0
        check(teams == 1 or not words, "rows of several warps share no block: they meet at its barrier")
        blocks = tirx.floordiv(self.count + teams - 1, teams)
        block, thread = self.start(blocks, teams * self.lanes, words)
        self.lane = b.bind(tirx.floormod(thread, self.lanes)) if teams > 1 else thread
        row = b.bind(block * teams + tirx.floordiv(thread, self.lanes)) if teams > 1 else block
        if not (isinstance(self.count, int) and self.count % teams == 0):
            # Teams beyond the last row work on it too and store nothing: teams of a wave exchange together.
            self.valid, row = b.bind(row < self.count), b.bind(tirx.min(row, self.count - 1))
        self.row(row)

    def row(self, row: Expr) -> None:
        """Emit every result of a row."""
        self.within(row, self.count)
        index = self.bound_index(row, self.row_extents())
        self.before_row(index)
        layouts = {value: self.row_layout(value) for value in self.graph.outputs}
        for value, (width, cuts) in layouts.items():
            self.row_result(value, index, width, cuts)
            if not self.mapping.num:
                self.values.forget()

    def row_layout(self, value: str) -> tuple[int, list[tuple[Expr, Expr]]]:
        """Return the width and the pieces of a result's last column axis."""
        columns = self.columns(value)
        if not columns:
            return self.width(), []
        place = tuple(self.probe(f"q{axis}", e) for axis, e in enumerate(self.shape(value)))
        cuts = self.cuts(value, place, place[-1], columns[-1])
        width = self.width()
        whole = all(isinstance(e, int) and e % width == 0 for piece in cuts for e in piece)
        return (width if whole else 1), cuts

    def shape(self, value: str) -> list[Expr]:
        """Return a value's extents as expressions."""
        return [self.extent(extent) for extent in self.graph.tile(value).shape]

    def width(self) -> int:
        """Return the columns that a lane takes at once: 16 bytes of the narrowest result."""
        tiles = [self.graph.tile(value) for value in self.graph.outputs]
        tiles = [tile for tile in tiles if len(tile.shape) > self.rows]
        widths = [WIDE // BYTES.get(stored_type(tile.ttype.name), WIDE) for tile in tiles]
        width = min(8, max(widths, default=1))
        while width > 1 and any(not isinstance(t.shape[-1], int) or t.shape[-1] % width for t in tiles):
            width //= 2
        return width

    def row_result(self, value: str, row: Index, width: int, cuts: Sequence[tuple[Expr, Expr]]) -> None:
        """Emit one result: its reductions by all lanes, then its columns."""
        columns = self.columns(value)
        probes = tuple(self.probe(f"c{axis}", extent) for axis, extent in enumerate(columns))
        self.prepare(value, (*row, *probes), probes)
        if not columns:
            self.alone = True
            with b.when(self.lane == 0):
                self.store_vector(value, [row])
            self.alone = False
            return
        for start, stop in cuts:
            self.column_piece(value, row, columns, start, stop, width)

    def column_piece(
        self, value: str, row: Index, columns: Sequence[Expr], start: Expr, stop: Expr, width: int
    ) -> None:
        """Emit a piece of the columns: vectors go round the lanes."""
        chunks = self.values.simplified(tirx.floordiv(stop - start, width))
        items = chunks
        for extent in columns[:-1]:
            items = items * extent

        def item(number: Expr, valid: Expr | None) -> None:
            self.alone = True
            column = start + self.values.simplified(tirx.floormod(number, chunks)) * width
            outer = self.unravelled(self.values.simplified(tirx.floordiv(number, chunks)), columns[:-1])
            if self.mapping.num:
                places = [(*row, *outer, column + lane) for lane in range(width)]
                found = self.elements(value, places)
                dtype = stored_type(self.graph.tile(value).ttype.name)
                with self.where(valid, self.valid), self.placed(value, places) as target:
                    self.vectors.store(self.results[value], dtype, target, found)
            else:
                self.vector(value, (*row, *outer), column, width)
                self.vectors.words.clear()
            self.alone = False

        self.round_lanes(items, item)

    @staticmethod
    def where(*conditions: Expr | None) -> AbstractContextManager[None]:
        """Emit a branch around what follows, for conditions of which some may be None: true."""
        found = [condition for condition in conditions if condition is not None]
        return b.when(reduce(tirx.And, found)) if found else nullcontext()

    def elements(self, value: str, places: Sequence[Index]) -> list[Expr]:
        """Return neighbouring elements, as vectors."""
        self.vectors.width = len(places)
        found = []
        for lane, place in enumerate(places):
            self.vectors.lane = lane
            with self.values.keeping(_kept):
                found.append(self.values.at(value, place))
        self.vectors.lane, self.vectors.width = 0, 1
        return found

    def round_lanes(self, items: Expr, body: Callable[[Expr, Expr | None], None]) -> None:
        """Emit ``body(item, valid)`` for every item, lane by lane in turns.

        Rows in registers take their turns unrolled: beyond the last item a lane has it again, and is not
        valid. Others take them in a loop.
        """
        items = self.values.simplified(items)
        if self.mapping.num:
            for number, valid in self.unrolled(items):
                body(number, valid)
            return
        turns = self.values.simplified(tirx.floordiv(items + self.lanes - 1, self.lanes))
        with b.loop(turns) as turn:
            number = b.bind(turn * self.lanes + self.lane)
            self.values.analyzer.bind(number, ir.Range(0, items), True)
            with b.when(number < items):
                body(number, None)
                self.values.forget()

    def unrolled(self, items: Expr) -> list[tuple[Expr, Expr | None]]:
        """Return (item, whether it is valid) of each turn; the same expressions each time."""
        count = int(items)
        if count not in self.turns:
            self.turns[count] = [self.turn(count, first) for first in range(0, count, self.lanes)]
        return self.turns[count]

    def turn(self, items: int, first: int) -> tuple[Expr, Expr | None]:
        number, whole = first + self.lane, first + self.lanes <= items
        number = b.bind(number if whole else tirx.min(number, items - 1))
        self.within(number, items)
        return number, None if whole else first + self.lane < items

    # reductions --------------------------------------------------------------------------------------
    def reduce(self, node: Node, index: Index) -> None:
        """Emit a reduction: by the row's lanes together, or within one thread's work by it alone."""
        it = Reduction(self, node, index)
        probe = self.probe("k", it.extent)
        with self.scalars():
            self.prepare(it.operand, it.at(probe), (probe,))
            nested = bool(self.values.needed(it.operand, it.at(probe)))
        together = not self.alone
        last = it.axis == len(self.graph.tile(it.operand).shape) - 1
        width = self.width() if together and last and not nested else 1
        width = width if isinstance(it.extent, int) and it.extent % width == 0 else 1
        total = b.Variable(it.dtype, it.neutral)
        if together and self.mapping.num and not nested:
            self.reduce_held(it, total, width)
        elif together:
            self.values.forget()
            self.round_lanes(
                tirx.floordiv(it.extent, width),
                lambda number, valid: self.accumulate(it, total, number * width, width),
            )
            self.values.forget()
        else:
            before = self.vectors.width, self.vectors.lane, self.vectors.words
            self.vectors.width, self.vectors.lane, self.vectors.words = 1, 0, {}
            self.values.forget()
            with b.loop(it.extent) as position, self.ranged(position, it.extent):
                self.accumulate(it, total, position, 1)
            self.values.forget()
            self.vectors.width, self.vectors.lane, self.vectors.words = before
        self.keep_cell(node, index, self.over_lanes(it, total.value) if together else b.bind(total.value))

    def accumulate(self, it: Reduction, total: b.Variable, position: Expr, width: int) -> None:
        """Emit the sum of a vector of the operand, by a thread alone."""
        together, self.alone = not self.alone, True
        self.vectors.words.clear()
        self.vectors.width = width
        for lane in range(width):
            self.vectors.lane = lane
            place = it.at(position + lane)
            self.prepare(it.operand, place, ())
            with self.values.keeping(_kept):
                value = self.values.at(it.operand, place)
            total.set(it.combine(total.value, value))
        self.vectors.lane, self.vectors.width = 0, 1
        self.alone = not together

    def reduce_held(self, it: Reduction, total: b.Variable, width: int) -> None:
        """Emit the loads of all turns, then their sums; what is summed stays in registers."""
        turns = self.unrolled(self.values.simplified(tirx.floordiv(it.extent, width)))
        places = [[it.at(number * width + lane) for lane in range(width)] for number, _ in turns]
        found = [self.elements(it.operand, row) for row in places]
        for (_, valid), row, values in zip(turns, places, found, strict=True):
            for place, value in zip(row, values, strict=True):
                kept = b.Variable(it.dtype, value).value
                key = self.values.key(it.operand, tuple(map(self.values.simplified, place)))
                self.values.memory[key] = kept
                kept = kept if valid is None else T.if_then_else(valid, kept, it.neutral)
                total.set(it.combine(total.value, kept))

    def over_lanes(self, it: Reduction, value: Expr) -> Expr:
        """Return what all lanes of a row found, on each of them."""
        wave, shared = self.dialect.wave, self.dialect.shared
        value = self.exchanged(it, value, min(self.lanes, wave))
        warps = self.lanes // wave
        if warps <= 1:
            return value
        check(self.slot < SLOTS, f"a chain of more than {SLOTS} reductions over a block")
        place, self.slot = self.slot * wave, self.slot + 1
        with b.when(tirx.floormod(self.lane, wave) == 0):
            b.store(shared, T.reinterpret("uint32", value), place + tirx.floordiv(self.lane, wave))
        self.dialect.sync()
        read = b.bind(T.reinterpret(it.dtype, shared[place + tirx.floormod(self.lane, warps)]))
        return self.exchanged(it, read, warps)

    def exchanged(self, it: Reduction, value: Expr, lanes: int) -> Expr:
        """Return the combination of ``lanes`` neighbouring lanes, a power of two, on each of them."""
        value, distance = b.bind(value), 1
        while distance < lanes:
            other = self.dialect.exchange(value, distance, self.thread)
            value = b.bind(it.combine(value, other))
            distance *= 2
        return value


def known(expression: Expr) -> Expr:
    """Return a constant as a Python number."""
    return int(expression) if isinstance(expression, tirx.IntImm) else expression


def same(a: Expr, b: Expr) -> bool:
    """Tell whether two extents are the same."""
    return bool(a == b) if isinstance(a, int) and isinstance(b, int) else a is b


def _kept(value: Expr) -> Expr:
    """Return a value in a register of its own."""
    return b.Variable(str(value.ty.dtype), value).value
