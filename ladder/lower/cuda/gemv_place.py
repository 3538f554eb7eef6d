"""Which rows, which part of K and which outputs a thread of a kernel has whose warps are slices of K."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.gemv_geometry import Slices, Spec
from ladder.lower.cuda.grouped import FOUND_WORDS, Told, find_m_tile, shares_search
from ladder.lower.cuda.launch import Overlap
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import count_m_tiles

PREFETCH_BYTES, PREFETCH_SHARE = (4 << 20, 12 << 20), 8
"""Bytes of packed words that are fetched into L2 before the kernel before has ended: at least, at most, and
between them this part of all words; chosen by measuring layers of 1 to 4 bits on an H200."""


@dataclass(frozen=True)
class Warp:
    """One warp of a block whose warps are slices of K.

    thread, warp, lane: The thread in its block, its warp, and the lane in the warp.
    slice, row_warp: The warp's slice of K, and its place among the warps along the weight rows.
    first_strip: First strip (``own_rows`` weight rows; of a gated product as many of either half) of the
        block.
    strip: The warp's strip. Warps beyond the last strip repeat it; their sums are not stored.
    """

    thread: Expr
    warp: Expr
    lane: Expr
    slice: Expr
    row_warp: Expr
    first_strip: Expr
    strip: Expr


def find_warp(geo: Slices, block: Expr, strips: Expr) -> Warp:
    """Emit the position of this thread's warp in block ``block`` along the weight rows."""
    thread = b.thread_index(geo.threads)
    warp = b.bind(thread // 32)
    lane = b.bind(thread % 32)
    slice_ = b.bind(warp // geo.row_warps)
    row_warp = b.bind(warp % geo.row_warps)
    first_strip = b.bind(block * geo.row_warps)
    strip = b.keep(T.min(first_strip + row_warp, strips - 1))
    return Warp(thread, warp, lane, slice_, row_warp, first_strip, strip)


@dataclass(frozen=True)
class Share:
    """Packed tiles along K of one block of a cluster.

    first, end, count: First tile, tile after the last one, and how many there are.
    first_run: Run of tiles, counted over all slices, at which the block begins.
    """

    first: Expr
    end: Expr
    count: Expr
    first_run: Expr


@dataclass(frozen=True)
class BlockPlace:
    """Which outputs a block has whose warps are slices of K, and which of its warps this is.

    args: The arguments as the product of this block's activation rows sees them.
    warp: The thread's warp.
    rank: The block's place in its cluster.
    first_row: First weight row of the block; of a gated product, of the first half.
    first_m, m_count: First activation row of the block, and how many it has.
    """

    args: Arguments
    warp: Warp
    rank: Expr
    first_row: Expr
    first_m: Expr
    m_count: Expr

    @property
    def is_first(self) -> Expr:
        """Whether this is the grid's first block."""
        return T.And(T.And(self.first_row == 0, self.rank == 0), self.first_m == 0)


@dataclass(frozen=True)
class Place(BlockPlace):
    """Which part of K this thread works on.

    owner: Whose packed words the lane takes.
    column: First weight row of the warp; of a gated product, of the first half.
    exists: Whether there are activation rows.
    share: The block's tiles along K.
    pool: The block's shared memory, if the search for its activation rows has begun it.
    """

    owner: Expr
    column: Expr
    exists: Expr
    share: Share
    pool: Any


def find_place(spec: Spec, args: Arguments, overlap: Overlap) -> Place:
    """Emit which rows and which part of K this thread works on."""
    geo, blocks, tile_m = spec.geo, spec.schedule.cluster, spec.schedule.tile_m
    strips = args.n_tiles // geo.halves * geo.tile_strips
    b.device(geo.resident_blocks)
    rows = (strips + geo.row_warps - 1) // geo.row_warps * blocks
    block, m_tile = b.block_index([rows, count_m_tiles(args, tile_m)])
    rank: Expr = b.keep(b.cluster_rank([blocks])[0]) if blocks > 1 else T.int32(0)
    block = b.bind(block // blocks) if blocks > 1 else block
    warp = find_warp(geo, block, strips)
    row, column = spec.step.lanes.operand(warp.lane)
    owner = b.bind(warp.strip % geo.tile_strips * (32 * geo.own_blocks) + row * 4 + column)
    first_row = b.bind(block * geo.columns)
    pool = b.SharedPool() if shares_search(spec.gemm, spec.schedule) else None
    told = None if pool is None else Told(warp.warp, pool.alloc((FOUND_WORDS,), "int32", align=16))
    found = find_m_tile(args, m_tile, tile_m, warp.lane, overlap, told)
    m_count = b.bind(T.min(found.args.m - found.first, tile_m))
    column = b.keep(warp.strip * geo.own_rows)
    share = _share_of_k(spec, rank, found.args.k_tiles)
    return Place(
        found.args, warp, rank, first_row, found.first, m_count, owner, column, found.exists, share,
        pool,
    )  # fmt: skip


def _share_of_k(spec: Spec, rank: Expr, tiles: Expr) -> Share:
    """Divide K among the blocks of a cluster in whole runs."""
    blocks, run = spec.schedule.cluster, spec.geo.run
    if blocks == 1:
        return Share(T.int32(0), tiles, tiles, T.int32(0))
    runs = b.keep((tiles + run * blocks - 1) // (run * blocks))
    first_run = b.keep(rank * runs)
    first = b.keep(T.min(first_run * run, tiles))
    end = b.keep(T.min((first_run + runs) * run, tiles))
    return Share(first, end, b.bind(end - first), first_run)


def prefetched_words(n_tiles: Expr, row_words: Expr) -> Expr:
    """Return the words to prefetch of each of ``n_tiles`` packed rows of tiles of ``row_words`` words."""
    least, most = (T.int32(size // 4) // n_tiles for size in PREFETCH_BYTES)
    return b.keep(T.min(T.max(row_words // PREFETCH_SHARE, least), most))


def prefetch_words(args: Arguments, wanted: Expr, at: Expr, words: Expr) -> None:
    """Bring ``words`` packed words from ``at`` on into L2 where ``wanted`` holds and there are any."""
    with b.when(T.And(wanted, words > 0)):
        start = args.words.ptr_to([0, 0, at])
        b.ptx("cp.async.bulk.prefetch.L2.global", start, T.Cast("uint32", words * 4))


def prefetch_scales(args: Arguments, thread: Expr, first_row: Expr) -> None:
    """Bring the scales of a block's weight rows into L2, a group per thread."""
    with b.when(thread < args.groups):
        b.ptx("prefetch.global.L2", args.scales.ptr_to([thread, first_row]))


def half_words(args: Arguments, geo: Slices, tile_words: int) -> Expr:
    """Return the packed words of one half of a gated product's weight, in 32 bits: registers are few."""
    if geo.halves == 1:
        return T.int32(0)
    return b.keep(args.n_tiles // geo.halves * args.k_tiles * tile_words)


def prefetch(spec: Spec, place: Place, overlap: Overlap) -> None:
    """Bring the first words and scales into L2 while the kernel before still runs.

    The words of a packed row of tiles are fetched by the block that has its first strip.
    """
    if not overlap.possible or spec.gemm.experts:
        return
    args, warp, strips = place.args, place.warp, spec.geo.tile_strips
    whole = b.keep(args.k_tiles * spec.groups.tile_words)
    even = prefetched_words(args.n_tiles, whole) // spec.schedule.cluster // 4 * 4
    words = T.min(place.share.count * spec.groups.tile_words, even)
    tile = (warp.first_strip + strips - 1) // strips + warp.thread
    mine = tile * strips < warp.first_strip + spec.geo.row_warps
    halves = spec.geo.halves
    for half in range(halves):
        first = tile + half * (args.n_tiles // halves)
        at = first * whole + place.share.first * spec.groups.tile_words
        prefetch_words(args, T.And(mine, tile < args.n_tiles // halves), at, words)
        if spec.gemm.scale:
            prefetch_scales(args, warp.thread, place.first_row + half * args.n)
