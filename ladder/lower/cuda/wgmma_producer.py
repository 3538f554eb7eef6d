"""The producer of the wgmma pipeline: one thread that keeps a ring of stages full.

X comes through a tensor map (128-byte swizzle, zero outside), packed words, scales and zero
points through bulk copies. Blocks of a cluster that work on the same tokens each load a
share of X and multicast it to all (PTX ISA, cp.async.bulk.tensor, ``.multicast::cluster``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from schedules.layouts import TILE
from schedules.legal import SWIZZLE_ROW, scale_span

if TYPE_CHECKING:
    from ladder.lower.cuda.wgmma import Kernel, Ring

Expr = Any

BULK_COPY = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"


PREFETCH_BYTES = 64 * 1024
"""Bytes of packed words that a block fetches into L2 before the kernel before has ended."""


class Producer:
    """Emits the copies of one block into its ring."""

    def __init__(self, kernel: Kernel, ring: Ring) -> None:
        self.kernel, self.ring = kernel, ring
        self.geo, self.schedule, self.args = kernel.geo, kernel.schedule, kernel.args

    def tile(self, row_tile: Expr, token: Expr) -> None:
        """Load every stage of one output tile."""
        geo, kernel = self.geo, self.kernel
        own = token if self.schedule.cluster == 1 else token + kernel.member * kernel.copied_tokens
        kernel.token_source.begin(row_tile, own, kernel.first_tile)
        with b.loop(kernel.turns * (geo.body // geo.slabs)) as step:
            self._fill_stage(row_tile, b.bind(kernel.first_tile + step * geo.stage_tiles))
            self.ring.advance()

    def _fill_stage(self, row_tile: Expr, k_tile: Expr) -> None:
        """Wait until the stage is free, then start every copy into it."""
        kernel, stage = self.kernel, self.ring.stage.value
        b.emit(T.cuda.mbarrier_wait(kernel.empty.ptr_to([stage]), self.ring.phase.value ^ 1))
        barrier = kernel.full.ptr_to([stage])
        b.emit(T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, self._stage_bytes()))
        self._fill_x(stage, barrier, k_tile)
        for index in range(self.geo.row_tiles):
            # Tiles beyond the matrix repeat the last one: their rows are never stored.
            row = b.bind(T.min(row_tile + index, self.args.n_tiles - 1))
            self._fill_words(stage, barrier, index, row, k_tile)
        if kernel.scales is not None or kernel.zeros is not None:
            self._fill_rows(stage, barrier, row_tile, k_tile)

    def _stage_bytes(self) -> Expr:
        """Return the bytes of a stage: of A, only tokens that are copied."""
        rest = self.geo.stage_bytes - self.geo.x_bytes
        rows = self.kernel.copied_tokens * (self.schedule.cluster * self.geo.slabs)
        return T.Cast("uint32", rows * SWIZZLE_ROW + rest)

    def _fill_x(self, stage: Expr, barrier: Expr, k_tile: Expr) -> None:
        """Copy this block's share of the tokens, to every block of the cluster that needs it."""
        geo, kernel, cluster = self.geo, self.kernel, self.schedule.cluster
        share, mask = kernel.copied_tokens, None
        if cluster > 1:
            mask = T.Cast("uint16", ((1 << cluster) - 1) << (kernel.slice * cluster))
        for slab in range(geo.slabs):
            place = slab * self.schedule.tile_m * SWIZZLE_ROW + kernel.member * share * SWIZZLE_ROW
            target = kernel.x_tile.ptr_to([stage, place])
            kernel.token_source.copy(target, barrier, k_tile + slab * geo.tiles_per_slab, mask)

    def _fill_words(self, stage: Expr, barrier: Expr, index: int, row: Expr, k_tile: Expr) -> None:
        """Copy the packed tiles of one row tile; tiles beyond K repeat the last (X is zero there)."""
        geo, words, target = self.geo, self.args.words, self.kernel.words
        base = index * geo.stage_tiles * geo.tile_words
        size = T.uint32(geo.tile_words * 4)

        def whole() -> None:
            total = T.uint32(geo.stage_tiles * geo.tile_words * 4)
            b.ptx(BULK_COPY, target.ptr_to([stage, base]), words.ptr_to([row, k_tile, 0]), total, barrier)

        def clamped() -> None:
            for step in range(geo.stage_tiles):
                tile = T.min(k_tile + step, self.args.k_tiles - 1)
                place = target.ptr_to([stage, base + step * geo.tile_words])
                b.ptx(BULK_COPY, place, words.ptr_to([row, tile, 0]), size, barrier)

        b.either(k_tile + geo.stage_tiles <= self.args.k_tiles, whole, clamped)

    def _fill_rows(self, stage: Expr, barrier: Expr, row_tile: Expr, k_tile: Expr) -> None:
        """Copy the scales and zero points of all rows of the tile, per scale row."""
        count = self.geo.row_tiles

        def copy(first: Expr, index: int, tiles: int) -> None:
            for step in range(self.geo.scale_rows):
                group = self._group_row(k_tile * TILE + step * self.geo.row_step)
                self._fill_group(stage, barrier, step, group, first, index, tiles)

        def clamped() -> None:
            for index in range(count):
                copy(b.bind(T.min(row_tile + index, self.args.n_tiles - 1)), index, 1)

        if count == 1:
            clamped()
        else:
            b.either(row_tile + count <= self.args.n_tiles, lambda: copy(row_tile, 0, count), clamped)

    def _fill_group(
        self, stage: Expr, barrier: Expr, step: int, group: Expr, first: Expr, index: int, tiles: int
    ) -> None:
        """Copy one scale row of ``tiles`` row tiles, the first of them ``first``, to place ``index``."""
        geo, kernel, tile_n = self.geo, self.kernel, self.schedule.tile_n
        if kernel.scales is not None:
            target = kernel.scales.ptr_to([stage, step * tile_n + index * TILE])
            source = self.args.scales.ptr_to([group, first * TILE])
            b.ptx(BULK_COPY, target, source, T.uint32(tiles * TILE * geo.scale_bytes), barrier)
        for part in range(geo.zero_parts):
            line = (step * geo.zero_parts + part) * tile_n
            target = kernel.zeros.ptr_to([stage, line + index * TILE])
            source = self.args.zeros.ptr_to(self._zero_index(group, part, first * TILE))
            b.ptx(BULK_COPY, target, source, T.uint32(tiles * TILE * geo.zero_bytes), barrier)

    def _zero_index(self, group: Expr, part: int, n: Expr) -> list[Expr]:
        return [group, part, n] if self.geo.zero_parts == 2 else [group, n]

    def _group_row(self, k: Expr) -> Expr:
        """Return the scale row of element ``k``; rows beyond K repeat the last."""
        span = scale_span(self.geo.gemm)
        return b.bind(T.min(k // span, self.args.groups - 1)) if span else 0


def prefetch(kernel: Kernel, row_tile: Expr, first: Expr) -> None:
    """Bring X's tensor map and a block's first words, from K tile ``first`` on, into caches early."""
    geo, args = kernel.geo, kernel.args
    b.ptx("prefetch.tensormap", T.address_of(kernel.x_map))
    if kernel.gemm.experts:
        return  # Which expert's words is not known yet.
    most = PREFETCH_BYTES // (geo.row_tiles * geo.tile_words * 4)
    tiles = b.bind(T.min(args.k_tiles - first, most))
    with b.when(tiles > 0):
        size = T.Cast("uint32", tiles * (geo.tile_words * 4))
        for index in range(geo.row_tiles):
            row = T.min(row_tile + index, args.n_tiles - 1)
            b.ptx("cp.async.bulk.prefetch.L2.global", args.words.ptr_to([row, first, 0]), size)
