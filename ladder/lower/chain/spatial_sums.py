"""Spatial reductions: sums along axes before the channels (means over an image), a block per few channels.

A thread sums a vector of channels over every n-th position; threads join their sums by shuffles, then through
shared memory. All 32 bytes of a memory sector are used.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from tvm import tirx
from tvm.script import tirx as T

from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.scalars import reinterpreted
from ladder.lower import builder as b
from ladder.lower.chain.element_types import stored_type
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.indices import Index
from ladder.lower.chain.nest import BYTES, Reduction
from ladder.lower.chain.vectors import WIDE
from ladder.movement.machines import machine_of

Expr = Any

UNITS = 132
"""Blocks that a GPU should have at least."""

SECTOR_LANES = 2
"""Vectors of 16 bytes in the least that memory brings."""

TOGETHER = 4
"""Positions that a thread loads before it sums them."""


class SpatialSums:
    """The sums of one chain.

    series: Reductions, the outermost first: each sums what the next gives.
    extents: Of the axis of each.
    """

    def __init__(self, nest: GpuNest, series: Sequence[Node], extents: Sequence[int]) -> None:
        self.nest, self.series, self.extents = nest, series, list(extents)
        self.value = nest.graph.outputs[0]
        shape = nest.graph.tile(self.value).shape
        self.channels, self.outer = int(shape[-1]), [int(extent) for extent in shape[:-1]]
        tiles = [node.tile for node in nest.graph.inputs if len(node.tile.shape) > 1]
        sizes = [BYTES.get(stored_type(tile.ttype.name), WIDE) for tile in tiles]
        self.width = WIDE // min(sizes, default=WIDE)
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
        """Return the sums of a chain; None if it is none of this form."""
        if len(nest.graph.outputs) != 1 or nest.scatters:
            return None
        shape = nest.graph.tile(nest.graph.outputs[0]).shape
        if not shape or len(shape) != nest.rows or not all(isinstance(extent, int) for extent in shape):
            return None
        index = tuple(nest.probe(f"w{axis}", nest.extent(extent)) for axis, extent in enumerate(shape))
        series: list[Node] = []
        extents: list[int] = []
        value, place = nest.graph.outputs[0], index
        while needed := nest.values.needed(value, place):
            node, at = needed[0]
            it = Reduction(nest, node, at)
            if len(needed) > 1 or not isinstance(it.extent, int) or node.operator != "reduce_sum":
                return None
            if series and not _is_moved(nest.graph, value, node):
                return None
            series.append(node)
            extents.append(it.extent)
            value, place = it.operand, it.at(nest.probe(f"k{len(series)}", it.extent))
        along = bool(series) and nest.values.simplified(place[-1] - index[-1])
        return (
            SpatialSums(nest, series, extents)
            if isinstance(along, int | tirx.IntImm) and int(along) == 0
            else None
        )

    def emit(self) -> None:
        """Emit the whole kernel."""
        nest, warps = self.nest, self.threads // self.nest.dialect.wave
        chunks = -(-self.vectors // self.lanes)
        block, thread = nest.start(prod(self.outer) * chunks, self.threads, warps * self.lanes * self.width)
        rows = nest.dialect.wave // self.lanes
        lane = b.bind(tirx.floordiv(tirx.floormod(thread, nest.dialect.wave), rows))
        first = b.bind(tirx.floordiv(thread, nest.dialect.wave) * rows + tirx.floormod(thread, rows))
        chunk = b.bind(tirx.floormod(block, chunks)) if chunks > 1 else 0
        row = nest.bound_index(tirx.floordiv(block, chunks), self.outer)
        vector = b.bind(tirx.min(chunk * self.lanes + lane, self.vectors - 1))
        totals = self.summed(row, vector, first)
        self.share(totals, thread, lane)
        with b.when(tirx.And(thread < self.lanes * self.width, self.channel(chunk, thread) < self.channels)):
            self.finish((*row, b.bind(self.channel(chunk, thread))), thread, warps)

    def channel(self, chunk: Expr, thread: Expr) -> Expr:
        return chunk * (self.lanes * self.width) + thread

    def summed(self, row: Index, vector: Expr, first: Expr) -> list[b.Variable]:
        """Emit a thread's sums of its vector of channels."""
        nest, step = self.nest, self.threads // self.lanes
        it = Reduction(nest, self.series[0], (*row, 0))
        totals = [b.Variable(it.dtype, it.neutral) for _ in range(self.width)]
        count = prod(self.extents)
        turns = -(-count // (step * TOGETHER))
        with b.loop(turns) as turn, nest.ranged(turn, turns):
            for part in range(TOGETHER):
                number = b.bind((turn * TOGETHER + part) * step + first)
                position = b.bind(tirx.min(number, count - 1))
                nest.within(position, count)
                spread = nest.bound_index(position, self.extents)
                places = [self.place((*row, vector * self.width + at), spread) for at in range(self.width)]
                found = nest.elements(self.series[-1].inputs[0], places)
                for total, value in zip(totals, found, strict=True):
                    total.set(total.value + T.if_then_else(number < count, value, it.neutral))
                nest.vectors.words.clear()
                nest.values.forget()
        return totals

    def place(self, index: Index, positions: Index) -> Index:
        """Return where the innermost operand is read for an element of the result."""
        value = self.value
        for node, position in zip(self.series, positions, strict=True):
            ((_, index),) = self.nest.values.needed(value, index)
            it = Reduction(self.nest, node, index)
            value, index = it.operand, it.at(position)
        return index

    def share(self, totals: Sequence[b.Variable], thread: Expr, lane: Expr) -> None:
        """Emit the sums of a warp's threads, one set per warp in shared memory."""
        dialect = self.nest.dialect
        rows = dialect.wave // self.lanes
        sums = [total.value for total in totals]
        distance = 1
        while distance < rows:
            sums = [b.bind(value + dialect.shuffle(value, distance, thread)) for value in map(b.bind, sums)]
            distance *= 2
        begin = tirx.floordiv(thread, dialect.wave) * (self.lanes * self.width) + lane * self.width
        with b.when(tirx.floormod(thread, rows) == 0):
            for at, value in enumerate(sums):
                b.store(dialect.shared, reinterpreted("uint32", value), begin + at)
        dialect.sync()

    def finish(self, index: Index, thread: Expr, warps: int) -> None:
        """Emit a channel's sum over warps, and what is computed of it."""
        nest, node = self.nest, self.series[0]
        total: Expr = None
        for warp in range(warps):
            read = T.reinterpret("float32", nest.dialect.shared[warp * self.lanes * self.width + thread])
            total = read if total is None else total + read
        ((_, place),) = nest.values.needed(self.value, index)
        nest.keep_cell(node, place, b.bind(total))
        nest.store_vector(self.value, [index])


def _is_moved(graph: Graph, value: str, node: Node) -> bool:
    """Tell whether a value has elements of a node's result as they are: nothing is computed of them."""
    while value != node.name:
        producer = graph.producer(value)
        if get_operator(producer.operator).engine != "view":
            return False
        (value,) = producer.inputs
    return True
