"""How scans along axes before the last lie over a GPU: neighbouring columns, and lanes for parts of each."""

from __future__ import annotations

from ladder.ir.extents import product
from ladder.ir.graph import Graph
from ladder.partition.rows import SCANS

WORDS, BLOCKS, THREADS, LANES = 16, 264, 512, 32
"""Words of a column that a lane scans at once; blocks that keep a GPU busy, and the most threads of one; most
lanes that share a column."""

LEAST_THREADS = 64
"""Threads of a block: of a wave of 64 lanes at least."""


def scanned_columns(graph: Graph, axis: int, axes: int) -> tuple[int, int, int]:
    """Return the threads of a block, the elements that each scans at once, and the columns side by side.

    axes: Trailing axes of columns, behind ``axis``, along which the chain scans.
    """
    tiles = [node.tile for node in graph.nodes if node.operator in SCANS]
    shape = tiles[0].shape
    length, columns, outer = shape[axis], product(shape[-axes:]), product(shape[:axis])
    assert isinstance(length, int)  # that is what such chains have
    assert isinstance(columns, int)
    rows = outer if isinstance(outer, int) else BLOCKS
    beside = [lanes for lanes in (32, 16) if lanes <= columns and rows * -(-columns // lanes) >= BLOCKS]
    together = max(beside, default=8)
    held = WORDS * 32 // max(32, *(tile.ttype.elem_bits for tile in tiles))
    parts = 1
    while parts < LANES and parts * together < THREADS and parts * held < length:
        parts *= 2
    return max(parts * together, LEAST_THREADS), held, together
