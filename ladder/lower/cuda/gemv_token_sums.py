"""Sums of x over the tiles of K, once per block of a cluster, where raw operands leave their offset.

Every row of weights needs the same sums, so the warps of a block share them: as soon as a buffer
of x has arrived, each warp multiplies some of its tiles by ones and leaves the sums in shared
memory, ``[buffer][tile][token]``. A flush then reads those of the tiles that it covers.
"""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.tokens import SPAN_CHUNKS
from ladder.lower.gpu.groups import ONES
from ladder.lower.gpu.instructions import STEP_TOKENS, emit_step
from schedules.legal import TOKEN_BUFFERS, TOKEN_SUMS

if TYPE_CHECKING:
    from ladder.lower.cuda.gemv import Gemv

Expr = Any


class TokenSums:
    """The table of one block, and this thread's place in it.

    Parameters
    ----------
    kernel
        The kernel; its geometry, step and lane are used.
    pool
        Shared memory.
    """

    def __init__(self, kernel: Gemv, pool: Any) -> None:
        self.kernel, self.geo, self.step = kernel, kernel.geo, kernel.step
        self.tokens = kernel.schedule.tile_m
        self.table = pool.alloc((TOKEN_BUFFERS * TOKEN_SUMS,), self.step.carrier, align=128)
        self.place = b.Variable("uint32", T.uint32(0))
        self.tiles: range = range(0)

    def fill(self, buffer: Expr, tiles: Expr) -> None:
        """Emit the sums of the first ``tiles`` tiles of a buffer of x; the block must wait for them."""
        kernel, blocks = self.kernel, self.tokens // STEP_TOKENS
        warps = self.geo.threads // 32
        warp, count = b.bind(kernel.thread // 32), b.bind(tiles * blocks)
        loaded, sums = b.local(4, "uint32"), b.local(4, self.step.carrier)
        one = T.uint32(ONES[kernel.decoder.operand])
        with b.loop(b.bind((count - warp + warps - 1) // warps), rolled=True) as turn:
            unit = b.bind(turn * warps + warp)
            tile, block = b.bind(unit // blocks), b.bind(unit % blocks)
            for i in range(4):
                b.store(sums, T.Cast(self.step.carrier, 0), i)
            for chunk in range(0, self.geo.tile_chunks, SPAN_CHUNKS):
                at = buffer * self.geo.buffer_chunks + tile * self.geo.tile_chunks + chunk
                kernel.loader.general.load(kernel.tokens, [], block * STEP_TOKENS, at, loaded)
                for step in range(2):
                    operands = [loaded[2 * step], loaded[2 * step + 1]]
                    emit_step(self.step, kernel.decoder.operand, sums, 0, [one] * 4, operands)
            with b.when(kernel.lane < 4):  # all rows are alike
                at = buffer * TOKEN_SUMS + tile * self.tokens + block * STEP_TOKENS
                for i in range(2):
                    b.store(self.table, sums[i], at + self.step.lanes.token(kernel.lane, i))

    def begin(self, buffer: Expr) -> None:
        """Go to this slice's first run of a buffer."""
        first = self.kernel.slice * self.geo.run
        pair = self.step.lanes.token(self.kernel.lane, 0)
        word = self.table.ptr_to([buffer * TOKEN_SUMS + first * self.tokens + pair])
        self.place.set(T.cuda.cvta_generic_to_shared(word))

    def advance(self) -> None:
        """Go to the slice's next run."""
        self.place.set(self.place.value + T.uint32(4 * self.geo.round_tiles * self.tokens))

    def read(self, token_block: int) -> list[Expr]:
        """Return the sums of a lane's two tokens over ``self.tiles`` of the run, as the carrier."""
        loaded = b.local(2 * len(self.tiles), "uint32")
        for index, tile in enumerate(self.tiles):
            at = self.place.value + T.uint32(4 * (tile * self.tokens + token_block * STEP_TOKENS))
            b.ptx("ld.shared.v2.u32", loaded[2 * index], loaded[2 * index + 1], at)
        parts = [T.reinterpret(loaded[i], dtype=self.step.carrier) for i in range(2 * len(self.tiles))]
        return [b.bind(reduce(add, parts[i::2])) for i in range(2)]
