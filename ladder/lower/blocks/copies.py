"""Copies of tiles from device memory to shared memory, and where a block's tiles lie."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph, Node
from ladder.lower import builder as b
from ladder.lower.blocks.analysis import known
from ladder.lower.blocks.schedule import WARP
from ladder.lower.blocks.shared import CHUNK_BYTES
from tile_types.errors import ScheduleError

if TYPE_CHECKING:
    from ladder.lower.blocks.kernel import BlockKernel

Expr = Any

ELEMENTS = 8
"""Elements of a chunk."""

LINE_BYTES = 128
"""What a prefetch brings into L2."""

PREFETCHED_BYTES = 1 << 20
"""Tensors from this size on are prefetched: smaller ones, just computed, are in L2 already."""

INT32 = 1 << 31


class GridPlace:
    """Where tiles begin: the digits of a block's number, and of a step's.

    Parameters
    ----------
    block
        The block graph.
    index
        Number of the block within the grid.
    """

    def __init__(self, block: Graph, index: Expr) -> None:
        self.block = block
        self.position = _digits(index, [known(axis) for axis in block.grid])

    def begin(self, node: Node, step: Expr | None) -> tuple[Expr, int]:
        """Return the first element of a load's or store's tile, and the elements from row to row.

        Parameters
        ----------
        node
            The load or store.
        step
            Step of the loop, or None.
        """
        attributes = node_attributes(node)
        loops = [known(axis) for axis in self.block.loops]
        whole = node.tile if node.operator == "store" else self.block.tile(node.inputs[0])
        part = self.block.tile(node.inputs[0]) if node.operator == "store" else node.tile
        axes = [*zip(attributes["grid"], self.position, (known(a) for a in self.block.grid), strict=True)]
        if step is not None:
            axes += zip(attributes["loop"], _digits(step, loops), loops, strict=True)
        digits: list[Expr] = [0] * len(whole.shape)
        for axis, position, extent in axes:
            if axis >= 0:
                digits[axis] = digits[axis] * extent + position
        shape = whole.known_shape
        if math.prod(shape) >= INT32:
            raise ScheduleError(f"%{node.name}: a tensor of {math.prod(shape)} elements needs 64-bit offsets")
        pitches = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        first: Expr = 0
        for digit, extent, pitch in zip(digits, part.known_shape, pitches, strict=True):
            first = first + digit * (extent * pitch)
        return first, pitches[-2] if len(pitches) > 1 else shape[-1]


def _digits(index: Expr, extents: list[int]) -> list[Expr]:
    """Return the digits of a number, the last extent's varying fastest."""
    found: list[Expr] = []
    for extent in reversed(extents):
        found.append(index % extent if len(found) + 1 < len(extents) else index)
        index = index // extent
    return found[::-1]


class TileCopy:
    """Copies one load's tile: the threads that share it take chunks in turn.

    Parameters
    ----------
    kernel
        The kernel being emitted.
    node
        The load. Its tile is a group's if it changes from step to step, else the block's.
    """

    def __init__(self, kernel: BlockKernel, node: Node) -> None:
        self.kernel, self.node = kernel, node
        self.layout = kernel.geo.layouts[node.name]
        self.looped = kernel.geo.is_looped(node)
        plan = kernel.schedule
        self.threads = plan.row_warps * WARP if self.looped else plan.threads
        self.offset = (kernel.geo.stage_offsets if self.looped else kernel.geo.offsets)[node.name]
        self.source = kernel.tensors[node.inputs[0]]
        if kernel.place.begin(node, None if not self.looped else 0)[1] % ELEMENTS:
            raise ScheduleError(f"%{node.name}: rows of its tensor do not begin at multiples of 16 bytes")

    @property
    def _thread(self) -> Expr:
        kernel = self.kernel
        return kernel.row_warp * WARP + kernel.lane if self.looped else kernel.thread

    def emit(self, step: Expr, at: Expr) -> None:
        """Emit this thread's share of the copy.

        Parameters
        ----------
        step
            Step of the loop whose tile is copied.
        at
            First byte of the stage in shared memory; 0 for a block's tile.
        """
        first, pitch = self.kernel.place.begin(self.node, step if self.looped else None)
        first = b.bind(first)
        count = self.layout.rows * self.layout.chunks
        for turn in range(-(-count // self.threads)):
            piece = b.bind(self._thread + turn * self.threads)
            row, chunk = b.bind(piece // self.layout.chunks), b.bind(piece % self.layout.chunks)
            place = T.Cast("int32", at) + self.offset + self.layout.byte(row, chunk)
            target = self.kernel.shared.ptr_to([b.bind(place // 4)])
            source = self.source.ptr_to([first + (row * pitch + chunk * ELEMENTS)])
            if (turn + 1) * self.threads <= count:
                b.ptx("cp.async.cg.shared.global", target, source, CHUNK_BYTES)
            else:
                with b.when(piece < count):
                    b.ptx("cp.async.cg.shared.global", target, source, CHUNK_BYTES)

    def prefetch(self, own_step: Any, turns: Expr) -> None:
        """Bring the group's first tiles into L2 while the kernel before still runs."""
        kernel = self.kernel
        if not kernel.overlap.possible or self.source.shape[0] * 2 < PREFETCHED_BYTES:
            return
        lines = -(-self.layout.chunks * CHUNK_BYTES // LINE_BYTES)
        count = self.layout.rows * lines
        for turn in range(kernel.schedule.stages - 1):
            first, pitch = kernel.place.begin(self.node, own_step(turn))
            for part in range(-(-count // self.threads)):
                piece = b.bind(self._thread + part * self.threads)
                row, line = piece // lines, piece % lines
                column = T.min(line * (LINE_BYTES // 2), (self.layout.chunks - 1) * ELEMENTS)
                with b.when(T.And(piece < count, turn < turns)):
                    b.ptx("prefetch.global.L2", self.source.ptr_to([first + row * pitch + column]))
