"""Where a block of a block-scaled product stands: its tiles and its slice of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.scaled_memory import ScaledArguments
from schedules.scaled import ROWS, SLAB, ScaledSchedule

Expr = Any

WARPS = 4
"""Warps that write sums; a producer's and the one that multiplies follow."""

RASTER = 8
"""Tiles of weight rows that are visited before activation rows advance: neighbours share both in L2."""


@dataclass(frozen=True)
class Place:
    """Where a block stands: thread, tiles, rank in its cluster, first slab of K, their number.

    ``n_tile`` counts 128 weight rows, of which a block of fewer has the part called ``part``.
    """

    thread: Expr
    n_tile: Expr
    part: Expr
    m_tile: Expr
    rank: Expr
    first: Expr
    iterations: Expr


def find_place(args: ScaledArguments, schedule: ScaledSchedule) -> Place:
    """Place blocks: slices of K, or a pair, are a cluster; columns of `RASTER` tiles along N walk along M."""
    split, cluster = schedule.split_k, schedule.cluster
    rows = schedule.rows * schedule.partners
    n_tiles = (args.n + rows - 1) // rows
    m_tiles = (args.m + schedule.tile_m - 1) // schedule.tile_m
    (block,) = b.block_index([n_tiles * m_tiles * cluster])
    rank: Expr = b.cluster_rank([cluster])[0] if cluster > 1 else 0
    thread = b.thread_index((WARPS + 2) * 32)
    tile = b.bind(block // cluster) if cluster > 1 else block
    n_tiles, m_tiles = b.bind(n_tiles), b.bind(m_tiles)
    column = b.bind(tile // (m_tiles * RASTER))
    inside = b.bind(tile % (m_tiles * RASTER))
    columns = b.bind(T.min(RASTER, n_tiles - column * RASTER))
    slabs = b.bind((args.row_bytes + SLAB - 1) // SLAB)
    first = b.bind(slabs * rank // split) if split > 1 else 0
    iterations = b.bind(slabs * (rank + 1) // split - first) if split > 1 else slabs
    n_tile = b.bind(column * RASTER + inside % columns)
    if schedule.pair:
        n_tile = b.bind(n_tile * 2 + rank)
    parts = ROWS // schedule.rows
    part: Expr = b.bind(n_tile % parts) if parts > 1 else 0
    n_tile = b.bind(n_tile // parts) if parts > 1 else n_tile
    return Place(thread, n_tile, part, b.bind(inside // columns), rank, first, iterations)
