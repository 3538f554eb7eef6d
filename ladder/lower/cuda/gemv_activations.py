"""x of a gemv kernel: it passes through buffers in shared memory, in chunks of K.

A buffer holds ``rounds`` rounds of each activation row: the fewer rows, the more rounds. A round is
one run of tiles for every slice of K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.activations import SPAN_CHUNKS, Copier, RunLoader, SpanLoader
from ladder.lower.cuda.gemv_geometry import Spec
from ladder.lower.cuda.gemv_place import Place, Warp
from ladder.lower.gpu.accumulators import ONES
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS, ActivationTile
from ladder.lower.gpu.instructions import STEP_COLUMNS
from schedules.footprint import X_BUFFERS, X_SUMS
from schedules.layouts import TILE


class OffsetSums:
    """Sums of x over tiles of K, once per block of a cluster, where raw operands leave their offset.

    Every weight row needs the same ones. As soon as a buffer of x has arrived, each warp multiplies some of
    its tiles by ones and leaves the sums in shared memory, ``[buffer][tile][m]``, where a flush reads them.

    pool: Shared memory.
    """

    def __init__(self, spec: Spec, warp: Warp, pool: Any) -> None:
        self.spec, self.geo, self.step, self.warp = spec, spec.geo, spec.step, warp
        self.tile_m = spec.schedule.tile_m
        self.table = pool.alloc((X_BUFFERS * X_SUMS,), self.step.carrier, align=128)
        self.place = b.Variable("uint32", T.uint32(0))
        self.tiles: range = range(0)

    def fill(self, loader: SpanLoader, x: Any, buffer: Expr, tiles: Expr) -> None:
        """Emit the sums of the first ``tiles`` tiles of a buffer of ``x``; the block must wait for them."""
        operand, lane = self.spec.decoder.operand, self.warp.lane
        blocks, warps = self.spec.row_blocks, self.geo.threads // 32
        warp, count = b.bind(self.warp.thread // 32), b.bind(tiles * blocks)
        loaded, sums = b.local(4, "uint32"), b.local(4, self.step.carrier)
        one = T.uint32(ONES[operand])
        with b.loop(b.bind((count - warp + warps - 1) // warps), rolled=True) as iteration:
            unit = b.bind(iteration * warps + warp)
            tile, block = b.bind(unit // blocks), b.bind(unit % blocks)
            for i in range(4):
                b.store(sums, T.Cast(self.step.carrier, 0), i)
            for chunk in range(0, self.geo.tile_chunks, SPAN_CHUNKS):
                at = buffer * self.geo.buffer_chunks + tile * self.geo.tile_chunks + chunk
                loader.load(x, [], block * STEP_COLUMNS, at, loaded)
                for step in range(2):
                    operands = [loaded[2 * step], loaded[2 * step + 1]]
                    self.step.emit(operand, sums, 0, [one] * 4, operands)
            with b.when(lane < 4):  # all weight rows are alike
                at = buffer * X_SUMS + tile * self.tile_m + block * STEP_COLUMNS
                for i in range(2):
                    b.store(self.table, sums[i], at + self.step.lanes.column(lane, i))

    def begin(self, buffer: Expr) -> None:
        """Go to this slice's first run of a buffer."""
        first = self.warp.slice * self.geo.run
        pair = self.step.lanes.column(self.warp.lane, 0)
        word = self.table.ptr_to([buffer * X_SUMS + first * self.tile_m + pair])
        self.place.set(T.cuda.cvta_generic_to_shared(word))

    def advance(self) -> None:
        """Go to the slice's next run."""
        self.place.set(self.place.value + T.uint32(4 * self.geo.round_tiles * self.tile_m))

    def read(self, block: int) -> list[Expr]:
        """Return the sums of a lane's two activation rows over ``self.tiles`` of the run, as the carrier."""
        loaded = b.local(2 * len(self.tiles), "uint32")
        for index, tile in enumerate(self.tiles):
            at = self.place.value + T.uint32(4 * (tile * self.tile_m + block * STEP_COLUMNS))
            b.ptx("ld.shared.v2.u32", loaded[2 * index], loaded[2 * index + 1], at)
        parts = [T.reinterpret(loaded[i], dtype=self.step.carrier) for i in range(2 * len(self.tiles))]
        return [b.bind(reduce(add, parts[i::2])) for i in range(2)]


COPIED = 4
"""Chunks of an activation row that a thread copies in one iteration."""


@dataclass(frozen=True)
class CopyShare:
    """One thread's copies of a buffer.

    first_m, m_step: First activation row, and the step to the thread's next one.
    first_piece, piece_step: First chunk of a row, and the step to the chunks of the next iteration.
    """

    first_m: Expr
    m_step: Expr
    first_piece: Expr
    piece_step: Expr


def copy_share(spec: Spec, place: Place, shift: Expr) -> CopyShare:
    """Share activation rows among warps, or warps among rows: all copy however few the rows are.

    ``shift`` is the logarithm of the number of rows, rounded up.
    """
    warps = spec.geo.threads // 32
    shared = b.keep(T.min(shift, warps.bit_length() - 1))
    warp, groups = b.bind(place.warp.thread // 32), b.bind(T.int32(warps) >> shared)
    group = b.bind(warp >> shared)
    m_step = b.keep(T.int32(1) << shared)
    row = T.bitwise_and(warp, m_step - 1)
    first_m = b.keep(T.if_then_else(group < groups, row, place.m_count))
    first_piece = b.keep(group * (32 * COPIED) + place.warp.lane)
    return CopyShare(first_m, m_step, first_piece, b.keep(groups * (32 * COPIED)))


class Activations:
    """The buffers of x, the copies into them and the loads from them.

    shared: The buffers: uint32 words of shared memory.
    sums: Sums of x that the block shares, if it does.
    """

    def __init__(
        self, spec: Spec, place: Place, copier: Copier, shared: Any, sums: OffsetSums | None
    ) -> None:
        self.spec, self.place, self.copier, self.shared, self.sums = spec, place, copier, shared, sums
        geo, tile_m = spec.geo, spec.schedule.tile_m
        # M as the next power of two: shifts instead of divisions by what only the launch knows.
        doublings = (2**i for i in range((tile_m - 1).bit_length()))
        shift = b.keep(sum(T.Cast("int32", place.m_count > count) for count in doublings))
        units = self._units(shift)
        self.rounds = b.keep(units * geo.unit_rounds)
        self.row_chunks = b.keep(units * geo.unit_chunks)
        self.tile = ActivationTile(self.row_chunks)
        self.share = copy_share(spec, place, shift)
        self.buffer = b.Variable("int32", 0)
        self.rounds_left = b.Variable("int32", 0)
        self.next_chunk = b.Variable("int32", place.share.first * geo.tile_chunks)
        self.end_column = b.keep(T.min(place.args.k_x, place.share.end * TILE))
        lanes = spec.step.lanes
        aligned = geo.run * geo.tile_chunks % 8 == 0 and not lanes.partial_lanes
        last = place.m_count - 1
        self.loader = RunLoader(
            lanes, place.warp.lane, self.tile, spec.row_blocks, last, shared, aligned=aligned
        )

    def _units(self, shift: Expr) -> Expr:
        """Return the units of rounds that a buffer holds of each activation row."""
        geo, tiles = self.spec.geo, self.place.share.count
        unit = geo.unit_rounds * geo.round_tiles
        fitting = T.int32(geo.buffer_chunks // geo.unit_chunks) >> shift
        if self.sums is not None:
            fitting = T.min(fitting, X_SUMS // self.spec.schedule.tile_m // unit)
        needed = (tiles + unit - 1) // unit
        # Long rows of x come in as many pieces as there are buffers: work begins with the first.
        even = T.max((needed + X_BUFFERS - 1) // X_BUFFERS, T.int32(geo.least_units) >> shift)
        return T.min(fitting, T.min(needed, even))

    def fill(self) -> None:
        """Start the first copies."""
        with b.loop(X_BUFFERS - 1, rolled=True) as buffer:
            self._copy(buffer)

    def ensure(self) -> None:
        """Go to the next buffer where the current one is used up."""
        with b.when(self.rounds_left.value == 0):
            self._next_buffer()

    def advance(self) -> None:
        """Go to the slice's next run."""
        geo = self.spec.geo
        self.loader.advance(geo.round_tiles * geo.tile_chunks)
        if self.sums is not None:
            self.sums.advance()
        self.rounds_left.set(self.rounds_left.value - 1)

    def _next_buffer(self) -> None:
        """Wait for a buffer, and start the copy of what follows into the one used before."""
        geo = self.spec.geo
        self.copier.wait(X_BUFFERS - 2)
        b.block_sync()
        mine = self.place.warp.slice * (geo.run * geo.tile_chunks)
        current = b.keep(self.buffer.value)
        self.loader.begin(current * geo.buffer_chunks + mine)
        self.rounds_left.set(self.rounds)
        if self.sums is not None:
            self.sums.fill(self.loader.general, self.shared, current, self.rounds * geo.round_tiles)
            self.sums.begin(current)
            b.block_sync()
        self._copy(T.if_then_else(current == 0, X_BUFFERS - 1, current - 1))
        self.buffer.set(T.if_then_else(current == X_BUFFERS - 1, 0, current + 1))

    @property
    def _chunk_elements(self) -> int:
        return CHUNK_BYTES // self.spec.step.element_bytes

    def _copy(self, buffer: Expr) -> None:
        """Emit the copy of x from chunk ``next_chunk`` of K on into a buffer; zeros beyond x."""
        geo, place, share = self.spec.geo, self.place, self.share
        first = b.bind(self.next_chunk.value)
        column = b.bind((first + share.first_piece) * self._chunk_elements)
        whole = b.bind((first + self.row_chunks) * self._chunk_elements <= self.end_column)
        with b.when(first < place.share.end * geo.tile_chunks):
            row = b.Variable("int32", share.first_m)
            with b.repeat_while(row.value < place.m_count):
                word = self.tile.word(row.value, share.first_piece)
                self._copy_row(row.value, column, buffer * (geo.buffer_chunks * CHUNK_WORDS) + word, whole)
                row.set(row.value + share.m_step)
            self.next_chunk.set(self.next_chunk.value + self.row_chunks)
        self.copier.commit()

    def _copy_row(self, row: Expr, column: Expr, word: Expr, whole: Expr) -> None:
        """Emit this thread's part of copying a row: every 32nd of each `COPIED` x 32 chunks.

        What a warp copies at a time is whole rows of the swizzle, so that places follow from the first.
        ``whole`` says that no chunk is beyond x; else each is compared.
        """
        m, size, x = self.place.first_m + row, self._chunk_elements, self.place.args.x
        target = b.Variable("uint32", T.cuda.cvta_generic_to_shared(self.shared.ptr_to([word])))
        # Of 64 bits, so that columns of an iteration are immediate offsets of one address.
        at, source = b.Variable("int32", self.share.first_piece), b.Variable("int64", T.Cast("int64", column))
        last = b.keep(T.if_then_else(whole, self.row_chunks, 0) - 32 * (COPIED - 1))
        with b.repeat_while(at.value < self.row_chunks):
            steps = range(0, 32 * COPIED, 32)
            places = [
                (source.value + T.int64(i * size), target.value + T.uint32(i * CHUNK_BYTES)) for i in steps
            ]
            with b.when(at.value < last):
                for column, place in places:
                    self.copier.chunk(place, x.ptr_to([m, column]))
            with b.when(at.value >= last):
                for i, (column, place) in zip(steps, places, strict=True):
                    with b.when(at.value + i < self.row_chunks):
                        valid = b.bind(column < self.end_column)
                        source_at = x.ptr_to([m, T.if_then_else(valid, column, T.int64(0))])
                        self.copier.chunk(place, source_at, valid)
            at.set(at.value + self.share.piece_step)
            source.set(source.value + T.Cast("int64", self.share.piece_step * size))
            target.set(target.value + T.Cast("uint32", self.share.piece_step * CHUNK_BYTES))
