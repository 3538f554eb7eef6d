"""The loop nest of a chain on GPUs, as its `Mapping` says and a `Dialect` spells it.

Inputs whose memory runs along another axis than the result's are transposed in shared memory
(`shared_transpose`). Threads that work alone take vectors of neighbouring elements of any row
(`VectorLoops`); sums over image positions have blocks of their own (`SpatialSums`); else teams of lanes take
rows (`gpu_rows`).

Spatial reductions: sums along axes before the channels (means over an image), a block per few channels.

A thread sums a vector of channels over every n-th position; threads join their sums by shuffles, then through
shared memory. All 32 bytes of a memory sector are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from math import prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.scalars import reinterpreted
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.chain.cuda import CudaDialect
from ladder.lower.chain.dialect import Dialect
from ladder.lower.chain.element_types import computed_type, stored_type
from ladder.lower.chain.gpu_nest import GpuNest, known, same
from ladder.lower.chain.gpu_rows import RowLoops
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import BYTES, Reduction, uses
from ladder.lower.chain.rocm import RocmDialect
from ladder.lower.chain.scatter import Chain
from ladder.lower.chain.shared_transpose import emit_tiles
from ladder.lower.chain.vectors import ACCESS_BYTES
from ladder.movement.choose import machine_of
from ladder.movement.mapping import Mapping
from schedules.schedule import check

Piece = tuple[str, int, int, Expr, Expr]
"""(result, trailing axes that count as one, width, start, stop)."""

Places = dict[Any, tuple[Expr, Index]]
"""Extents -> (number of the vector in its row, index of the row)."""


LONG = ("sin", "cos", "pow")
"""Functions of a hundred instructions and more."""


class VectorLoops:
    """The vectors of a kernel whose threads work alone."""

    def __init__(self, nest: GpuNest) -> None:
        self.nest = nest

    def layout(self, value: str) -> tuple[int, int]:
        """Return (trailing axes that count as one, width) with the fewest memory instructions per element."""
        shape = self.nest.graph.tile(value).shape
        best, cost = (1, 1), float("inf")
        axes = self.nest.rows if self.nest.lanes > 1 else 0
        most = 1 if self.nest.mapping.spread > 1 else len(shape) - axes
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
        if value in self.nest.scatters:  # scattered rows lie apart
            return [w for w in widths if isinstance(columns, int) and columns % w == 0]
        return widths

    def piece_width(self, value: str, start: Expr, stop: Expr) -> int:
        """Return the width with the fewest memory instructions per element of a piece of the last axis."""
        known = isinstance(start, int) and isinstance(stop, int)
        fitting = [w for w in self.widths(value) if known and start % w == 0 and stop % w == 0]
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
        start, stop = piece or (0, nest.extent(product(shape[-merged:])))
        chunk = nest.probe("chunk", (stop - start) // width)
        reads: list[list[tuple[str, Expr]]] = []
        with nest.values.only_loads():
            for lane in range(width):
                index = (*outer, *nest.unravelled(start + chunk * width + lane, extents[-merged:]))
                reads.append([(name, nest.address(name, at)) for name, at in nest.reads(value, index)])
                nest.values.forget()
            crossed = merged > 1 and any(uses(part, (chunk,)) for c in nest.values.open for part in c)
        if crossed or len({len(row) for row in reads}) > 1:
            return float("inf")
        total = 1.0
        for column in zip(*reads, strict=True):
            name, base = column[0]
            steps = [nest.values.simplified(at - base) for _, at in column]
            along = all(step == lane for lane, step in enumerate(steps))
            if all(step == 0 for step in steps) or (along and nest.vectors.is_aligned(name, base, width)):
                total += 1
            else:
                total += width
        return total / width

    def emit(self) -> None:
        """Emit one vector per thread, for every result and every piece of its columns."""
        self.nest.alone = True
        plans = [plan for value in self.nest.graph.outputs for plan in self.pieces(value)]
        groups: list[tuple[Expr, list[Piece]]] = []
        for plan in plans:
            count = known(self.items(*plan))
            together = next((pieces for other, pieces in groups if same(count, other)), None)
            if together is None:
                groups.append((count, [plan]))
            else:
                together.append(plan)
        if self.may_be_side_by_side([count for count, _ in groups]):
            self.side_by_side(groups)
        else:
            self.one_after_the_other(groups)

    def may_be_side_by_side(self, counts: Sequence[Expr]) -> bool:
        """Whether pieces are few enough for threads of their own: no thread then takes two in turn."""
        if len(counts) == 1 or self.nest.mapping.num > 1 or not all(isinstance(c, int) for c in counts):
            return False
        return sum(map(whole_waves, counts)) <= self.nest.mapping.threads * self.nest.dialect.device.units

    def side_by_side(self, groups: Sequence[tuple[int, Sequence[Piece]]]) -> None:
        """Emit each piece for threads of its own."""
        threads, total = self.nest.mapping.threads, sum(whole_waves(count) for count, _ in groups)
        block, thread = self.nest.start(-(-total // threads), threads)
        first, begin = b.bind(block * threads + thread), 0
        for count, together in groups:
            item = b.bind(first - begin) if begin else first
            with b.when(tirx.And(item >= 0, item < count)):
                self.nest.within(item, count)
                self.flat_items(item, 1, None, together)
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
        share = threads * turns
        block, thread = self.nest.start(tirx.floordiv(most + share - 1, share), threads)
        first = b.bind(block * share + thread)
        for count, together in groups:
            whole = isinstance(count, int) and same(count, most) and count % share == 0
            with nullcontext() if whole or turns > 1 else b.when(first < count):
                self.flat_items(first, turns, None if whole or turns == 1 else count, together)
            self.nest.values.forget()
            self.nest.values.cells.clear()

    def flat_items(self, first: Expr, turns: int, count: Expr | None, plans: Sequence[Piece]) -> None:
        """Emit a thread's vectors of pieces with equal numbers of vectors; shared operands are read once.

        first: Its first vector.
        turns: How many it has; they are stored after all are read.
        count: How many there are, if some of a thread's may lie beyond: it reads the last one then.
        """
        self.nest.later = []
        for turn in range(turns):
            item = b.bind(first + turn * self.nest.mapping.threads) if turns > 1 else first
            self.nest.valid = None if count is None else item < count
            item = item if count is None else b.bind(tirx.min(item, count - 1))
            places: Places = {}
            for plan in plans:
                self.flat_item(item, places, *plan)
            self.nest.vectors.words.clear()
        for valid, store in self.nest.later or ():
            with self.nest.where(valid):
                store()
        self.nest.later = None

    def pieces(self, value: str) -> list[Piece]:
        """Return the pieces of a result's last axis; a number has one."""
        shape = [self.nest.extent(extent) for extent in self.nest.graph.tile(value).shape]
        if not self.has_columns(value):
            return [(value, 1, 1, 0, 1)]
        if self.nest.reductions() and len(shape) == self.nest.rows:
            return [(value, 1, self.nest.window_width, 0, shape[-1])]
        merged, width = (1, 1) if self.nest.reductions() else self.layout(value)
        width = 1 if self.works_apart() else width
        if merged > 1:
            return [
                (
                    value,
                    merged,
                    width,
                    0,
                    self.nest.extent(product(self.nest.graph.tile(value).shape[-merged:])),
                )
            ]
        probes = tuple(self.nest.probe(f"p{axis}", extent) for axis, extent in enumerate(shape))
        cuts = self.nest.cuts(value, probes, probes[-1], shape[-1])
        if len(cuts) == 1 or self.nest.reductions() or self.works_apart():
            whole = all(isinstance(e, int) and e % width == 0 for piece in cuts for e in piece)
            return [(value, 1, width if whole else 1, start, stop) for start, stop in cuts]
        return [(value, 1, self.piece_width(value, start, stop), start, stop) for start, stop in cuts]

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

    def items(self, value: str, merged: int, width: int, start: Expr, stop: Expr) -> Expr:
        """Return how many vectors a piece has over all rows."""
        shape = self.nest.graph.tile(value).shape
        if not self.has_columns(value):
            return self.nest.count
        return self.nest.extent(product(shape[:-merged])) * tirx.floordiv(stop - start, width)

    def has_columns(self, value: str) -> bool:
        shape = self.nest.graph.tile(value).shape
        alone = bool(self.nest.reductions()) and len(shape) == self.nest.rows and self.nest.window_width == 1
        return bool(shape) and not alone

    def flat_item(
        self, item: Expr, places: Places, value: str, merged: int, width: int, start: Expr, stop: Expr
    ) -> None:
        """Emit the vector that a thread has."""
        shape = [self.nest.extent(extent) for extent in self.nest.graph.tile(value).shape]
        if not self.has_columns(value):
            self.nest.store_vector(value, [self.nest.unravelled(item, shape)])
            return
        chunks = known(self.nest.values.simplified(tirx.floordiv(stop - start, width)))
        key = (str(chunks), *map(str, shape[:-merged]))
        if key not in places:
            chunk = b.bind(self.nest.values.simplified(tirx.floormod(item, chunks)))
            self.nest.within(chunk, chunks)
            row = b.bind(self.nest.values.simplified(tirx.floordiv(item, chunks)))
            places[key] = chunk, self.outer_index(row, shape[:-merged])
        chunk, outer = places[key]
        self.nest.vector(value, outer, start + chunk * width, width)

    def outer_index(self, row: Expr, extents: Sequence[Expr]) -> Index:
        """Return a row's position along each axis, as the mapping orders rows."""
        spread = self.nest.mapping.spread
        if spread == 1:
            return self.nest.bound_index(row, extents)
        check(len(extents) > 1 and int(extents[-2]) % spread == 0, "rows alternate over no axis")
        whole = tirx.floordiv(extents[-2], spread)
        *front, high, last, low = self.nest.bound_index(row, [*extents[:-2], whole, extents[-1], spread])
        return (*front, self.nest.values.simplified(high * spread + low), last)


def whole_waves(count: int) -> int:
    """Return the threads of whole warps, 32 lanes or 64, that have so many vectors."""
    return -(-count // 64) * 64


UNITS = 132
"""Blocks that a GPU should have at least."""

SECTOR_LANES = 2
"""Vectors of 16 bytes in a memory sector, the smallest access."""

LOADS_AT_ONCE = 4
"""Positions that a thread loads before it sums them."""


class SpatialSums:
    """The sums of one chain, all along the same axes.

    sums: The reductions of each sum, the outermost first: the operand of each is the next.
    extents: Extent of the axis of each reduction.
    """

    def __init__(self, nest: GpuNest, sums: Sequence[Sequence[Node]], extents: Sequence[int]) -> None:
        self.nest, self.sums, self.extents = nest, sums, list(extents)
        shape = nest.graph.tile(nest.graph.outputs[0]).shape
        self.channels, self.outer = int(shape[-1]), [int(extent) for extent in shape[:-1]]
        tiles = [node.tile for node in nest.graph.inputs if len(node.tile.shape) > 1]
        sizes = [BYTES.get(stored_type(tile.ttype.name), ACCESS_BYTES) for tile in tiles]
        self.width = ACCESS_BYTES // min(sizes, default=ACCESS_BYTES)
        while self.channels % self.width:
            self.width //= 2
        self.vectors = self.channels // self.width
        self.lanes = 8
        while self.lanes > SECTOR_LANES and prod(self.outer) * -(-self.vectors // self.lanes) < UNITS:
            self.lanes //= 2
        work = prod(self.extents) * self.lanes
        threads = 512 if work >= 2048 else 256 if work >= 512 else 128
        self.threads = min(threads, machine_of(nest.dialect.device).threads)

    @staticmethod
    def of(nest: GpuNest) -> SpatialSums | None:
        """Return the sums of a chain; None if the chain does not consist of such sums."""
        graph = nest.graph
        shapes = {graph.tile(value).shape for value in graph.outputs}
        shape = next(iter(shapes))
        if len(shapes) != 1 or nest.scatters or not shape or len(shape) != nest.rows:
            return None
        if not all(isinstance(extent, int) for extent in shape):
            return None
        index = tuple(nest.probe(f"w{axis}", nest.extent(extent)) for axis, extent in enumerate(shape))
        needed = {node.name: (node, at) for v in graph.outputs for node, at in nest.values.needed(v, index)}
        found = [SpatialSums.series(nest, node, at, index[-1]) for node, at in needed.values()]
        sums = [one for one in found if one is not None]
        if not sums or len(sums) < len(found) or len({tuple(extents) for _, extents in sums}) != 1:
            return None
        if {computed_type(node.tile.ttype.name) for series, _ in sums for node in series} != {"float32"}:
            return None
        return SpatialSums(nest, [series for series, _ in sums], sums[0][1])

    @staticmethod
    def series(nest: GpuNest, node: Node, at: Index, channel: Expr) -> tuple[list[Node], list[int]] | None:
        """Return the reductions of a sum, and their extents; None if it is of something else.

        channel: Where the result lies along its last axis: so must what is summed.
        """
        nodes: list[Node] = []
        extents: list[int] = []
        needed = [(node, at)]
        while needed:
            node, at = needed[0]
            it = Reduction(nest, node, at)
            if len(needed) > 1 or not isinstance(it.extent, int) or node.operator != "reduce_sum":
                return None
            if nodes and not _is_moved(nest.graph, nodes[-1].inputs[0], node):
                return None
            nodes.append(node)
            extents.append(it.extent)
            place = it.at(nest.probe(f"k{len(nodes)}", it.extent))
            needed = nest.values.needed(it.operand, place)
        along = nest.values.simplified(place[-1] - channel)
        return (nodes, extents) if isinstance(along, int | tirx.IntImm) and int(along) == 0 else None

    def emit(self) -> None:
        nest, warps = self.nest, self.threads // self.nest.dialect.wave
        chunks = -(-self.vectors // self.lanes)
        words = len(self.sums) * warps * self.lanes * self.width
        block, thread = nest.start(prod(self.outer) * chunks, self.threads, words)
        rows = nest.dialect.wave // self.lanes
        lane = b.bind(tirx.floordiv(tirx.floormod(thread, nest.dialect.wave), rows))
        first = b.bind(tirx.floordiv(thread, nest.dialect.wave) * rows + tirx.floormod(thread, rows))
        chunk = b.bind(tirx.floormod(block, chunks)) if chunks > 1 else 0
        row = nest.bound_index(tirx.floordiv(block, chunks), self.outer)
        vector = b.bind(tirx.min(chunk * self.lanes + lane, self.vectors - 1))
        self.share(self.summed(row, vector, first), thread, lane)
        with b.when(tirx.And(thread < self.lanes * self.width, self.channel(chunk, thread) < self.channels)):
            self.finish((*row, b.bind(self.channel(chunk, thread))), thread, warps)

    def channel(self, chunk: Expr, thread: Expr) -> Expr:
        return chunk * (self.lanes * self.width) + thread

    def summed(self, row: Index, vector: Expr, first: Expr) -> list[b.Variable]:
        """Emit a thread's sums of its vector of channels, one after the other."""
        nest, step = self.nest, self.threads // self.lanes
        it = Reduction(nest, self.sums[0][0], (*row, 0))
        totals = [b.Variable(it.dtype, it.neutral) for _ in range(len(self.sums) * self.width)]
        count = prod(self.extents)
        turns = -(-count // (step * LOADS_AT_ONCE))
        with nest.loop(turns) as turn:
            for part in range(LOADS_AT_ONCE):
                number = b.bind((turn * LOADS_AT_ONCE + part) * step + first)
                position = b.bind(tirx.min(number, count - 1))
                nest.within(position, count)
                spread = nest.bound_index(position, self.extents)
                found: list[Expr] = []
                for series in self.sums:
                    index = [(*row, vector * self.width + at) for at in range(self.width)]
                    places = [self.place(series, each, spread) for each in index]
                    found += nest.elements(series[-1].inputs[0], places)
                for total, value in zip(totals, found, strict=True):
                    total.set(total.value + T.if_then_else(number < count, value, it.neutral))
                nest.vectors.words.clear()
                nest.values.forget()
        return totals

    def needed(self, index: Index) -> dict[str, Index]:
        """Return where each sum lies that the results at an index are made of."""
        values, outputs = self.nest.values, self.nest.graph.outputs
        return {node.name: at for value in outputs for node, at in values.needed(value, index)}

    def place(self, series: Sequence[Node], index: Index, positions: Index) -> Index:
        """Return where the innermost operand is read for an element of the result."""
        at = self.needed(index)[series[0].name]
        for number, (node, position) in enumerate(zip(series, positions, strict=True)):
            it = Reduction(self.nest, node, at)
            at = it.at(position)
            if number + 1 < len(series):
                ((_, at),) = self.nest.values.needed(it.operand, at)
        return at

    def share(self, totals: Sequence[b.Variable], thread: Expr, lane: Expr) -> None:
        """Emit the sums of a warp's threads, one set per warp in shared memory."""
        dialect = self.nest.dialect
        rows = dialect.wave // self.lanes
        found = [total.value for total in totals]
        distance = 1
        while distance < rows:
            found = [b.bind(value + dialect.shuffle(value, distance, thread)) for value in map(b.bind, found)]
            distance *= 2
        warp, set_ = tirx.floordiv(thread, dialect.wave), self.lanes * self.width
        with b.when(tirx.floormod(thread, rows) == 0):
            for at, value in enumerate(found):
                number, channel = divmod(at, self.width)
                begin = (warp * len(self.sums) + number) * set_ + lane * self.width
                b.store(dialect.shared, reinterpreted("uint32", value), begin + channel)
        dialect.sync()

    def finish(self, index: Index, thread: Expr, warps: int) -> None:
        """Emit a channel's sums over warps, and what is computed of them."""
        nest, places = self.nest, self.needed(index)
        for number, (node, *_) in enumerate(self.sums):
            total: Expr = None
            for warp in range(warps):
                begin = (warp * len(self.sums) + number) * self.lanes * self.width
                read = T.reinterpret("float32", nest.dialect.shared[begin + thread])
                total = read if total is None else total + read
            nest.keep_cell(node, places[node.name], b.bind(total))
        for value in nest.graph.outputs:
            nest.store_vector(value, [index])


def _is_moved(graph: Graph, value: str, node: Node) -> bool:
    """Tell whether a value has elements of a node's result as they are: nothing is computed of them."""
    while value != node.name:
        producer = graph.producer(value)
        if get_operator(producer.operator).engine != "view":
            return False
        (value,) = producer.inputs
    return True


DIALECTS: dict[str, type[Dialect]] = {"cuda": CudaDialect, "rocm": RocmDialect}
"""Target kind -> how kernels for it are written."""


class GpuChain:
    """One kernel of a chain; parameters as `GpuNest`."""

    def __init__(self, chain: Chain, dialect: Dialect, mapping: Mapping, cheap: bool = False) -> None:
        self.nest = GpuNest(chain, dialect, mapping, cheap)

    def emit(self) -> None:
        nest = self.nest
        if nest.mapping.tile[0]:
            emit_tiles(nest)
        elif nest.lanes == 1:
            VectorLoops(nest).emit()
        elif (sums := SpatialSums.of(nest)) is not None:
            sums.emit()
        else:
            RowLoops(nest).emit()
