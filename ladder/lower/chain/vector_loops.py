"""Chains on GPUs whose threads work alone: each takes vectors of neighbours, or whole short rows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from tvm import tirx

from ladder.ir.extents import Shape, product
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.divisions import DIVISIONS
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.gpu_nest import WORK_APART, GpuNest, known, same
from ladder.lower.chain.indices import Index
from ladder.lower.chain.joins import computed_apart
from ladder.lower.chain.nest import BYTES, uses
from ladder.lower.chain.short_axes import at_position, shared_axis, with_position, without
from ladder.lower.chain.vectors import ACCESS_BYTES
from ladder.movement.whole_rows import rows_beside, takes_whole_rows, whole_rows
from ladder.partition.repeats import WORK


class Piece(NamedTuple):
    """Neighbouring columns of a result, in vectors.

    merged: Trailing axes that count as one.
    width: Elements of a vector.
    at: Position along the axis of which threads have all positions; None: there is no such axis.
    """

    value: str
    merged: int
    width: int
    start: Expr
    stop: Expr
    at: int | None = None


Places = dict[Any, tuple[Expr, Index]]
"""Extents -> (number of the vector in its row, index of the row)."""


NARROW_TURNS, RESIDENT = 4, 2048
"""Single elements that a thread takes where each is of 16 bits or less, and threads of a multiprocessor."""

NUMBER_TURNS, LEAST_WORK = (4, 2), 16
"""Vectors that a thread may take for which it computes numbers, and their instructions at least."""

LEAST_VECTORS = 4
"""Of a piece's middle from which on it is apart from what lies around it: each has code of its own."""

BORDER, LEAST_BESIDE = 8, 32
"""Elements of the last axis below which a piece is a border, and at least of what lies beside it."""

SHORT_ROW = 256
"""Bytes of a row at most whose borders are decided for each element, rather than being pieces themselves."""

LONG_ROW = 512
"""Elements from which on few vectors lie across the ends of rows."""

MOST_OF_TURNS = 8
"""Elements of a vector up to which a thread reads several before it stores one."""

LONG = ("sin", "cos", "pow")
"""Functions of a hundred instructions and more."""


class VectorLoops:
    """The vectors of a kernel whose threads work alone."""

    def __init__(self, nest: GpuNest) -> None:
        self.nest, self.axis = nest, shared_axis(nest)
        """The axis, from the end, of which threads have all positions; 0: there is none."""
        self.at: int | None = None
        """The one along it of the pieces that are looked for."""
        if self.axis:
            nest.works_together = computed_apart(nest.graph, self.axis) < WORK_APART

    def outer(self, index: Index, merged: int) -> Index:
        """Return the place of a row of pieces that are looked for: one position of the axis."""
        return index if self.at is None else at_position(index, self.axis + merged, self.at)

    def layout(self, value: str) -> tuple[int, int]:
        """Return (trailing axes that count as one, width) with the fewest memory instructions per element."""
        shape = self.nest.graph.tile(value).shape
        best, cost = (1, 1), float("inf")
        axes = self.nest.rows if self.nest.lanes > 1 else 0
        most = -1 - self.axis if self.axis else len(shape) - axes
        for merged in range(most, 0, -1):
            trailing = product(shape[len(shape) - merged :])
            for width in self.widths(value):
                if isinstance(trailing, int) and trailing % width == 0:
                    found = self.instructions(value, merged, width)
                    if found < cost:
                        best, cost = (merged, width), found
        if best == (1, 1):  # no vectors, but fewer positions to work out
            while best[0] < most and self.nest.lie_together([value], best[0] + 1):
                best = (best[0] + 1, 1)
        return best

    def widths(self, value: str) -> list[int]:
        """Return the vectors that a result may be stored by, in elements, the longest first."""
        tile = self.nest.graph.tile(value)
        most, columns = ACCESS_BYTES // BYTES.get(stored_type(tile.ttype.name), 16), tile.shape[-1]
        widths = [most >> k for k in range(4) if most >> k > 1]
        if (scatter := self.nest.scatters.get(value)) is not None:  # scattered rows lie apart
            apart = bool(scatter.combine) and scatter.by_element
            return [w for w in widths if isinstance(columns, int) and columns % w == 0 and not apart]
        return widths

    def piece_width(self, value: str, start: Expr, stop: Expr) -> int:
        """Return the width with the fewest memory instructions per element of a piece of the last axis."""
        ends = (start, stop, self.nest.graph.tile(value).shape[-1])  # each row begins where vectors do
        fitting = [w for w in self.widths(value) if all(isinstance(e, int) and e % w == 0 for e in ends)]
        costs = {w: self.instructions(value, 1, w, (start, stop)) for w in fitting}
        found = [w for w in fitting if costs[w] < float("inf")]
        return min(found, key=lambda w: (costs[w], -w), default=1)

    def instructions(
        self, value: str, merged: int, width: int, piece: tuple[Expr, Expr] | None = None
    ) -> float:
        """Return the memory instructions per element if vectors run along the last ``merged`` axes.

        piece: Where those of the last axis begin and end; None: all of them.
        """
        nest = self.nest
        shape = nest.graph.tile(value).shape
        extents = [nest.extent(extent) for extent in shape]
        outer = tuple(nest.probe(f"o{axis}", extent) for axis, extent in enumerate(extents[:-merged]))
        outer = self.outer(outer, merged)
        start, stop = piece or (0, nest.extent(product(shape[-merged:])))
        chunk = nest.probe("chunk", (stop - start) // width)
        reads: list[list[tuple[str, Expr]]] = []
        with nest.values.only_loads():
            for lane in nest.neighbours(start + chunk * width, width, extents[-merged:]):
                read = nest.reads(value, (*outer, *lane))
                reads.append([(name, nest.address(name, at)) for name, at in read])
                nest.values.forget()
            open_parts = [nest.values.resolved(part) for c in nest.values.open for part in c]
            crossed = merged > 1 and any(uses(part, (chunk,)) for part in open_parts)
        if crossed or len({len(row) for row in reads}) > 1:
            return float("inf")
        total = 1.0
        for column in zip(*reads, strict=True):
            name, base = column[0]
            steps = [nest.values.simplified(at - base) for _, at in column]
            along = all(step == lane for lane, step in enumerate(steps))
            beside = along or all(step == -lane for lane, step in enumerate(steps))
            if all(step == 0 for step in steps) or (along and nest.vectors.is_aligned(name, base, width)):
                total += 1
            elif width > 2 and beside and nest.vectors.is_shifted(name, base, width):
                total += 2
            else:
                total += width
        return total / width

    def emit(self) -> None:
        """Emit one vector per thread, for every result and every piece of its columns."""
        self.nest.alone = True
        plans = self.of_one_width([p for value in self.nest.graph.outputs for p in self.every_piece(value)])
        groups: list[tuple[Expr, list[Piece]]] = []
        for plan in plans:
            count = known(self.items(plan))
            together = next((pieces for other, pieces in groups if same(count, other)), None)
            if together is None:
                groups.append((count, [plan]))
            else:
                together.append(plan)
        if self.may_be_side_by_side([count for count, _ in groups]):
            self.side_by_side(groups)
        else:
            self.one_after_the_other(groups)

    def of_one_width(self, plans: list[Piece]) -> list[Piece]:
        """Return pieces by vectors of as many elements, if they are whole results of one size.

        Results of 16 and of 32 bits would else be computed apart, and what both read be read twice. Of the
        shortest vectors, if all may be of them: lanes that store two accesses of a result, one after the
        other, write halves of sectors.
        """
        nest, widths = self.nest, {piece.width for piece in plans}
        sizes = {product(nest.graph.tile(piece.value).shape) for piece in plans}
        parts = len({piece.value for piece in plans}) < len(plans)
        if len(widths) == 1 or 1 in widths or len(sizes) > 1 or parts or nest.scatters:
            return plans
        alike = ([piece._replace(width=width) for piece in plans] for width in sorted(widths))
        return next((found for found in alike if all(map(self.may_be_of, plans, found))), plans)

    def may_be_of(self, piece: Piece, other: Piece) -> bool:
        """Tell whether a piece may be of the other's width: of fewer elements, or in no more instructions."""
        size = BYTES.get(stored_type(self.nest.graph.tile(piece.value).ttype.name), ACCESS_BYTES)
        known = isinstance(piece.start, int) and isinstance(piece.stop, int)
        if not known or (piece.stop - piece.start) % other.width or size * other.width > 2 * ACCESS_BYTES:
            return False
        ends = (piece.start, piece.stop) if piece.merged == 1 else None
        costs = [self.instructions(piece.value, piece.merged, p.width, ends) for p in (other, piece)]
        return costs[0] <= costs[1] or (other.width < piece.width and costs[0] < float("inf"))

    def may_be_side_by_side(self, counts: Sequence[Expr]) -> bool:
        """Whether pieces, or all but the largest, are few enough for threads of their own beside the others.

        No thread then takes two in turn: what lies at borders would take as long as all the rest.
        """
        if len(counts) == 1 or self.nest.mapping.num > 1 or not all(isinstance(c, int) for c in counts):
            return False
        waves = sorted(map(whole_waves, counts))
        return sum(waves[:-1]) <= self.nest.mapping.threads * self.nest.dialect.device.units

    def side_by_side(self, groups: Sequence[tuple[int, Sequence[Piece]]]) -> None:
        """Emit each piece for threads of its own."""
        threads, total = self.nest.mapping.threads, sum(whole_waves(count) for count, _ in groups)
        block, thread = self.nest.start(-(-total // threads), threads)
        first, begin = b.bind(block * threads + thread), 0
        for count, together in groups:
            item = b.bind(first - begin) if begin else first
            with b.when(tirx.And(item >= 0, item < count)):
                self.nest.within(item, count)
                self.flat_items(item, 1, count, True, together)
            begin += whole_waves(count)
            self.nest.values.forget()
            self.nest.values.cells.clear()

    def one_after_the_other(self, groups: Sequence[tuple[Expr, Sequence[Piece]]]) -> None:
        """Emit pieces of every kind for each thread."""
        most: Expr = groups[0][0]
        for count, _ in groups[1:]:
            both = isinstance(most, int) and isinstance(count, int)
            most = max(most, count) if both else tirx.max(most, count)
        threads, turns = self.nest.mapping.threads, max(1, self.nest.mapping.num)
        if any(piece.width > MOST_OF_TURNS for _, pieces in groups for piece in pieces):
            turns = 1
        elif isinstance(most, int) and self.computes_numbers():
            resident = self.nest.dialect.device.units * RESIDENT
            turns = max(turns, next((n for n in NUMBER_TURNS if most >= n * resident), 1))
        if any(self.may_cross_rows(piece) for _, pieces in groups for piece in pieces):
            threads, turns = threads * max(1, self.nest.mapping.num), 1
        if isinstance(most, int) and self.are_narrow([p for _, pieces in groups for p in pieces], most):
            turns = max(turns, NARROW_TURNS)
        self.nest.turns_each = turns
        share = threads * turns
        block, thread = self.nest.start(tirx.floordiv(most + share - 1, share), threads)
        first = b.bind(block * share + thread)
        for count, together in groups:
            whole = isinstance(count, int) and same(count, most) and count % share == 0
            each = whole or (turns > 1 and same(count, most))
            with nullcontext() if each else b.when((first if turns == 1 else block * share) < count):
                self.flat_items(first, turns, count, whole or turns == 1, together)
            self.nest.values.forget()
            self.nest.values.cells.clear()

    def are_narrow(self, pieces: Sequence[Piece], count: int) -> bool:
        """Tell whether threads of one element each would ask for too few bytes at a time, of many."""
        graph, full = self.nest.graph, NARROW_TURNS * self.nest.dialect.device.units * RESIDENT
        types = [graph.tile(piece.value).ttype.name for piece in pieces]
        small = all(BYTES.get(stored_type(name), 4) <= 2 for name in types)
        alone = small and all(piece.width == 1 for piece in pieces) and len(graph.inputs) == 1
        return alone and count >= full and not self.nest.reductions()

    def computes_numbers(self) -> bool:
        """Tell whether each thread computes functions of numbers that all elements share."""
        graph = self.nest.graph

        def is_number(value: str) -> bool:
            return not graph.tile(value).shape and graph.producer(value).operator != "constant"

        work = 0
        for node in graph.nodes:
            divides = node.operator in DIVISIONS and is_number(node.inputs[1])  # by way of a reciprocal
            if divides or (not node.tile.shape and any(map(is_number, node.inputs))):
                work += WORK.get(node.operator, 1)
        return work >= LEAST_WORK and not self.nest.reductions()

    def flat_items(self, first: Expr, turns: int, count: Expr, within: bool, plans: Sequence[Piece]) -> None:
        """Emit a thread's vectors of pieces with equal numbers of vectors; shared operands are read once.

        first: Its first vector.
        turns: How many it has; they are stored after all are read.
        count: How many there are.
        within: Whether a thread has none beyond: else it reads the last one again.
        """
        self.nest.later = []
        for turn in range(turns):
            item = b.bind(first + turn * self.nest.mapping.threads) if turns > 1 else first
            self.nest.valid = None if within else item < count
            item = item if within else b.bind(tirx.min(item, count - 1))
            self.nest.within(item, count)
            places: Places = {}
            for plan in plans:
                self.flat_item(item, places, plan)
            self.nest.vectors.words.clear()
        for valid, store in self.nest.later or ():
            with b.where(valid):
                store()
        self.nest.later = None

    def every_piece(self, value: str) -> list[Piece]:
        """Return the pieces of a result, of all positions of the axis of which threads have all."""
        if not self.axis:
            return self.pieces(value)
        found = []
        for at in range(int(self.nest.graph.tile(value).shape[self.axis])):
            self.at = at
            found += [piece._replace(at=at) for piece in self.pieces(value)]
        self.at = None
        return found

    def pieces(self, value: str) -> list[Piece]:
        """Return the pieces of a result's last axis; a number has one."""
        shape = [self.nest.extent(extent) for extent in self.nest.graph.tile(value).shape]
        if (rows := self.whole_rows(value)) is not None:
            return [self.of_whole_rows(value, rows)]
        if not self.has_columns(value):
            return [Piece(value, 1, 1, 0, 1)]
        if self.nest.reductions() and len(shape) == self.nest.rows:
            return [Piece(value, 1, self.nest.window_width, 0, shape[-1])]
        merged, width = (1, 1) if self.nest.reductions() else self.layout(value)
        width = 1 if self.works_apart() else width
        if merged > 1:
            columns = self.nest.extent(product(self.nest.graph.tile(value).shape[-merged:]))
            return [Piece(value, merged, width, 0, columns)]
        probes = tuple(self.nest.probe(f"p{axis}", extent) for axis, extent in enumerate(shape))
        cuts = self.nest.cuts(value, self.outer(probes, 0), probes[-1], shape[-1])
        if (wide := self.width_around_borders(value, cuts)) > 1:
            self.nest.vectors.around_borders = True
            return [Piece(value, 1, wide, 0, shape[-1])]
        if self.are_short_beside_borders(value, cuts):
            return [Piece(value, 1, 1, 0, shape[-1])]
        if len(cuts) == 1 or self.nest.reductions() or self.works_apart():
            whole = all(isinstance(e, int) and e % width == 0 for piece in cuts for e in piece)
            return [Piece(value, 1, width if whole else 1, start, stop) for start, stop in cuts]
        return [
            Piece(value, 1, self.piece_width(value, *part), *part)
            for start, stop in cuts
            for part in self.around_vectors(value, start, stop)
        ]

    def width_around_borders(self, value: str, cuts: Sequence[tuple[Expr, Expr]]) -> int:
        """Return the width of vectors that take borders of fewer elements along, one by one; 1: none do."""
        columns = self.nest.graph.tile(value).shape[-1]
        alone = len(cuts) < 2 or self.nest.reductions() or self.works_apart()
        known = isinstance(columns, int) and all(isinstance(end, int) for piece in cuts for end in piece)
        if alone or not isinstance(columns, int) or not known:
            return 1
        *others, longest = sorted(int(stop) - int(start) for start, stop in cuts)
        for most in self.widths(value):
            inside = columns % most == 0 and longest >= 2 * most
            width = self.piece_width(value, most, columns - most) if inside else 1
            if sum(others) < width:
                return width
        return 1

    def are_short_beside_borders(self, value: str, cuts: Sequence[tuple[Expr, Expr]]) -> bool:
        """Tell whether rows are short and end in borders, whose pieces would take longer than all rows."""
        if not all(isinstance(start, int) and isinstance(stop, int) for start, stop in cuts):
            return False
        lengths = [int(stop) - int(start) for start, stop in cuts]
        size = BYTES.get(stored_type(self.nest.graph.tile(value).ttype.name), 4)
        bordered = min(lengths) < BORDER and max(lengths) >= LEAST_BESIDE
        return bordered and sum(lengths) * size <= SHORT_ROW

    def whole_rows(self, value: str) -> int | None:
        """Return the axes that count rows of which a thread has whole ones, where no vectors fit."""
        rows = None if self.nest.scatters or self.works_apart() else whole_rows(self.nest.graph)
        return rows if self.nest.reductions() or self.layout(value)[1] == 1 else None

    def of_whole_rows(self, value: str, rows: int) -> Piece:
        """Return the piece of a result of which threads have whole rows."""
        shape, self.nest.rows_beside = self.nest.graph.tile(value).shape, rows_beside(self.nest.graph, rows)
        self.nest.vectors.of_rows = takes_whole_rows(self.nest.graph)
        count, beside = int(product(shape[rows:])), self.nest.rows_beside
        if beside > 1:
            return Piece(value, len(shape) - rows + 1, count * beside, 0, count * shape[rows - 1])
        return Piece(value, max(1, len(shape) - rows), count, 0, count)

    def around_vectors(self, value: str, start: Expr, stop: Expr) -> list[tuple[Expr, Expr]]:
        """Return a piece of the last axis, or its middle, where vectors fit, and what lies around it."""
        whole = [(start, stop)]
        if (
            not isinstance(start, int)
            or not isinstance(stop, int)
            or self.piece_width(value, start, stop) > 1
        ):
            return whole
        for width in self.widths(value):
            first, last = -(-start // width) * width, stop // width * width
            if last - first >= LEAST_VECTORS * width and self.piece_width(value, first, last) == width:
                parts = [(start, first), (first, last), (last, stop)]
                return [(begin, end) for begin, end in parts if begin < end]
        return whole

    def works_apart(self) -> bool:
        """Whether threads take single elements: few, of functions whose code is slower to fetch than to run.

        The code of a vector of eight sines is eight times that of one, rare branches included.
        """
        graph, mapping = self.nest.graph, self.nest.mapping
        sizes = [product(graph.tile(value).shape) for value in graph.outputs]
        counts = [size for size in sizes if isinstance(size, int)]
        most = mapping.threads * self.nest.dialect.device.units
        few = len(counts) == len(sizes) and sum(counts) <= most
        return few and mapping.num <= 1 and any(node.operator in LONG for node in graph.nodes)

    def items(self, piece: Piece) -> Expr:
        """Return how many vectors a piece has over all rows."""
        if not self.has_columns(piece.value):
            return self.nest.count
        outer = self.nest.extent(product(self.row_shape(piece)))
        outer = outer // beside if (beside := self.beside(piece)) > 1 else outer
        return outer * tirx.floordiv(piece.stop - piece.start, piece.width)

    def row_shape(self, piece: Piece) -> Shape:
        """Return the extents that count rows of a piece."""
        shape = self.nest.graph.tile(piece.value).shape[: -piece.merged]
        return shape if piece.at is None else without(shape, self.axis + piece.merged)

    def beside(self, piece: Piece) -> int:
        """Return of how many windows along the axis before the last a thread has the vectors."""
        return self.nest.windows_beside if piece.width == self.nest.window_width > 1 else 1

    def has_columns(self, value: str) -> bool:
        shape = self.nest.graph.tile(value).shape
        alone = bool(self.nest.reductions()) and len(shape) == self.nest.rows
        alone = alone and self.nest.window_width == self.nest.rows_beside == 1
        return bool(shape) and not alone

    def flat_item(self, item: Expr, places: Places, piece: Piece) -> None:
        """Emit the vector that a thread has."""
        value, merged, width, start, stop, at = piece
        if not self.has_columns(value):
            self.nest.store_vector(value, [self.nest.unravelled(item, self.nest.shape(value))])
            return
        rows = [self.nest.extent(extent) for extent in self.row_shape(piece)]
        if (beside := self.beside(piece)) > 1:
            rows[-1] = rows[-1] // beside
        chunks = known(self.nest.values.simplified(tirx.floordiv(stop - start, width)))
        key = (str(chunks), *map(str, rows))
        if key not in places:
            chunk = b.bind(self.nest.values.simplified(tirx.floormod(item, chunks)))
            self.nest.within(chunk, chunks)
            row = b.bind(self.nest.values.simplified(tirx.floordiv(item, chunks)))
            places[key] = chunk, self.nest.bound_index(row, rows)
        chunk, outer = places[key]
        outer = outer if at is None else with_position(outer, self.axis + merged, at)
        if self.may_cross_rows(piece):
            self.vector_of_rows(piece, outer, start + chunk * width)
            return
        self.nest.vector(value, outer, start + chunk * width, width, beside)

    def may_cross_rows(self, piece: Piece) -> bool:
        """Tell whether vectors run over the ends of long rows of which each has numbers that are read."""
        nest, columns = self.nest, self.nest.graph.tile(piece.value).shape[-1:]
        long = all(isinstance(e, int) and e >= LONG_ROW and e % piece.width for e in columns)
        several = piece.merged > 1 < piece.width and long and not nest.reductions()
        return several and not nest.lie_together([piece.value], piece.merged)

    def vector_of_rows(self, piece: Piece, outer: Index, flat: Expr) -> None:
        """Emit a vector that is of one row, but for few: these take elements one by one, of any row."""
        nest, (value, merged, width, *_) = self.nest, piece
        extents = nest.shape(value)[-merged:]
        row = b.bind(tirx.floordiv(flat, extents[-1]))
        column = flat - row * extents[-1]
        words, later, nest.later = nest.vectors.words, nest.later, None

        def within() -> None:
            nest.vectors.words = {}
            nest.vector(value, (*outer, *nest.unravelled(row, extents[:-1])), column, width)

        def across() -> None:
            nest.vectors.words = {}
            with nest.loop(width) as lane:
                nest.vector(value, outer, flat + lane, 1)

        for holds, emit in ((True, within), (False, across)):
            nest.values.forget()
            with b.when((column + width <= extents[-1]) if holds else (column + width > extents[-1])):
                emit()
        nest.values.forget()
        nest.vectors.words, nest.later = words, later


def whole_waves(count: int) -> int:
    """Return the threads of whole warps, 32 lanes or 64, that have so many vectors."""
    return -(-count // 64) * 64
