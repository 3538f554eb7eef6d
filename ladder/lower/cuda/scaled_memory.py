"""Arguments and shared memory of block-scaled products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.scaled import ScaledGemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.bulk_copies import tiled_map
from schedules.scaled import ATOM, ROWS, SLAB, ScaledSchedule, exchange_bytes


@dataclass(frozen=True)
class ScaledArguments:
    """Tensors and extents; the bias may be None.

    m, n, row_bytes: Extents of the result, and bytes of a row of codes.
    x_atoms, w_atoms: Atoms of 128 rows that the scales of x and of the weight have.
    x, x_scales, w, w_scales, factor, bias, y: See `ladder.lower.cuda.scaled.emit`.
    """

    m: Expr
    n: Expr
    row_bytes: Expr
    x_atoms: Expr
    w_atoms: Expr
    x: Any
    x_scales: Any
    w: Any
    w_scales: Any
    factor: Any
    bias: Any
    y: Any


def declare(form: ScaledGemm) -> ScaledArguments:
    """Declare the kernel's arguments."""
    m, n, row_bytes, x_atoms, w_atoms, groups = (
        b.symbol(name) for name in ("M", "N", "row_bytes", "x_atoms", "w_atoms", "groups")
    )
    x = b.tensor("x", (m, row_bytes), "uint8")
    x_scales = b.tensor("x_scales", (x_atoms, groups, ATOM), "uint8")
    w = b.tensor("w", (n, row_bytes), "uint8")
    w_scales = b.tensor("w_scales", (w_atoms, groups, ATOM), "uint8")
    factor = b.tensor("factor", (1,), "float32", align=4)
    bias = b.tensor("bias", (n,), form.output, align=4) if form.bias else None
    y = b.tensor("y", (m, n), form.output, align=4)
    return ScaledArguments(m, n, row_bytes, x_atoms, w_atoms, x, x_scales, w, w_scales, factor, bias, y)


def encode_map(source: Any, rows: Expr, row_bytes: Expr, box: Expr) -> Expr:
    """Encode on the host the tensor map of codes: 128 swizzled bytes of ``box`` rows, zero outside."""
    return tiled_map(source, "uint8", (row_bytes, rows), (row_bytes,), (SLAB, box))


@dataclass(frozen=True)
class Stages:
    """Parts of stages, of one kind: where they begin in a stage of ``buffer``, and bytes between stages."""

    buffer: Any
    begin: Expr
    stride: int

    def place(self, stage: Expr, at: Expr = 0) -> Expr:
        """Return the address of a byte."""
        return self.buffer.ptr_to([stage, self.begin + at])


@dataclass(frozen=True)
class Memory:
    """Shared memory of a block.

    x, w, scales: Stages of codes, and of scales: the weight's atoms, then those of x.
    full, empty: Barriers of the stages.
    partner: Barriers of the stages of the other block of a pair, where this one starts the products, or None.
    finished: Barrier of the sums.
    word: Where the allocation of tensor memory writes its address.
    sums, arrived: Where the other blocks of the cluster put their sums, and the barrier that counts them, or
        None.
    """

    x: Stages
    w: Stages
    scales: Stages
    full: Any
    empty: Any
    partner: Any
    finished: Any
    word: Any
    sums: Any
    arrived: Any

    def initialise(self, schedule: ScaledSchedule) -> None:
        """Emit the initialisation of all barriers, for one thread."""
        rings = [self.full, self.empty, *([] if self.partner is None else [self.partner])]
        stages = [ring.ptr_to([stage]) for ring in rings for stage in range(schedule.stages)]
        for barrier in (*stages, self.finished.ptr_to([0])):
            barriers.initialise(barrier)
        if self.arrived is not None:
            arrived = self.arrived.ptr_to([0])
            barriers.initialise(arrived)
            size = T.uint32(exchange_bytes(schedule))
            barriers.expect(arrived, size)
        barriers.publish()


def _place_stages(
    pool: Any, form: ScaledGemm, schedule: ScaledSchedule, part: Expr
) -> tuple[Stages, Stages, Stages]:
    """Place the stages of x, of the weight, and of scales.

    Products read 128 rows of the weight. Where a block has the half called ``part`` of them, all else of its
    stage lies in the place of the other half: bytes that have come, and whose products are not stored.
    """
    stages, x_bytes = schedule.stages, schedule.held_m * SLAB
    sizes = (x_bytes, ROWS * SLAB, form.slab_atoms * (1 + schedule.x_atoms) * ATOM)
    if schedule.rows == ROWS:
        made = [pool.alloc((stages, size), "uint8", align=1024) for size in sizes]
        x, w, scales = (Stages(buffer, 0, size) for buffer, size in zip(made, sizes, strict=True))
        return x, w, scales
    buffer = pool.alloc((stages, ROWS * SLAB), "uint8", align=1024)
    other = b.bind((1 - part) * (schedule.rows * SLAB))
    begins = (other, 0, other + x_bytes)
    x, w, scales = (Stages(buffer, begin, ROWS * SLAB) for begin in begins)
    return x, w, scales


def place(form: ScaledGemm, schedule: ScaledSchedule, part: Expr) -> Memory:
    """Place what a block shares."""
    pool, stages, split = b.SharedPool(), schedule.stages, schedule.split_k
    x, w, scales = _place_stages(pool, form, schedule, part)
    full, empty = (pool.alloc((stages,), "uint64", align=8) for _ in range(2))
    partner = pool.alloc((stages,), "uint64", align=8) if schedule.pair else None
    finished, word = pool.alloc((1,), "uint64", align=8), pool.alloc((1,), "uint32", align=8)
    sums = arrived = None
    if split > 1:
        sums = pool.alloc((split - 1, schedule.tile_m // split // 4, ROWS, 4), "float32", align=128)
        arrived = pool.alloc((1,), "uint64", align=8)
    pool.commit()
    return Memory(x, w, scales, full, empty, partner, finished, word, sums, arrived)


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
