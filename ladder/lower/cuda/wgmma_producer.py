"""The producer of the wgmma pipeline: one thread that keeps a ring of stages full.

x comes through a tensor map (128-byte swizzle, zero outside), packed words, scales and zero
points through bulk copies. Blocks of a cluster that work on the same activation rows each load a
share of x and multicast it to all (PTX ISA, cp.async.bulk.tensor, ``.multicast::cluster``).

How the producer of the wgmma pipeline brings x into shared memory: rows of a matrix, or windows.

Both are tensor copies of 128 swizzled bytes per activation row, zero outside. Windows of an image (implicit
GEMM) are copied in im2col mode (PTX ISA, "Tensor Im2col mode"): the copy itself walks over pixels, by
strides, over the ends of rows and images; the tap of the window is an offset. So a slab of K must lie
within one tap.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ladder.ir.windows import Windows
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.barriers import Ring
from ladder.lower.cuda.bulk_copies import MATRIX_COPY, TENSOR_COPY, bulk_copy, map_handle, tiled_map
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.cuda.wgmma_grid import Grid, Piece, rows_per_copy
from ladder.lower.cuda.wgmma_memory import Memory
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.implicit_gemm import find_corner, first_channel, output_extents
from schedules.footprint import DEALT_COLUMNS, SWIZZLE_ROW, slices_in_turn
from schedules.group_values import scale_span
from schedules.im2col import IM2COL
from schedules.layouts import TILE
from schedules.schedule import check

WINDOW_COPY = "cp.async.bulk.tensor.4d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes"
MULTICAST = ".multicast::cluster"


def encode_map(spec: Spec, args: Arguments) -> Expr:
    """Encode the tensor map of x on the host; return its handle."""
    windows, geo = spec.gemm.windows, spec.geo
    if windows is not None:
        channels = spec.gemm.channels
        check(
            channels % geo.slab == 0,
            f"tensor copies take {geo.slab} channels of a tap, of {channels} some are left; use 'mma'",
        )
    dtype, element = (spec.gemm.activation if geo.groups.lane == 16 else "uint8"), geo.groups.lane // 8
    rows = rows_per_copy(spec, args)
    if windows is None:
        return tiled_map(args.x, dtype, (args.k_x, args.m), (args.k_x * element,), (geo.slab, rows))
    handle = map_handle()
    numbers = (*windows.kernel, *windows.stride, *windows.padding, *windows.dilation)
    b.emit(T.call_packed(IM2COL, handle, args.x.data, dtype, *args.image, geo.slab, rows, *numbers))
    return handle


def encode_stored_map(spec: Spec, args: Arguments) -> Expr:
    """Encode the tensor map of matrices that are not packed, in tiles of 64 x 64; None where they are."""
    if not spec.gemm.stored:
        return None
    outer, inner = (args.n, args.k_x) if spec.gemm.stored == "rows" else (args.k_x, args.n)
    pitch, size = inner * 2, T.Cast("int64", inner * 2) * outer
    extents = inner, outer, args.experts
    return tiled_map(args.words, spec.gemm.weight, extents, (pitch, size), (TILE, TILE, 1))


@dataclass(frozen=True)
class RowCopies:
    """Copies of rows of a matrix: from activation row ``first_m`` on."""

    x_map: Expr
    first_m: Expr

    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy the slab at packed tile ``k_tile``; slabs come in order. ``mask``: to which blocks."""
        place = (target, T.address_of(self.x_map), k_tile * TILE, self.first_m, barrier)
        if mask is None:
            b.ptx(TENSOR_COPY, *place)
        else:
            b.ptx(TENSOR_COPY + MULTICAST, *place, mask)


class WindowCopies:
    """Copies of windows of an image, one tap and some of its channels at a time.

    Divisions happen when an object is made, once per tile.

    spec, args, x_map: The kernel's spec, its tensors, and the tensor map.
    piece, first_m: The tile, and its first activation row that this block copies.
    """

    def __init__(
        self, spec: Spec, args: Arguments, x_map: Expr, windows: Windows, piece: Piece, first_m: Expr
    ) -> None:
        self.windows, self.x_map, self.slab = windows, x_map, spec.geo.slab
        self.channels = args.image[3]
        self.corner = find_corner(windows, first_m, output_extents(windows, args))
        self.width = b.keep(T.truncdiv(self.channels, windows.groups))
        self.first_channel = first_channel(windows, args, piece.row_tile * TILE, self.width)
        tap, first = self._first_tap(piece.first_tile)
        taps = windows.kernel[1]
        self.channel = b.Variable("int32", first)
        self.tap_row = b.Variable("int32", T.truncdiv(tap, taps))
        self.tap_column = b.Variable("int32", T.truncmod(tap, taps))

    def _first_tap(self, k_tile: Expr) -> tuple[Expr, Expr]:
        """Return the tap at a packed tile, and the first channel within it."""
        if isinstance(k_tile, int) and k_tile == 0:
            return 0, 0
        per_tap = b.keep(T.truncdiv(self.width, TILE))
        tap = b.keep(T.truncdiv(k_tile, per_tap))
        return tap, (k_tile - tap * per_tap) * TILE

    def copy(self, target: Expr, barrier: Expr, k_tile: Expr, mask: Expr | None) -> None:
        """Copy the pixels' channels of one tap; beyond the last tap, channels that there are not: zeros."""
        at, corner = self.windows, self.corner
        inside = self.tap_row.value < at.kernel[0]
        channel = T.Select(inside, self.first_channel + self.channel.value, self.channels)
        offsets = [
            T.Cast("uint16", variable.value * step)
            for variable, step in ((self.tap_column, at.dilation[1]), (self.tap_row, at.dilation[0]))
        ]
        pixel = (channel, corner.column, corner.row, corner.image)
        place = (target, T.address_of(self.x_map), *pixel, barrier)
        if mask is None:
            b.ptx(WINDOW_COPY, *place, *offsets)
        else:
            b.ptx(WINDOW_COPY + MULTICAST, *place, *offsets, mask)
        self._advance()

    def _advance(self) -> None:
        """Go on to the next slab: channels first, then taps of a row, then rows."""
        self.channel.set(self.channel.value + self.slab)
        with b.when(self.channel.value >= self.width):
            self.channel.set(0)
            self.tap_column.set(self.tap_column.value + 1)
            with b.when(self.tap_column.value == self.windows.kernel[1]):
                self.tap_column.set(0)
                self.tap_row.set(self.tap_row.value + 1)


Copies = RowCopies | WindowCopies
"""Copies of the slabs of one tile of x."""


def begin_copies(spec: Spec, args: Arguments, x_map: Expr, piece: Piece, first_m: Expr) -> Copies:
    """Return the copies of a tile, from activation row ``first_m`` on."""
    windows = spec.gemm.windows
    if windows is None:
        return RowCopies(x_map, first_m)
    return WindowCopies(spec, args, x_map, windows, piece, first_m)


PREFETCH_BYTES = 32 * 1024
"""Bytes of packed words that a block fetches into L2 before the kernel before has ended."""


@dataclass(frozen=True)
class Stage:
    """A stage that is being filled: its number in the ring, and the barrier at which its bytes arrive."""

    number: Expr
    barrier: Expr


@dataclass(frozen=True)
class Producer:
    """Emits the copies of one block into its ring.

    x_map: The tensor map of x.
    stored_map: That of weights that are not packed; None where they are.
    """

    spec: Spec
    args: Arguments
    grid: Grid
    memory: Memory
    x_map: Expr
    ring: Ring
    stored_map: Expr = None

    def fill(self, piece: Piece) -> None:
        """Load every stage of one tile of the output."""
        geo, grid, first_m = self.spec.geo, self.grid, piece.first_m
        share = geo.held_m if self.spec.schedule.pair else grid.copied_m
        own = first_m if self.spec.schedule.cluster == 1 else first_m + grid.member * share
        x = begin_copies(self.spec, self.args, self.x_map, piece, own)
        if self.spec.schedule.deal > 1:
            self._fill_dealt(x, piece)
            return
        with b.loop(piece.iterations * (geo.body // geo.slabs)) as step:
            self._fill_stage(x, piece.row_tile, [b.bind(piece.first_tile + step * geo.stage_tiles)])
            self.ring.advance()

    def _fill_dealt(self, x: Copies, piece: Piece) -> None:
        """Load the stages of the block's slices of K, slice after slice; an iteration has whole runs."""
        geo, deal, turns = self.spec.geo, self.spec.schedule.deal, slices_in_turn(self.spec.schedule)
        run = DEALT_COLUMNS // TILE
        runs = geo.body * geo.tiles_per_slab // run
        stages = geo.body // geo.slabs  # of an iteration
        with b.loop(turns) as turn, b.loop(piece.iterations) as iteration:
            own = b.keep(self.grid.slice * turns + turn)
            starts = [b.keep(((iteration * runs + index) * deal + own) * run) for index in range(runs)]
            for stage in range(stages):
                parts = starts if stages == 1 else [b.bind(starts[0] + stage * geo.stage_tiles)]
                self._fill_stage(x, piece.row_tile, parts)
                self.ring.advance()

    def drain(self) -> None:
        """Wait until all stages are free: no other block's products arrive at their barriers any more."""
        with b.loop(self.spec.schedule.stages):
            self.ring.await_empty(self.memory.empty)
            self.ring.advance()

    def _fill_stage(self, x: Copies, row_tile: Expr, parts: list[Expr]) -> None:
        """Wait until the stage is free, then start every copy into it, of equal parts from K tiles on."""
        memory, number = self.memory, self.ring.stage.value
        self.ring.await_empty(memory.empty)
        stage = Stage(number, memory.full.ptr_to([number]))
        barriers.expect(stage.barrier, self._stage_bytes())
        self._fill_x(x, stage, parts)
        for index in range(self.spec.geo.row_tiles):
            # Tiles beyond the matrix repeat the last one: their rows are never stored.
            row = b.bind(T.min(row_tile + index, self.args.n_tiles - 1))
            for part, k_tile in enumerate(parts):
                tiles = self.spec.geo.stage_tiles // len(parts)
                fill = self._fill_words if self.stored_map is None else self._fill_stored
                fill(stage, index, row, k_tile, range(part * tiles, (part + 1) * tiles))
        if memory.scales is not None or memory.zeros is not None:
            self._fill_rows(stage, row_tile, parts)

    def _stage_bytes(self) -> Expr:
        """Return the bytes of a stage: of x, only rows that are copied."""
        geo = self.spec.geo
        rest = geo.stage_bytes - geo.x_bytes
        copies = 1 if self.spec.schedule.pair else self.spec.schedule.cluster
        rows = self.grid.copied_m * (copies * geo.slabs)
        return T.Cast("uint32", rows * SWIZZLE_ROW + rest)

    def _fill_x(self, x: Copies, stage: Stage, parts: list[Expr]) -> None:
        """Copy this block's share of the activation rows, to every block of the cluster that needs it."""
        geo, grid, schedule = self.spec.geo, self.grid, self.spec.schedule
        cluster, mask, first = schedule.cluster, None, 0
        if cluster > 1 and not schedule.pair:
            mask = T.Cast("uint16", ((1 << cluster) - 1) << (grid.slice * cluster))
            first = grid.member * grid.copied_m * SWIZZLE_ROW
        for slab in range(geo.slabs):
            place = slab * geo.held_m * SWIZZLE_ROW + first
            target = self.memory.x.ptr_to([stage.number, place])
            part, rest = divmod(slab, geo.slabs // len(parts))
            x.copy(target, stage.barrier, parts[part] + rest * geo.tiles_per_slab, mask)

    def _fill_words(self, stage: Stage, index: int, row: Expr, k_tile: Expr, tiles: range) -> None:
        """Copy one row tile's packed tiles of the stage; beyond K the last one (x is zero there)."""
        geo, memory = self.spec.geo, self.memory.words
        base = (index * geo.stage_tiles + tiles.start) * geo.groups.tile_words

        def copy(tile: Expr, step: int, count: int) -> None:
            target = memory.ptr_to([stage.number, base + step * geo.groups.tile_words])
            source = self.args.words.ptr_to([row, tile, 0])
            bulk_copy(target, source, count * geo.groups.tile_words * 4, stage.barrier)

        def clamped() -> None:
            for step in range(len(tiles)):
                copy(T.min(k_tile + step, self.args.k_tiles - 1), step, 1)

        inside = k_tile + len(tiles) <= self.args.k_tiles
        b.either(inside, lambda: copy(k_tile, 0, len(tiles)), clamped)

    def _fill_stored(self, stage: Stage, index: int, row: Expr, k_tile: Expr, tiles: range) -> None:
        """Copy one row tile's tiles of the stage of a matrix as it lies; zeros beyond N and K."""
        geo, words = self.spec.geo, self.args.words
        base = (index * geo.stage_tiles + tiles.start) * geo.groups.tile_words
        for step in range(len(tiles)):
            target = self.memory.words.ptr_to([stage.number, base + step * geo.groups.tile_words])
            place = ((k_tile + step) * TILE, row * TILE)
            place = place if self.spec.gemm.stored == "rows" else place[::-1]
            b.ptx(MATRIX_COPY, target, T.address_of(self.stored_map), *place, words.expert, stage.barrier)

    def _fill_rows(self, stage: Stage, row_tile: Expr, parts: list[Expr]) -> None:
        """Copy the scales and zero points of all rows of the tile, per scale row."""
        geo, count = self.spec.geo, self.spec.geo.row_tiles

        def copy(first: Expr, index: int, tiles: int) -> None:
            for step in range(geo.scale_rows):
                part, rest = divmod(step * geo.row_step, self.spec.schedule.tile_k // len(parts))
                group = self._group_row(parts[part] * TILE + rest)
                self._fill_group(stage, step, group, first, range(index, index + tiles))

        def clamped() -> None:
            for index in range(count):
                copy(b.bind(T.min(row_tile + index, self.args.n_tiles - 1)), index, 1)

        if count == 1:
            clamped()
        else:
            b.either(row_tile + count <= self.args.n_tiles, lambda: copy(row_tile, 0, count), clamped)

    def _fill_group(self, stage: Stage, step: int, group: Expr, first: Expr, tiles: range) -> None:
        """Copy one scale row of row tiles from ``first`` on to the places ``tiles``."""
        geo, memory, tile_n = self.spec.geo, self.memory, self.spec.schedule.tile_n
        place, rows = tiles.start * TILE, len(tiles) * TILE
        if memory.scales is not None:
            target = memory.scales.ptr_to([stage.number, step * tile_n + place])
            source = self.args.scales.ptr_to([group, first * TILE])
            bulk_copy(target, source, rows * geo.scale_bytes, stage.barrier)
        for part in range(geo.groups.zero_parts):
            line = (step * geo.groups.zero_parts + part) * tile_n
            target = memory.zeros.ptr_to([stage.number, line + place])
            source = self.args.zeros.ptr_to(self._zero_index(group, part, first * TILE))
            bulk_copy(target, source, rows * geo.zero_bytes, stage.barrier)

    def _zero_index(self, group: Expr, part: int, n: Expr) -> list[Expr]:
        return [group, part, n] if self.spec.geo.groups.zero_parts == 2 else [group, n]

    def _group_row(self, k: Expr) -> Expr:
        """Return the scale row of element ``k``; rows beyond K repeat the last."""
        span = scale_span(self.spec.gemm)
        return b.bind(T.min(k // span, self.args.groups - 1)) if span else 0


def prefetch(spec: Spec, args: Arguments, x_map: Expr, row_tile: Expr, first: Expr) -> None:
    """Bring the tensor map and a block's first words, from K tile ``first`` on, into caches early."""
    geo = spec.geo
    b.ptx("prefetch.tensormap", T.address_of(x_map))
    if spec.gemm.experts:
        return  # Which expert's words is not known yet.
    most = PREFETCH_BYTES // (geo.row_tiles * geo.groups.tile_words * 4)
    tiles = b.bind(T.min(args.k_tiles - first, most))
    with b.when(tiles > 0):
        size = T.Cast("uint32", tiles * (geo.groups.tile_words * 4))
        for index in range(geo.row_tiles):
            row = T.min(row_tile + index, args.n_tiles - 1)
            b.ptx("cp.async.bulk.prefetch.L2.global", args.words.ptr_to([row, first, 0]), size)
