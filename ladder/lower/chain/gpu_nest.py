"""Elements, vectors and reductions of chains on GPUs, as a `Dialect` spells them.

Lanes that share a row hold its vectors in registers from the first reduction to the last result where it
fits, else read it again; reductions end in shuffles, then in shared memory. Reductions of a few elements
(windows) run in one thread each.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir import scalars
from ladder.ir.extents import product
from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.approximation import approximable
from ladder.lower.chain.bins import Bins
from ladder.lower.chain.clamping import clamped_axes
from ladder.lower.chain.combining import storing
from ladder.lower.chain.dialect import Dialect, Early, from_words, words_of
from ladder.lower.chain.divisions import (
    by_number,
    divisions_by_numbers,
    divisions_of_rows,
    divisions_of_shares,
    quotient,
)
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.exact_products import is_exact_product
from ladder.lower.chain.gathers import reads_rows
from ladder.lower.chain.indices import Index, variables_of
from ladder.lower.chain.joins import before_the_last, computed_apart
from ladder.lower.chain.nest import BYTES, Nest, Reduction
from ladder.lower.chain.nested_reductions import is_of_few, merged
from ladder.lower.chain.scans import scan_row
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.vectors import ACCESS_BYTES, Vectors
from ladder.lower.chain.windows import reduce_unrolled, reduce_vectors, window_width, windows_beside
from ladder.movement.mapping import Mapping, row_width
from ladder.movement.whole_rows import of_rows_alone, reads_whole_rows, rows_beside, whole_rows
from ladder.partition.rows import REDUCTIONS
from schedules.schedule import check

LINE, MOST_PREFETCHED_BYTES = 128, 16 << 10
"""Bytes of a cache line, and of the largest input that is prefetched."""

WORK_APART = 8
"""Operators of some operands of a join alone from which on a vector takes the branch of one."""

READ_AT_ONCE = 8
"""Elements of a row that a lane reads before it needs one, where rows are read again for each use."""

LEAST_SHARING = 4
"""Elements that share a divisor from which on its reciprocal serves."""

MULTIPLY = scalars.unsigned(operator.mul)
"""A product that compilers may add to something in one step."""

SLOTS = 32
"""Words that reductions over a block have in one kernel; each has its own, so one barrier is enough."""


class GpuNest(Nest):
    """A kernel for GPUs being emitted: what computes elements, in vectors, and reductions.

    mapping: How it lies over the GPU.
    cheap: Whether functions may be approximate, see `ladder.lower.chain.approximation`.
    """

    def __init__(self, chain: Chain, dialect: Dialect, mapping: Mapping, cheap: bool = False) -> None:
        super().__init__(chain, align=ACCESS_BYTES)
        graph, self.dialect = self.graph, dialect
        self.mapping, self.lanes = mapping, mapping.lanes
        self.vectors = Vectors(dialect, graph, self.values, self.buffers, self.address)
        divided = [] if cheap or dialect.by_inverse is None else divisions_of_rows(graph)
        near = None if cheap else dialect.by_near_inverse
        numbered = partial(by_number, dialect.functions["mul"])
        self.values.lowerings = {
            **dialect.functions,
            **(dialect.cheap if cheap else {}),
            **{f"%{name}": self.divided for name in divided},
            **({} if near is None else {f"%{name}": near for name in divisions_of_shares(graph)}),
            **{f"%{n}": dialect.cheap[o] for n, o in approximable(graph).items() if o in dialect.cheap},
            **{f"%{node.name}": MULTIPLY for node in graph.nodes if is_exact_product(graph, node)},
            **{f"%{name}": numbered for name in divisions_by_numbers(graph)},
        }
        self.values.rounded = lambda value, kind: dialect.rounded_through(value, kind, self.values.named)
        self.values.encoded, self.values.decoded = dialect.encoded, dialect.decoded
        self.values.row_number, self.values.narrow = dialect.row_number, self.lanes == 1
        self.shifts = any(node.operator in ("slice", "map") for node in graph.nodes) and not self.reductions()
        self.alone, self.works_together = False, computed_apart(graph) < WORK_APART
        widths = {window_width(graph, value) for value in graph.outputs if graph.tile(value).shape}
        self.vectors.of_rows = self.lanes == 1 and not mapping.tile[0] and reads_whole_rows(graph)
        windows = self.lanes == 1 and len(widths) == 1 and whole_rows(graph) is None
        self.window_width = widths.pop() if windows else 1
        if windows and self.vectors.of_rows and of_rows_alone(graph, self.rows):
            self.window_width = rows_beside(graph, self.rows)
        """Neighbouring elements of the results of windows that a thread has."""
        self.rows_beside = 1
        """Whole rows that it has, where threads have such."""
        beside = {windows_beside(graph, value, self.window_width) for value in graph.outputs}
        self.windows_beside = beside.pop() if len(beside) == 1 else 1
        """Windows along the axis before the last of which it has these."""
        sizes = {node.name: BYTES.get(stored_type(node.tile.ttype.name)) for node in graph.inputs}
        self.values.zeroed = {name for name, size in sizes.items() if size in (2, 4, 8)}
        self.values.clamped = clamped_axes(graph, sizes.keys() - self.values.zeroed)
        if not mapping.tile[0] and not mapping.across:
            self.values.joined_by_position = before_the_last(graph)
        for node in graph.nodes:  # as their inputs, from other places
            if node.operator in ("reshape", "transpose") and node.inputs[0] in self.values.zeroed:
                self.values.zeroed.add(node.name)
        self.count = known(self.extent(product(graph.tile(graph.outputs[0]).shape[: self.rows])))
        """Rows."""
        self.bins: Bins | None = None
        """Places of a block's own that it sums into."""
        self.slot = 0
        self.scan_slots: list[int] = []
        """Where scans leave what warps found: two places by turns, between which there is a barrier."""
        self.later: list[tuple[Expr | None, Callable[[], None]]] | None = None
        """Stores that wait until a thread has read all of its vectors."""
        self.valid: Expr | None = None
        """Whether the vector that is made now is to be stored; None: it is."""
        self.turns_each = 1
        """Vectors of a thread that works alone."""
        self.turns: dict[Any, list[tuple[Expr, Expr | None]]] = {}
        self.thread: Expr = None
        """The thread's number in its block, once the device's part has begun."""
        self.lane: Expr = None
        """Its number among the lanes that share a row."""

    def register(self, value: Expr) -> Expr:
        return in_register(value)

    def load(self, name: str, index: Index) -> Expr:
        return self.vectors.load(name, index)

    def divided(self, x: Expr, divisor: Expr) -> Expr:
        """Return a quotient by a number that neighbouring elements share."""
        several = self.vectors.width * self.turns_each >= LEAST_SHARING or (
            self.lanes > 1 and not self.mapping.across
        )
        return quotient(self.values, self.dialect, x, divisor) if several else scalars.divide(x, divisor)

    def start(self, blocks: Expr, threads: int, words: int = 0) -> tuple[Expr, Expr]:
        """Begin the device's part; returns the block's and the thread's number.

        words: 32-bit words of shared memory.
        """
        block, self.thread = self.dialect.start(blocks, threads, words, [*self.early_lines().values()])
        self.watch_rows()
        self.open_codes()
        return block, self.thread

    def watch_rows(self) -> None:
        """Begin to note numbers of no row, if the chain reads elements by number."""
        if reads_rows(self.graph) or any(scatter.combine for scatter in self.scatters.values()):
            self.dialect.watch_rows()

    def early_lines(self) -> dict[str, Early]:
        """Return input -> its lines, of those that are small: of a row for all rows, or of few rows."""
        found: dict[str, Early] = {}
        for node in self.graph.inputs:
            size = BYTES.get(stored_type(node.tile.ttype.name), 0)
            count = product(node.tile.shape)
            if not size or not isinstance(count, int) or not 0 < count * size <= MOST_PREFETCHED_BYTES:
                continue
            found[node.name] = (-(-count * size // LINE), partial(self.line, node.name, LINE // size))
        return found

    def line(self, name: str, elements: int, number: Expr) -> Expr:
        """Return the address of a cache line of an input, so many elements long."""
        at = self.unravelled(number * elements, [self.extent(e) for e in self.graph.tile(name).shape])
        return self.buffers[name].ptr_to(list(at or (0,)))

    def shape(self, value: str) -> list[Expr]:
        """Return a value's extents as expressions."""
        return [self.extent(extent) for extent in self.graph.tile(value).shape]

    def width(self) -> int:
        """Return the columns that a lane takes at once."""
        return row_width(self.graph, self.rows)

    def reductions(self) -> list[Node]:
        return [node for node in self.graph.nodes if node.operator in REDUCTIONS]

    def bound_index(self, flat: Expr, extents: Sequence[Expr]) -> Index:
        """Return the position along each axis in registers, with their ranges known."""
        index = tuple(b.bind(part) for part in self.unravelled(flat, extents))
        for part, extent in zip(index, extents, strict=True):
            self.within(part, extent)
        return index

    @contextmanager
    def scalars(self) -> Iterator[None]:
        """Load no vectors meanwhile: what is made is only looked at."""
        width, self.vectors.width = self.vectors.width, 1
        yield
        self.vectors.width = width

    def vector(self, value: str, outer: Index, column: Expr, width: int, beside: int = 1) -> None:
        """Emit ``width`` neighbouring elements of a result.

        beside: Of how many places along the last of the outer axes, of which the index counts groups.
        """
        trailing = [self.extent(extent) for extent in self.graph.tile(value).shape[len(outer) :]]
        outers = [outer]
        if beside > 1:
            outers = [(*outer[:-1], outer[-1] * beside + at) for at in range(beside)]
        lanes = self.neighbours(column, width, trailing) if trailing else [()]
        places = [(*each, *lane) for each in outers for lane in lanes]

        def body() -> None:
            self.vectors.width = width
            words = self.vectors.words
            self.vectors.words = dict(words) if self.values.assumed else words
            self.store_vectors(value, places, width)
            self.vectors.width, self.vectors.words = 1, words

        around = self.vectors.around_borders
        if width == 1 or (self.works_together and (around or self.decided_alike(value, places))):
            body()
            return
        unknown = tuple(variables_of(column)) if around else ()  # of elements at borders
        self.branched(value, places[0], unknown, body)  # nothing is loaded while conditions are looked for

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

    def store_vectors(self, value: str, places: Sequence[Index], width: int) -> None:
        """Compute and store vectors of elements, whose reductions are made together."""
        if width > 1 and self.window_width > 1:
            reduce_vectors(self, self.vectors, value, places, width)
        for first in range(0, len(places), width):
            self.store_vector(value, places[first : first + width])

    def store_vector(self, value: str, places: Sequence[Index]) -> None:
        """Compute elements and store them, in wide accesses."""
        found = []
        self.note_neighbours(value, places)
        for lane, place in enumerate(places):
            self.vectors.lane = lane
            self.prepare(value, place, ())
            with self.values.keeping(in_register):
                found.append(self.values.at(value, place))
        self.vectors.lane = 0
        store = storing(self, value, places, found)
        if self.later is not None and not self.values.assumed:
            if len(places) == 1:  # vectors are in registers, a number would be loaded where it is stored
                found[:] = map(in_register, found)
            self.later.append((self.valid, store))
            return
        with b.where(self.valid):
            store()

    def note_neighbours(self, value: str, places: Sequence[Index]) -> None:
        """Tell `vectors` what it reads side by side, where views may shift or turn it."""
        if len(places) <= 2 or not self.shifts:
            return
        reads = []
        with self.values.only_loads():
            for place in (places[0], places[1], places[-1]):
                reads.append([(name, self.address(name, at)) for name, at in self.reads(value, place)])
                self.values.forget()
        self.vectors.note(reads)

    def elements(self, value: str, places: Sequence[Index]) -> list[Expr]:
        """Return neighbouring elements, as vectors."""
        self.vectors.width = len(places)
        found = []
        for lane, place in enumerate(places):
            self.vectors.lane = lane
            with self.values.keeping(in_register):
                found.append(self.values.at(value, place))
        self.vectors.lane, self.vectors.width = 0, 1
        return found

    def round_lanes(self, items: Expr, width: int, body: Callable[[Expr, Expr | None], None]) -> None:
        """Emit ``body(item, valid)`` for every item, vectors of ``width`` elements, lane by lane in turns.

        Rows in registers take their turns unrolled: beyond the last item a lane has it again, and is not
        valid. Others take them in a loop.
        """
        items = self.values.simplified(items)
        if self.mapping.num:
            for number, valid in self.unrolled(items):
                body(number, valid)
            return
        first = self.whole_turns(items, width, body) if isinstance(items, int) else 0
        turns = self.values.simplified(tirx.floordiv(items - first + self.lanes - 1, self.lanes))
        with b.loop(turns) as turn:
            number = b.bind(turn * self.lanes + self.lane + first)
            self.within(number, items)
            with b.when(number < items):
                body(number, None)
                self.values.forget()

    def whole_turns(self, items: int, width: int, body: Callable[[Expr, Expr | None], None]) -> int:
        """Emit turns in which each lane has items, several read at once; return how many items they are."""
        together = READ_AT_ONCE // width
        share = together * self.lanes
        if items < share or together == 1:
            return 0
        with b.loop(items // share) as turn:
            self.later = []
            for at in range(together):
                number = b.bind(turn * share + at * self.lanes + self.lane)
                self.within(number, items)
                body(number, None)
            for valid, store in self.later:
                with b.where(valid):
                    store()
            self.later = None
            self.values.forget()
        return items // share * share

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

    def reduce(self, node: Node, index: Index) -> None:
        """Emit a reduction: by the row's lanes together, or within one thread's work by it alone."""
        if self.vectors.of_rows:
            reduce_unrolled(self, node, index)
            return
        it, together = Reduction(self, node, index), not self.alone
        with self.scalars():
            it = merged(self, it) if together and not self.mapping.num else it
            probe = self.probe("k", it.extent)
            self.prepare(it.operand, it.at(probe), (probe,))
            nested = self.values.needed(it.operand, it.at(probe))
            each = bool(nested) and together and is_of_few(self, it, nested, probe)
        last = it.axis == len(self.graph.tile(it.operand).shape) - 1
        width = self.width() if together and last and not nested else 1
        width = width if isinstance(it.neighbours, int) and it.neighbours % width == 0 else 1
        total = b.Variable(it.dtype, it.neutral)
        if each:
            self.keep_cell(node, index, self.over_positions(it))
            return
        if together and self.mapping.num and not nested:
            self.reduce_held(it, total, width)
        elif together:
            self.values.forget()
            self.round_lanes(
                tirx.floordiv(it.extent, width),
                width,
                lambda number, valid: self.accumulate(it, total, number * width, width),
            )
            self.values.forget()
            self.vectors.words.clear()  # lanes without a turn have loaded none of them
        else:
            before = self.vectors.width, self.vectors.lane, self.vectors.words
            self.vectors.width, self.vectors.lane, self.vectors.words = 1, 0, {}
            self.values.forget()
            with self.loop(it.extent) as position:
                self.accumulate(it, total, position, 1)
            self.values.forget()
            self.vectors.width, self.vectors.lane, self.vectors.words = before
        self.keep_cell(node, index, self.over_lanes(it, total.value) if together else b.bind(total.value))

    def over_positions(self, it: Reduction) -> Expr:
        """Return what is found of all positions: the lanes make the reductions of each together."""
        total = it.neutral
        for position in range(int(it.extent)):
            self.prepare(it.operand, it.at(position), ())
            total = b.bind(it.combine(total, self.values.at(it.operand, it.at(position))))
        return total

    def accumulate(self, it: Reduction, total: b.Variable, position: Expr, width: int) -> None:
        """Emit the sum of a vector of the operand, by a thread alone."""
        together, self.alone = not self.alone, True
        self.vectors.words.clear()
        self.vectors.width = width
        for lane in range(width):
            self.vectors.lane = lane
            place = it.at(position + lane)
            self.prepare(it.operand, place, ())
            with self.values.keeping(in_register):
                value = self.values.at(it.operand, place)
            total.set(it.combine(total.value, value))
        self.vectors.lane, self.vectors.width = 0, 1
        self.alone = not together

    def reduce_held(self, it: Reduction, total: b.Variable, width: int) -> None:
        """Emit the loads of all turns, then their sums; what is summed stays in registers."""
        turns = self.unrolled(self.values.simplified(tirx.floordiv(it.extent, width)))
        places = [[it.at(number * width + lane) for lane in range(width)] for number, _ in turns]
        found = [self.elements(it.operand, row) for row in places]
        if width == 1:  # vectors are loaded; single elements would be where they are summed, one by one
            found = [[in_register(value) for value in values] for values in found]
        for (_, valid), row, values in zip(turns, places, found, strict=True):
            for place, value in zip(row, values, strict=True):
                kept = b.Variable(it.dtype, value).value
                key = self.values.key(it.operand, tuple(map(self.values.simplified, place)))
                self.values.memory[key] = kept
                kept = kept if valid is None else T.if_then_else(valid, kept, it.neutral)
                total.set(it.combine(total.value, kept))

    def scan(self, node: Node, index: Index) -> None:
        scan_row(self, node, index)

    def over_lanes(self, it: Reduction, value: Expr) -> Expr:
        """Return what all lanes of a row found, on each of them."""
        wave = self.dialect.wave
        value = self.shuffled(it, value, min(self.lanes, wave))
        warps = self.lanes // wave
        if warps <= 1:
            return value
        read = self.exchanged(value, it.dtype)
        return self.shuffled(it, b.bind(read(tirx.floormod(self.lane, warps))), warps)

    def moved(self, value: Expr, dtype: str, distance: int) -> Expr:
        """Return the value of the lane at a distance: words of 32 bits move."""
        if BYTES[dtype] == 4:
            return self.dialect.shuffle(value, distance, self.thread)
        words = words_of(value, dtype)
        return from_words([self.dialect.shuffle(word, distance, self.thread) for word in words], dtype)

    def exchanged(self, value: Expr, dtype: str, first: int | None = None) -> Callable[[Expr], Expr]:
        """Leave a warp's value in shared memory; what is returned reads that of a warp.

        first: The slot; by default one of its own.
        """
        wave, shared = self.dialect.wave, self.dialect.shared
        words = words_of(value, dtype)
        if first is None:
            first, self.slot = self.slot, self.slot + len(words)
        check(
            self.slot <= SLOTS,
            f"a chain whose reductions over a block take more than {SLOTS} words",
        )
        with b.when(tirx.floormod(self.lane, wave) == 0):
            for number, word in enumerate(words, first):
                b.store(shared, word, number * wave + tirx.floordiv(self.lane, wave))
        self.dialect.sync()
        places = range(first, first + len(words))
        return lambda warp: from_words([shared[number * wave + warp] for number in places], dtype)

    def shuffled(self, it: Reduction, value: Expr, lanes: int) -> Expr:
        """Return the combination of ``lanes`` neighbouring lanes, a power of two, on each of them."""
        if it.operator == "reduce_max" and lanes == self.dialect.wave:
            found = self.dialect.largest(value, it.dtype)
            if found is not None:
                return b.bind(found)
        value, distance = b.bind(value), 1
        while distance < lanes:
            value = b.bind(it.combine(value, self.moved(value, it.dtype, distance)))
            distance *= 2
        return value


def known(expression: Expr) -> Expr:
    """Return a constant as a Python number."""
    return int(expression) if isinstance(expression, tirx.IntImm) else expression


def same(a: Expr, b: Expr) -> bool:
    """Tell whether two extents are the same."""
    return bool(a == b) if isinstance(a, int) and isinstance(b, int) else a is b


def in_register(value: Expr) -> Expr:
    """Return a value in a register of its own."""
    return b.Variable(str(value.ty.dtype), value).value
