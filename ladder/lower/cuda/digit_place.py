"""Which outputs and which part of K a thread of the pipeline ``digits`` works on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.digit_geometry import Spec
from ladder.lower.cuda.gemv_place import Warp, find_warp, prefetch_scales, prefetch_words, prefetched_words
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import Arguments

Expr = Any


@dataclass(frozen=True)
class Place:
    """Where a thread works.

    rank: The block's place in its cluster.
    first_tile, end_tile: The block's packed tiles along K.
    first_row, column: First weight row of the block, and the row whose scales the lane keeps.
    first_m, m_count: First activation row of the block, and how many it has.
    strip_tile, owner: First packed tile of the warp's strip, and where in a tile the lane's words begin.
    """

    args: Arguments
    warp: Warp
    rank: Expr
    first_tile: Expr
    end_tile: Expr
    first_row: Expr
    column: Expr
    first_m: Expr
    m_count: Expr
    strip_tile: Expr
    owner: Expr

    @property
    def is_first(self) -> Expr:
        """Whether this is the grid's first block."""
        return T.And(T.And(self.first_row == 0, self.rank == 0), self.first_m == 0)


def find_place(spec: Spec, args: Arguments) -> Place:
    """Emit which rows and which part of K this thread works on."""
    geo, schedule = spec.geo, spec.schedule
    tile_strips, cluster = geo.tile_strips, schedule.cluster
    strips = args.n_tiles // geo.halves * tile_strips
    b.device(geo.resident_blocks)
    row_blocks = (strips + geo.row_warps - 1) // geo.row_warps
    m_tiles = (args.m + schedule.tile_m - 1) // schedule.tile_m
    block, m_tile = b.block_index([row_blocks * cluster, m_tiles])
    rank, first_tile, end_tile = _share_of_k(spec, args.k_tiles)
    block = b.bind(block // cluster) if cluster > 1 else block
    warp = find_warp(geo, block, strips)
    first_row = b.bind(block * geo.columns)
    first_m = b.bind(m_tile * schedule.tile_m)
    m_count = b.keep(T.min(args.m - first_m, schedule.tile_m))
    own = min(32, geo.own_rows)
    column = warp.strip * geo.own_rows + warp.lane % own
    column = b.keep(column + warp.lane // own * args.n if geo.halves > 1 else column)
    owner = warp.strip % tile_strips * (32 * geo.own_blocks) + warp.lane
    strip_tile = b.keep(warp.strip // tile_strips * args.k_tiles)
    owner = b.keep(owner * min(spec.groups.bits, 4))
    return Place(
        args, warp, rank, first_tile, end_tile, first_row, column, first_m, m_count, strip_tile, owner
    )  # fmt: skip


def _share_of_k(spec: Spec, tiles: Expr) -> tuple[Expr, Expr, Expr]:
    """Divide K among the blocks of a cluster in whole periods; return rank, first tile and end."""
    blocks, period = spec.schedule.cluster, spec.geo.period
    if blocks == 1:
        return T.int32(0), T.int32(0), tiles
    rank = b.keep(b.cluster_rank([blocks])[0])
    share = b.bind((tiles + period * blocks - 1) // (period * blocks) * period)
    first = b.keep(T.min(rank * share, tiles))
    return rank, first, b.keep(T.min(first + share, tiles))


def slice_periods(spec: Spec, index: Expr, tiles: Expr) -> tuple[Expr, Expr]:
    """Return the periods of a chunk of ``tiles`` where a slice of K begins and ends."""
    split = spec.schedule.split_k
    periods = b.bind((tiles + spec.geo.period - 1) // spec.geo.period)
    share = b.bind((periods + split - 1) // split)
    return T.min(index * share, periods), T.min((index + 1) * share, periods)


def prefetch(spec: Spec, place: Place, overlap: Overlap) -> None:
    """Bring the first words of every slice, and scales, into L2 while the kernel before still runs.

    The words of a packed row of tiles are fetched by the block that has its first strip.
    """
    if not overlap.possible:
        return
    args, warp, geo, split = place.args, place.warp, spec.geo, spec.schedule.split_k
    strips = geo.tile_strips
    tile = b.bind((warp.first_strip + strips - 1) // strips + warp.thread // split)
    mine = tile * strips < warp.first_strip + geo.row_warps
    tiles = b.bind(place.end_tile - place.first_tile)
    begin, stop = slice_periods(spec, warp.thread % split, T.min(geo.chunk_tiles, tiles))
    own = T.min(stop * geo.period, tiles) - begin * geo.period
    even = prefetched_words(args.n_tiles, args.k_tiles * spec.tile_words)
    words = T.min(own * spec.tile_words, even // (split * spec.schedule.cluster) // 4 * 4)
    tiles = args.n_tiles // geo.halves
    for half in range(geo.halves):
        row = tile + half * tiles
        first = T.Cast("int64", row * args.k_tiles + place.first_tile + begin * geo.period)
        prefetch_words(args, T.And(mine, tile < tiles), first * T.int64(spec.tile_words), words)
        if spec.gemm.scale:
            prefetch_scales(args, warp.thread, place.first_row + half * args.n)
