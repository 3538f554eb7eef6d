"""Tiles of x in shared memory: copies and B-operand fragments.

Index functions work on Python integers and on TIR expressions alike.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS, ActivationTile
from ladder.lower.gpu.instructions import STEP_BYTES, LaneMap
from targets import TileDevice

SPAN_STEPS = 2
"""Steps that one ``ldmatrix.x4`` feeds: 64 bytes of K for eight activation rows."""

SPAN_CHUNKS = SPAN_STEPS * STEP_BYTES // CHUNK_BYTES

HALF_BYTES = SPAN_CHUNKS * CHUNK_BYTES
"""Bytes of half a row of eight chunks: one span."""

LOAD_SPAN = "ldmatrix.sync.aligned.m8n8.x4.shared.b16"


def matrix_source(lane: Expr) -> tuple[Expr, Expr]:
    """Return ``(activation row, chunk)`` whose address lane ``lane`` gives to the ``ldmatrix.x4`` of a span.

    Matrix i holds eight activation rows of chunk i, so the four results are b0, b1 of the first step
    and b0, b1 of the second (PTX ISA, ldmatrix).
    """
    return lane % 8, lane // 8


def word_source(lanes: LaneMap, lane: Expr, index: int) -> tuple[Expr, Expr, Expr]:
    """Return ``(row, chunk, word)`` of register ``index`` of a span, for lanes without ldmatrix."""
    row, word = lanes.operand(lane)
    return row, index, word


class SpanLoader:
    """Emits loads of the B operands of a span: four registers per eight activation rows.

    lane: Lane of the warp.
    last: Row that stands for every row after it (rows beyond M repeat a real one), or None.
    """

    def __init__(self, lanes: LaneMap, lane: Expr, tile: ActivationTile, last: Expr | None = None) -> None:
        self.lanes, self.lane, self.tile, self.last = lanes, lane, tile, last

    def _row(self, row: Expr) -> Expr:
        return row if self.last is None else T.min(row, self.last)

    def load(self, shared: Any, base: list[Expr], first_row: Expr, chunk: Expr, out: Any) -> None:
        """Emit the loads of activation rows ``first_row..+8`` and chunks ``chunk..+4`` into ``out[0:4]``.

        ``shared`` is a uint32 buffer; ``base`` holds its leading indices.
        """
        if self.lanes.partial_lanes:
            for i in range(4):
                row, piece, word = word_source(self.lanes, self.lane, i)
                at = self.tile.word(self._row(first_row + row), chunk + piece) + word
                b.store(out, shared[(*base, at)], i)
            return
        row, piece = matrix_source(self.lane)
        at = self.tile.word(self._row(first_row + row), chunk + piece)
        b.ptx(LOAD_SPAN, *(out[i] for i in range(4)), shared.ptr_to([*base, at]))


class RunLoader:
    """Emits the loads of `SpanLoader` for runs of K whose start changes while the rest is known.

    Where runs start at multiples of eight chunks, the swizzle permutes chunks that are known
    when the kernel is emitted: a lane then keeps the addresses of its two halves of such a row,
    which differ in one bit, and everything else is an immediate offset.

    lanes, lane, tile, last: As for `SpanLoader`; rows of ``tile`` are multiples of 8 chunks.
    blocks: Blocks of eight activation rows.
    shared: The uint32 buffer that holds the tile.
    aligned: Whether runs start at multiples of eight chunks.
    """

    def __init__(
        self,
        lanes: LaneMap,
        lane: Expr,
        tile: ActivationTile,
        blocks: int,
        last: Expr,
        shared: Any,
        *,
        aligned: bool,
    ) -> None:
        self.general = SpanLoader(lanes, lane, tile, b.keep(last))
        self.shared, self.start = shared, b.Variable("int32", 0)
        row, piece = matrix_source(lane)
        rows = (T.min(block * 8 + row, last) for block in range(blocks if aligned else 0))
        self.rows = [b.keep(tile.word(row, piece)) for row in rows]
        self.addresses = [b.Variable("uint32", T.uint32(0)) for _ in self.rows]

    def begin(self, start: Expr) -> None:
        """Emit what it takes to go to the run that starts at chunk ``start``."""
        self.start.set(start)
        for row, address in zip(self.rows, self.addresses, strict=True):
            word = self.shared.ptr_to([self.start.value * CHUNK_WORDS + row])
            address.set(T.cuda.cvta_generic_to_shared(word))

    def advance(self, chunks: int) -> None:
        """Emit the step to a run ``chunks`` further on."""
        self.start.set(self.start.value + chunks)
        for address in self.addresses:
            address.set(address.value + T.uint32(chunks * CHUNK_BYTES))

    def load(self, block: int, chunk: int, out: Any) -> None:
        """Emit the loads of a block along M and of chunks ``chunk..+4`` of the run."""
        if not self.addresses:
            self.general.load(self.shared, [], block * 8, self.start.value + chunk, out)
            return
        whole, part = divmod(chunk, 8)
        address = self.addresses[block].value ^ T.uint32(part // SPAN_CHUNKS * HALF_BYTES)
        b.ptx(LOAD_SPAN, *(out[i] for i in range(4)), address + T.uint32(whole * 8 * CHUNK_BYTES))


class Copier:
    """Emits 16-byte copies from global to shared memory, asynchronous where the device can."""

    def __init__(self, device: TileDevice) -> None:
        self.asynchronous = "cp.async" in device.features

    def chunk(self, destination: Expr, source: Expr, valid: Expr | None = None) -> None:
        """Emit one copy; where ``valid`` is false, zeros are written and ``source`` is not read."""
        if self.asynchronous:
            size = [] if valid is None else [T.Cast("uint32", valid) * T.uint32(CHUNK_BYTES)]
            b.ptx("cp.async.cg.shared.global", destination, source, CHUNK_BYTES, *size)
            return
        words = b.local(CHUNK_WORDS, "uint32")
        registers = [words[i] for i in range(CHUNK_WORDS)]
        if valid is None:
            b.ptx("ld.global.nc.v4.u32", *registers, source)
        else:
            for i in range(CHUNK_WORDS):
                b.store(words, T.uint32(0), i)
            with b.when(valid):
                b.ptx("ld.global.nc.v4.u32", *registers, source)
        b.ptx("st.shared.v4.u32", destination, *registers)

    def commit(self) -> None:
        """Close the group of copies emitted since the last commit."""
        if self.asynchronous:
            b.ptx("cp.async.commit_group")

    def wait(self, pending: int) -> None:
        """Emit a wait until at most ``pending`` groups of this thread are in flight."""
        if self.asynchronous:
            b.ptx("cp.async.wait_group", pending)


class SharedCopier(Copier):
    """Emits 16-byte copies within shared memory; nothing of them is in flight once a barrier is passed."""

    def chunk(self, destination: Expr, source: Expr, valid: Expr | None = None) -> None:
        words = b.local(CHUNK_WORDS, "uint32")
        registers = [words[i] for i in range(CHUNK_WORDS)]
        if valid is not None:
            for i in range(CHUNK_WORDS):
                b.store(words, T.uint32(0), i)
        with b.where(valid):
            b.ptx("ld.shared.v4.u32", *registers, source)
        b.ptx("st.shared.v4.u32", destination, *registers)

    def commit(self) -> None:
        """Close nothing: copies are done when they are emitted."""

    def wait(self, pending: int) -> None:
        """Wait for nothing."""
