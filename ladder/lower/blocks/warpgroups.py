"""Products of warpgroups (``wgmma``): both operands are read from shared memory, as tensor copies put them.

A warpgroup's accumulators lie over its four warps as those of ``mma.m16n8k16`` do over one of 16 rows each
(PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"), so nothing else of a kernel changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.blocks.shared import CHUNK_BYTES, PANEL_ROWS, PANELS

if TYPE_CHECKING:
    from ladder.lower.blocks.kernel import BlockKernel
    from ladder.lower.blocks.values import Matmul, SharedTile

Expr = Any

WARPS = 4
"""Warps of a warpgroup."""

ROWS = 64
"""Rows of a product of a warpgroup."""

MOST_COLUMNS = 256

LINE_BYTES = PANELS[0] * CHUNK_BYTES
"""Bytes of a row of a swizzled panel."""

ATOM_BYTES = PANEL_ROWS * LINE_BYTES
"""Bytes after which a swizzle repeats."""

STEP_BYTES = 32
"""Bytes of 16 elements: a step along K within a row of the first operand."""

SWIZZLE_128 = 1 << 30
"""Swizzle mode in the upper half of a matrix descriptor."""

NAMES = {"float16": "f16", "bfloat16": "bf16"}


def begin_step() -> None:
    """Bring the warps of a group together, before the step's first product."""
    b.emit(T.cuda.warp_sync())


def add_into(product: Matmul, sums: Any) -> None:
    """Start ``sums += a · b``; `end_step` waits for it."""
    kernel = product.kernel
    columns = kernel.column_fragments(product.shape[1])
    name = NAMES[kernel.operand]
    spelling = f"wgmma.mma_async.sync.aligned.m64n{8 * columns}k16.f32.{name}.{name}"
    first, second = (cast("SharedTile", tile) for tile in (product.a, product.b))
    rows = _start(kernel, first, 1, kernel.row_warp // WARPS * (ROWS * LINE_BYTES))
    panel = second.layout.panel_bytes
    panels = _start(kernel, second, panel, kernel.column_warp * (columns // PANELS[0] * panel))
    registers = [sums[i] for i in range(4 * columns)]
    b.emit(T.ptx.wgmma.fence.sync.aligned())
    for k in range(product.depth):
        across = k // WARPS * first.layout.panel_bytes + k % WARPS * STEP_BYTES
        operands = _descriptor(rows, across), _descriptor(panels, k * 2 * ATOM_BYTES)
        # Neither negated; the first as it lies, the second, whose columns lie together, transposed.
        b.ptx(spelling, *registers, *operands, T.bool(True), 1, 1, 0, 1)
    b.emit(T.ptx.wgmma.commit_group.sync.aligned())


def end_step() -> None:
    """Wait for all products of a step."""
    b.emit(T.ptx.wgmma.wait_group.sync.aligned(0))


def _start(kernel: BlockKernel, tile: SharedTile, leading: int, offset: Expr) -> Expr:
    """Return the lower half of a tile's matrix descriptor: where it starts, bytes from panel to panel."""
    start = T.shift_right(tile.base + T.Cast("uint32", offset), T.uint32(4))
    return b.Variable("uint32", start | T.uint32(max(leading // CHUNK_BYTES, 1) << 16)).value


def _descriptor(low: Expr, offset: int) -> Expr:
    """Return the matrix descriptor ``offset`` bytes further on (PTX ISA, "Matrix-descriptor format")."""
    high = SWIZZLE_128 | ATOM_BYTES // CHUNK_BYTES
    return T.Cast("uint64", low + T.uint32(offset // CHUNK_BYTES)) | T.uint64(high << 32)
