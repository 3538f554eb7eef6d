"""Which tile of the output a block of the pipeline ``mma`` computes, and which part of it a thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower import builder as b
from ladder.lower.cuda.grouped import find_m_tile
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.mma_geometry import TILE_WARPS, Spec
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import count_m_tiles
from ladder.lower.gpu.raster import raster

Expr = Any


@dataclass(frozen=True)
class Place:
    """Where a thread works.

    args: The arguments as the product of this block's activation rows sees them.
    thread, lane: The thread in its block, and in its warp.
    row_tile, first_m: First packed tile along N, and first activation row, of the block.
    exists: Whether there are such activation rows.
    row_warp, quartet, m_warp: The warp's place in a packed tile, and its quartet's along rows and along M.
    owner: Whose packed words the lane takes.
    """

    args: Arguments
    thread: Expr
    lane: Expr
    row_tile: Expr
    first_m: Expr
    exists: Expr
    row_warp: Expr
    quartet: Expr
    m_warp: Expr
    owner: Expr


def find_place(spec: Spec, args: Arguments, overlap: Overlap) -> Place:
    """Emit which tile this block and which part of it this thread works on."""
    geo, schedule = spec.geo, spec.schedule
    rows = (args.n_tiles + geo.row_tiles - 1) // geo.row_tiles
    columns = count_m_tiles(args, schedule.tile_m)
    b.device(1)
    (block,) = b.block_index([rows * columns])
    thread = b.thread_index(geo.threads)
    row, column = raster(block, rows, columns, schedule.raster)
    row_tile = b.keep(row * geo.row_tiles)
    warp = b.bind(thread // 32)
    lane = b.bind(thread % 32)
    found = find_m_tile(args, b.keep(column), schedule.tile_m, lane, overlap)
    first_m = b.keep(found.first)
    row_warp = b.bind(warp % TILE_WARPS)
    quartet = b.bind(warp // TILE_WARPS % geo.row_quartets)
    m_warp = b.bind(warp // TILE_WARPS // geo.row_quartets)
    row, column = spec.step.lanes.operand(lane)
    owner = b.bind(row_warp * 32 + row * 4 + column)
    return Place(
        found.args, thread, lane, row_tile, first_m, found.exists, row_warp, quartet, m_warp, owner
    )  # fmt: skip
