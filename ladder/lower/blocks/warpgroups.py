"""Products of warpgroups (``wgmma``): both operands are read from shared memory, as tensor copies put them.

Products of a step run on while the group waits for the next step's tiles, so the tiles of the step before are
free only after `end_step`, and copies into their place start then.

A warpgroup's accumulators lie over its four warps as those of ``mma.m16n8k16`` do over one of 16 rows each
(PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"), so nothing else of a kernel changes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.blocks.shared import CHUNK_BYTES, PANEL_ROWS, PANELS

if TYPE_CHECKING:
    from ladder.lower.blocks.values import Matmul, SharedTile

Expr = Any

WARPS = 4
"""Warps of a warpgroup."""

ROWS = 64
"""Rows of a product of a warpgroup."""

COLUMNS = 64
"""Columns of an instruction: those of a panel. Wider ones, over two panels, gave wrong sums on an H200."""

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
    b.emit(T.ptx.wgmma.fence.sync.aligned())


def add_into(product: Matmul, sums: Any) -> None:
    """Start ``sums += a · b``, as part of the step's group of products."""
    kernel = product.kernel
    columns = kernel.column_fragments(product.shape[1])
    name = NAMES[kernel.operand]
    spelling = f"wgmma.mma_async.sync.aligned.m64n{COLUMNS}k16.f32.{name}.{name}"
    first, second = (cast("SharedTile", tile) for tile in (product.a, product.b))
    rows = _start(first, kernel.row_warp // WARPS * (ROWS * LINE_BYTES))
    panels, panel = columns // PANELS[0], second.layout.panel_bytes
    start = _start(second, kernel.column_warp * (panels * panel))
    for k in range(product.depth):
        across = k // WARPS * first.layout.panel_bytes + k % WARPS * STEP_BYTES
        for index in range(panels):
            registers = [sums[index * COLUMNS // 2 + i] for i in range(COLUMNS // 2)]
            down = index * panel + k * 2 * ATOM_BYTES
            # Neither negated; the first as it lies, the second, whose columns lie together, transposed.
            operands = _descriptor(rows, across), _descriptor(start, down)
            b.ptx(spelling, *registers, *operands, T.bool(True), 1, 1, 0, 1)


def end_step() -> None:
    """Close the step's group of products, and wait for those of the step before."""
    b.emit(T.ptx.wgmma.commit_group.sync.aligned())
    b.emit(T.ptx.wgmma.wait_group.sync.aligned(1))


def finish() -> None:
    """Wait for all products."""
    b.emit(T.ptx.wgmma.wait_group.sync.aligned(0))


def _start(tile: SharedTile, offset: Expr) -> Expr:
    """Return the lower half of the matrix descriptor of a tile from a byte on."""
    start = T.shift_right(tile.base + T.Cast("uint32", offset), T.uint32(4))
    return b.Variable("uint32", start | T.uint32(1 << 16)).value


def _descriptor(low: Expr, offset: int) -> Expr:
    """Return the matrix descriptor ``offset`` bytes further on (PTX ISA, "Matrix-descriptor format")."""
    high = SWIZZLE_128 | ATOM_BYTES // CHUNK_BYTES
    return T.Cast("uint64", low + T.uint32(offset // CHUNK_BYTES)) | T.uint64(high << 32)
