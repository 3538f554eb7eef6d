"""Copies of tiles from device memory to shared memory, and where a block's tiles lie."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

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
        whole = node.tile if node.operator == "store" else self.block.tile(node.inputs[0])
        shape = whole.known_shape
        if math.prod(shape) >= INT32:
            raise ScheduleError(f"%{node.name}: a tensor of {math.prod(shape)} elements needs 64-bit offsets")
        pitches = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        first: Expr = 0
        for position, pitch in zip(self._corner(node, step), pitches, strict=True):
            first = first + position * pitch
        return first, pitches[-2] if len(pitches) > 1 else shape[-1]

    def corner(self, node: Node, step: Expr | None) -> tuple[Expr, Expr]:
        """Return row and column at which a tile begins, leading axes counting as rows."""
        shape = self.block.tile(node.inputs[0]).known_shape
        *rest, column = self._corner(node, step)
        row: Expr = 0
        for position, extent in zip(rest, shape[:-1], strict=True):
            row = row * extent + position
        return row, column

    def _corner(self, node: Node, step: Expr | None) -> list[Expr]:
        """Return where a tile begins along each axis."""
        attributes = node_attributes(node)
        loops = [known(axis) for axis in self.block.loops]
        part = self.block.tile(node.inputs[0]) if node.operator == "store" else node.tile
        axes = [*zip(attributes["grid"], self.position, (known(a) for a in self.block.grid), strict=True)]
        if step is not None:
            axes += zip(attributes["loop"], _digits(step, loops), loops, strict=True)
        digits: list[Expr] = [0] * len(part.shape)
        for axis, position, extent in axes:
            if axis >= 0:
                digits[axis] = digits[axis] * extent + position
        return [digit * extent for digit, extent in zip(digits, part.known_shape, strict=True)]


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
        self._prepare(kernel, node)
        self.source = kernel.tensors[node.inputs[0]]
        if kernel.place.begin(node, None if not self.looped else 0)[1] % ELEMENTS:
            raise ScheduleError(f"%{node.name}: rows of its tensor do not begin at multiples of 16 bytes")

    def _prepare(self, kernel: BlockKernel, node: Node) -> None:
        self.kernel, self.node = kernel, node
        self.is_constant = node.inputs[0] in kernel.constants
        self.layout: Any = kernel.geo.layouts[node.name]
        self.looped = kernel.geo.is_looped(node)
        plan = kernel.schedule
        self.threads = plan.group_warps * WARP if self.looped else plan.threads
        self.offset = (kernel.geo.stage_offsets if self.looped else kernel.geo.offsets)[node.name]

    @property
    def _thread(self) -> Expr:
        return self.kernel.group_thread if self.looped else self.kernel.thread

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

    @property
    def is_streamed(self) -> bool:
        """Whether the tensor is worth prefetching."""
        return bool(self.source.shape[0] * 2 >= PREFETCHED_BYTES)

    def prefetch(self, step: Expr) -> None:
        """Bring a step's tile into L2, which is allowed while the kernel before still runs."""
        lines = -(-self.layout.chunks * CHUNK_BYTES // LINE_BYTES)
        count = self.layout.rows * lines
        first, pitch = self.kernel.place.begin(self.node, step)
        for part in range(-(-count // self.threads)):
            piece = b.bind(self._thread + part * self.threads)
            row, line = piece // lines, piece % lines
            column = T.min(line * (LINE_BYTES // 2), (self.layout.chunks - 1) * ELEMENTS)
            whole = (part + 1) * self.threads <= count
            with b.when(True if whole else piece < count):
                b.ptx("prefetch.global.L2", self.source.ptr_to([first + row * pitch + column]))


TENSOR_COPY = "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
TENSOR_PREFETCH = "cp.async.bulk.prefetch.tensor.2d.L2.global"
MAP_SWIZZLE = {8: 3, 4: 2}
"""Chunks per panel -> CU_TENSOR_MAP_SWIZZLE_128B or _64B; otherwise there is none."""
MAP_LINES = 2
"""CU_TENSOR_MAP_L2_PROMOTION_L2_128B."""


class TensorCopy(TileCopy):
    """Copies a loop tile through a tensor map: one lane starts a copy per panel."""

    def __init__(self, kernel: BlockKernel, node: Node) -> None:
        super().__init__(kernel, node)
        self.shape = kernel.program.block.tile(node.inputs[0]).known_shape

    @property
    def bytes(self) -> int:
        """Bytes that arrive."""
        return int(self.layout.rows * self.layout.chunks * CHUNK_BYTES)

    def encode(self) -> None:
        """Make the tensor map, on the host."""
        columns, rows = self.shape[-1], math.prod(self.shape[:-1])
        dtype = str(self.source.dtype)
        self.map = I.Bind(T.tvm_stack_alloca("tensormap", 1), T.handle("tensormap").ty)
        box = (self.layout.pitch * ELEMENTS, self.layout.rows)
        swizzle = MAP_SWIZZLE[self.layout.pitch] if self.layout.swizzled else 0
        b.emit(
            T.call_packed(
                "runtime.cuTensorMapEncodeTiled",
                *(self.map, dtype, 2, self.source.data, columns, rows, columns * 2),
                *(*box, 1, 1, 0, swizzle, MAP_LINES, 0),
            )
        )

    def fetch_map(self) -> None:
        """Fetch the tensor map, so that the first copy does not wait for it."""
        with b.when(self.kernel.thread == 0):
            b.ptx("prefetch.tensormap", T.address_of(self.map))

    def prefetch(self, step: Expr) -> None:
        row, column = self._corner(step)
        with b.when(self.kernel.group_thread == 0):
            for panel in range(self.layout.chunks // self.layout.pitch):
                first = column + panel * self.layout.pitch * ELEMENTS
                b.ptx(TENSOR_PREFETCH, T.address_of(self.map), first, row)

    def _corner(self, step: Expr) -> tuple[Expr, Expr]:
        """Return the first row and column of a step's tile."""
        row, column = self.kernel.place.corner(self.node, step)
        return b.bind(row), b.bind(column)

    def start(self, step: Expr, at: Expr, barrier: Expr) -> None:
        """Start the copies of a step's tile into the stage at byte ``at``; they count at a barrier."""
        row, column = self._corner(step)
        for panel in range(self.layout.chunks // self.layout.pitch):
            place = T.Cast("int32", at) + (self.offset + panel * self.layout.panel_bytes)
            target = self.kernel.shared.ptr_to([b.bind(place // 4)])
            first = column + panel * self.layout.pitch * ELEMENTS
            b.ptx(TENSOR_COPY, target, T.address_of(self.map), first, row, barrier)
