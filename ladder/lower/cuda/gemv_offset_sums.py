"""Sums of x over the tiles of K, once per block of a cluster, where raw operands leave their offset.

Every weight row needs the same sums, so the warps of a block share them: as soon as a buffer
of x has arrived, each warp multiplies some of its tiles by ones and leaves the sums in shared
memory, ``[buffer][tile][m]``. A flush then reads those of the tiles that it covers.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.activations import SPAN_CHUNKS, SpanLoader
from ladder.lower.cuda.gemv_place import Warp
from ladder.lower.cuda.gemv_spec import Spec
from ladder.lower.gpu.accumulators import ONES
from ladder.lower.gpu.instructions import STEP_COLUMNS
from schedules.footprint import X_BUFFERS, X_SUMS


class OffsetSums:
    """The table of one block, and this thread's place in it.

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
