"""Copies of tiles from device memory to shared memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.graph import Node
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.context import BlockContext
from ladder.lower.blocks.geometry import SPARE
from ladder.lower.blocks.shared import CHUNK_BYTES, CHUNK_ELEMENTS, TileLayout
from ladder.lower.cuda.bulk_copies import SWIZZLE_128, TENSOR_COPY, tiled_map
from tile_types.errors import ScheduleError

LINE_BYTES = 128
"""Bytes that a prefetch brings into L2."""

PREFETCHED_BYTES = 1 << 20
"""Tensors from this size on are prefetched: smaller ones, just computed, are in L2 already."""


@dataclass(frozen=True)
class Piece:
    """Sixteen bytes that a thread copies.

    place: Where they go: a byte of shared memory.
    tensor, element: Where they come from.
    exists: Whether the thread has such a piece.
    """

    place: Expr
    tensor: Any
    element: Expr
    exists: Expr


class Copy:
    """Copies one load's tile: the threads that share it take chunks in turn.

    node: The load. Its tile is a group's if it changes from step to step, else the block's.
    """

    def __init__(self, context: BlockContext, node: Node) -> None:
        geo, plan = context.geo, context.schedule
        self.context, self.node = context, node
        self.is_constant = node.inputs[0] in context.constants
        self.layout: Any = geo.layouts[node.name]
        self.looped = geo.is_looped(node)
        self.threads = plan.group_warps * geo.shape.lanes if self.looped else geo.threads
        self.offset = (geo.stage_offsets if self.looped else geo.offsets)[node.name]

    @property
    def bytes(self) -> int:
        """Bytes that arrive."""
        return int(self.layout.bytes)

    @property
    def is_streamed(self) -> bool:
        """Whether the tensor is worth prefetching."""
        return True

    def pieces(self, step: Expr, at: Expr) -> Iterator[Piece]:
        """Yield this thread's share of the copy.

        step: Step of the loop whose tile is copied.
        at: First byte of the stage in shared memory; 0 for a block's tile.
        """
        raise NotImplementedError

    def emit(self, step: Expr, at: Expr) -> None:
        """Emit this thread's share of the copy, asynchronously; the rest as for `pieces`."""
        for piece in self.pieces(step, at):
            target = self.context.shared.words.ptr_to([b.bind(piece.place // 4)])
            source = piece.tensor.ptr_to([piece.element])
            with nullcontext() if piece.exists is True else b.when(piece.exists):
                b.ptx("cp.async.cg.shared.global", target, source, CHUNK_BYTES)

    def fetch_map(self) -> None:
        """Fetch the tensor map, if there is one, so that the first copy does not wait for it."""

    def prefetch(self, step: Expr) -> None:
        """Bring a step's tile into L2, which is allowed while the kernel before still runs."""
        raise NotImplementedError

    def start(self, step: Expr, at: Expr, barrier: Expr) -> None:
        """Start the copies of a step's tile into the stage at byte ``at``; they count at a barrier."""
        raise NotImplementedError

    @property
    def _thread(self) -> Expr:
        threads = self.context.threads
        return threads.group_thread if self.looped else threads.thread


class TileCopy(Copy):
    """Copies a tile of 16-bit elements, 16 bytes at a time (cp.async)."""

    def __init__(self, context: BlockContext, node: Node) -> None:
        super().__init__(context, node)
        self.source = context.tensors[node.inputs[0]]
        if context.place.begin(node, None if not self.looped else 0)[1] % CHUNK_ELEMENTS:
            raise ScheduleError(f"%{node.name}: rows of its tensor do not begin at multiples of 16 bytes")

    @property
    def is_streamed(self) -> bool:
        return bool(self.source.shape[0] * 2 >= PREFETCHED_BYTES)

    def pieces(self, step: Expr, at: Expr) -> Iterator[Piece]:
        first, pitch = self.context.place.begin(self.node, step if self.looped else None)
        first, count = b.bind(first), self.layout.rows * self.layout.chunks
        for turn in range(-(-count // self.threads)):
            piece = b.bind(self._thread + turn * self.threads)
            row, chunk = b.bind(piece // self.layout.chunks), b.bind(piece % self.layout.chunks)
            place = T.Cast("int32", at) + self.offset + self.layout.byte(row, chunk)
            element = first + (row * pitch + chunk * CHUNK_ELEMENTS)
            exists = True if (turn + 1) * self.threads <= count else piece < count
            yield Piece(place, self.source, element, exists)

    def prefetch(self, step: Expr) -> None:
        lines = -(-self.layout.chunks * CHUNK_BYTES // LINE_BYTES)
        count = self.layout.rows * lines
        first, pitch = self.context.place.begin(self.node, step)
        for part in range(-(-count // self.threads)):
            piece = b.bind(self._thread + part * self.threads)
            row, line = piece // lines, piece % lines
            column = T.min(line * (LINE_BYTES // 2), (self.layout.chunks - 1) * CHUNK_ELEMENTS)
            whole = (part + 1) * self.threads <= count
            with b.when(True if whole else piece < count):
                b.ptx("prefetch.global.L2", self.source.ptr_to([first + row * pitch + column]))


class HeldCopy:
    """A copy by way of registers: its loads are in flight until it is stored to shared memory.

    Threads beyond a tile's last chunk branch; where registers are few, they copy the tensor's first chunk to
    memory of their own instead: LLVM moves products past a branch, away from their decoded operands.
    """

    def __init__(self, copy: Copy) -> None:
        self.copy, self.words = copy, CHUNK_BYTES // 4
        self.registers = [b.local(self.words, "uint32") for _ in copy.pieces(0, 0)]

    def _pieces(self, step: Expr, at: Expr) -> Iterator[tuple[Any, Piece]]:
        """Yield what each piece is stored into, and the piece."""
        context = self.copy.context
        spare = context.geo.offsets.get(SPARE)
        for registers, piece in zip(self.registers, self.copy.pieces(step, at), strict=True):
            if piece.exists is not True and spare is not None:
                own = spare + context.threads.thread * CHUNK_BYTES
                place, element = (
                    T.Select(piece.exists, given, other)
                    for given, other in ((piece.place, own), (piece.element, 0))
                )
                yield registers, Piece(place, piece.tensor, element, True)
            else:
                yield registers, piece

    def fetch(self, step: Expr) -> None:
        """Emit the loads of a step's tile."""
        for registers, piece in self._pieces(step, 0):
            with nullcontext() if piece.exists is True else b.when(piece.exists):
                found = self.copy.context.dialect.load(piece.tensor, piece.element, self.words, "uint32")
                for i, word in enumerate(found):
                    b.store(registers, word, i)

    def put(self, at: Expr) -> None:
        """Emit the stores into the stage at byte ``at`` of shared memory."""
        context = self.copy.context
        for registers, piece in self._pieces(0, at):
            with nullcontext() if piece.exists is True else b.when(piece.exists):
                words = [registers[i] for i in range(self.words)]
                context.dialect.write(context.shared, context.dialect.address(piece.place), words)


TENSOR_PREFETCH = "cp.async.bulk.prefetch.tensor.2d.L2.global"
MAP_SWIZZLE = {8: SWIZZLE_128, 4: 2}
"""Chunks per panel -> CU_TENSOR_MAP_SWIZZLE_128B or _64B; otherwise there is none."""


def tensor_map(source: Any, shape: tuple[int, ...], layout: TileLayout) -> Expr:
    """Return a tensor map for copies of tiles, made on the host."""
    columns, rows = shape[-1], math.prod(shape[:-1])
    box = (layout.pitch * CHUNK_ELEMENTS, layout.rows)
    swizzle = MAP_SWIZZLE[layout.pitch] if layout.swizzled else 0
    return tiled_map(source, str(source.dtype), (columns, rows), (columns * 2,), box, swizzle)


class TensorCopy(TileCopy):
    """Copies a loop tile through a tensor map: one lane starts a copy per panel.

    map_: As `tensor_map` returns it.
    """

    def __init__(self, context: BlockContext, node: Node, map_: Expr) -> None:
        super().__init__(context, node)
        self.map = map_

    @property
    def bytes(self) -> int:
        return int(self.layout.rows * self.layout.chunks * CHUNK_BYTES)

    def fetch_map(self) -> None:
        with b.when(self.context.threads.thread == 0):
            b.ptx("prefetch.tensormap", T.address_of(self.map))

    def prefetch(self, step: Expr) -> None:
        row, column = self._corner(step)
        with b.when(self.context.threads.group_thread == 0):
            for panel in range(self.layout.chunks // self.layout.pitch):
                first = column + panel * self.layout.pitch * CHUNK_ELEMENTS
                b.ptx(TENSOR_PREFETCH, T.address_of(self.map), first, row)

    def _corner(self, step: Expr) -> tuple[Expr, Expr]:
        """Return the first row and column of a step's tile."""
        row, column = self.context.place.corner(self.node, step)
        return b.bind(row), b.bind(column)

    def start(self, step: Expr, at: Expr, barrier: Expr) -> None:
        row, column = self._corner(step)
        for panel in range(self.layout.chunks // self.layout.pitch):
            place = T.Cast("int32", at) + (self.offset + panel * self.layout.panel_bytes)
            target = self.context.shared.words.ptr_to([b.bind(place // 4)])
            first = column + panel * self.layout.pitch * CHUNK_ELEMENTS
            b.ptx(TENSOR_COPY, target, T.address_of(self.map), first, row, barrier)
