"""Products of warpgroups (``wgmma``), whose operands tensor copies have placed in shared memory.

Products of a step run on while the group waits for the next step's tiles, so the tiles of the step before are
free only after `end_step`, and copies into their place start then.

A warpgroup's accumulators lie over its four warps as those of ``mma.m16n8k16`` do over one of 16 rows each
(PTX ISA, "Register Fragments for wgmma.mma_async.m64nNk16"), so nothing else of a kernel changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.blocks.shared import CHUNK_BYTES, PANEL_ROWS, PANELS
from ladder.lower.blocks.values import Matmul, SharedTile

WARPS = 4
"""Warps of a warpgroup."""

ROWS = 64
"""Rows of a product of a warpgroup."""

PANEL = 64
"""Columns of a swizzled panel of the second operand."""

MOST_PANELS = 4
"""Panels of an instruction: the more, the less often the first operand is read from shared memory."""

ADDRESSES = 0x3FFFF
"""Bits of a shared address in a descriptor: in a cluster, other bits say which block's memory it is in."""

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


def end_step(products: list[tuple[Matmul, Any]]) -> None:
    """Start the products of a step, with their sums, as one group, and wait for those of the step before."""
    panels = [panel for product, sums in products for panel in _panels(product, sums)]
    products.clear()
    for run in _runs(panels):
        _multiply(run)
    b.emit(T.ptx.wgmma.commit_group.sync.aligned())
    b.emit(T.ptx.wgmma.wait_group.sync.aligned(1))


@dataclass(frozen=True)
class Panel:
    """Columns of a product that lie together.

    index: Which of the columns that the warpgroup has.
    offset: First byte of the second operand's panel in the stage, but for what the warpgroup adds to it.
    registers: The sums.
    """

    product: Matmul
    index: int
    offset: int
    registers: Sequence[Expr]

    def follows(self, others: Sequence[Panel]) -> bool:
        """Return whether one instruction can take this panel after others."""
        first, last = others[0], others[-1]
        same = first.product.a is self.product.a and first.product.shape == self.product.shape
        distances = {self.offset - last.offset, others[1].offset - first.offset if others[1:] else 0}
        return same and len(distances - {0}) == 1 and self.offset > last.offset


def _panels(product: Matmul, sums: Any) -> Iterator[Panel]:
    """Yield the panels of a product that the warpgroup computes."""
    geo, tile = product.context.geo, cast("SharedTile", product.b)
    for index in range(geo.column_fragments(product.shape[1]) // PANELS[0]):
        registers = [sums[index * PANEL // 2 + i] for i in range(PANEL // 2)]
        offset = geo.stage_offsets[tile.name] + index * tile.layout.panel_bytes
        yield Panel(product, index, offset, registers)


def _runs(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Return panels in runs, equally far apart, that one instruction takes."""
    runs: list[list[Panel]] = []
    for panel in panels:
        if runs and len(runs[-1]) < MOST_PANELS and panel.follows(runs[-1]):
            runs[-1].append(panel)
        else:
            runs.append([panel])
    return runs


def _multiply(run: Sequence[Panel]) -> None:
    """Start the instructions of a run of panels."""
    product, context = run[0].product, run[0].product.context
    first, second = (cast("SharedTile", tile) for tile in (product.a, product.b))
    name, panel = NAMES[context.operand], second.layout.panel_bytes
    spelling = f"wgmma.mma_async.sync.aligned.m64n{PANEL * len(run)}k16.f32.{name}.{name}"
    rows = _start(first, context.threads.row_warp // WARPS * (ROWS * LINE_BYTES))
    count = context.geo.column_fragments(product.shape[1]) // PANELS[0]
    distance = run[1].offset - run[0].offset if run[1:] else CHUNK_BYTES
    start = _start(second, context.threads.column_warp * (count * panel) + run[0].index * panel, distance)
    registers = [register for part in run for register in part.registers]
    for k in range(product.depth):
        across = k // WARPS * first.layout.panel_bytes + k % WARPS * STEP_BYTES
        # Neither negated; the first as it lies, the second, whose columns lie together, transposed.
        operands = _descriptor(rows, across), _descriptor(start, k * 2 * ATOM_BYTES)
        b.ptx(spelling, *registers, *operands, T.bool(True), 1, 1, 0, 1)


def finish() -> None:
    """Wait for all products."""
    b.emit(T.ptx.wgmma.wait_group.sync.aligned(0))


def _start(tile: SharedTile, offset: Expr, leading: int = CHUNK_BYTES) -> Expr:
    """Return the lower half of a tile's matrix descriptor, from a byte on; ``leading``: between panels."""
    place = (tile.base + T.Cast("uint32", offset)) & T.uint32(ADDRESSES)
    start = T.shift_right(place, T.uint32(4))
    return b.Variable("uint32", start | T.uint32(leading // CHUNK_BYTES << 16)).value


def _descriptor(low: Expr, offset: int) -> Expr:
    """Return the matrix descriptor ``offset`` bytes further on (PTX ISA, "Matrix-descriptor format")."""
    high = SWIZZLE_128 | ATOM_BYTES // CHUNK_BYTES
    return T.Cast("uint64", low + T.uint32(offset // CHUNK_BYTES)) | T.uint64(high << 32)
