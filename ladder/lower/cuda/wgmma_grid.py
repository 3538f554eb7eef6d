"""Which tiles of the output a block of the pipeline ``wgmma`` computes; both roles walk over them alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.grouped import Warp, find_m_tile
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import Run, args_of_expert, count_m_tiles, find_rows, find_run

if TYPE_CHECKING:
    from ladder.lower.cuda.wgmma_stream import Stream


@dataclass(frozen=True)
class Grid:
    """The block's place in the grid.

    thread: The thread in its block.
    first, walkers: First tile of the cluster; clusters of a persistent grid, which walk over the tiles in
        iteration.
    slice, member: The block's slice of K, and its place among the blocks of the cluster that share activation
        rows.
    n_blocks, m_blocks: Tiles of a cluster along N and along M.
    iterations, first_tile: Of the math loop (where K is dealt, of a slice), and the packed tile along K where
        they begin.
    copied_m: Activation rows of a tile that the block copies.
    """

    thread: Expr
    first: Expr
    walkers: int
    slice: Expr
    member: Expr
    n_blocks: Expr
    m_blocks: Expr
    iterations: Expr
    first_tile: Expr
    copied_m: Expr


@dataclass(frozen=True)
class Piece:
    """A tile of the output, or a part of its K.

    row_tile, first_m: First packed tile along N, and first activation row.
    iterations, first_tile: Of the math loop, and the packed tile along K where they begin.
    skipped, number: Of stream-K: iterations of the tile before the piece; the tile's number among those that
        are cut.
    """

    row_tile: Expr
    first_m: Expr
    iterations: Expr
    first_tile: Expr
    skipped: Expr = 0
    number: Expr = None


def rows_per_copy(spec: Spec, args: Arguments) -> Expr:
    """Return the activation rows that one block of a cluster copies: its share of a tile, or of M, by eights.

    Copying rows beyond M, which are filled with zeros, takes several times as long as rows that exist.
    """
    whole = spec.schedule.tile_m // spec.schedule.cluster
    each = 8 if spec.schedule.pair else 8 * spec.schedule.cluster  # of a pair the first has whole rows
    return T.min(whole, (args.m + each - 1) // each * 8)


def find_grid(spec: Spec, args: Arguments) -> Grid:
    """Place clusters: one per tile (or tiles that share activation rows), or as many as fit."""
    schedule, geo, blocks = spec.schedule, spec.geo, spec.geo.blocks
    split, cluster = schedule.split_k, schedule.cluster
    rows = geo.row_tiles * cluster
    n_blocks, m_blocks = (args.n_tiles + rows - 1) // rows, count_m_tiles(args, schedule.tile_m)
    walkers = spec.device.units // blocks
    (block,) = b.block_index([(walkers if schedule.persistent else n_blocks * m_blocks) * blocks])
    rank: Expr = b.cluster_rank([blocks])[0] if blocks > 1 else 0
    first = b.bind(block // blocks) if blocks > 1 else block
    slice_ = b.bind(rank // cluster) if cluster > 1 else rank
    member = b.bind(rank % cluster) if cluster > 1 else 0
    thread = b.thread_index(geo.threads)
    n_blocks, m_blocks = b.bind(n_blocks), b.bind(m_blocks)
    body_tiles = geo.body * geo.tiles_per_slab
    slices = max(split, schedule.deal)
    iterations = b.bind((args.k_tiles + body_tiles * slices - 1) // (body_tiles * slices))
    first_tile = b.bind(slice_ * iterations * body_tiles) if split > 1 else 0
    copied_m = b.bind(rows_per_copy(spec, args))
    return Grid(thread, first, walkers, slice_, member, n_blocks, m_blocks, iterations, first_tile, copied_m)


def cut(spec: Spec, grid: Grid, tile: Expr) -> tuple[Expr, Expr]:
    """Return a tile's first packed tile along N and its place along M.

    Walk columns of ``raster`` row blocks, M inside, so that neighbours share x and weights in L2.
    """
    raster = spec.schedule.raster
    width = raster * grid.m_blocks
    column = b.bind(tile // width)
    inside = b.bind(tile % width)
    columns = b.bind(T.min(raster, grid.n_blocks - column * raster))
    row_block = column * raster + inside % columns
    row_tile = (row_block * spec.schedule.cluster + grid.member) * spec.geo.row_tiles
    return row_tile, inside // columns


Body = Callable[[Piece], None]


class Walk(Protocol):
    """How a block walks over its tiles."""

    def for_each(self, body: Body) -> None:
        """Run ``body`` for every tile of this block, or piece of a tile; for all threads of a warp."""

    def for_one_thread(self, make: Callable[[], Body]) -> None:
        """Do so for one thread of a warp, with the body that ``make`` emits the beginning of."""


@dataclass(frozen=True)
class Tiles:
    """The tiles of a block.

    m: Activation rows, or the row after the expert's last one.
    expert_m: First activation row of a grouped GEMM's tile; None otherwise.
    """

    spec: Spec
    grid: Grid
    stream: Stream | None
    m: Expr
    expert_m: Expr = None

    def for_one_thread(self, make: Callable[[], Body]) -> None:
        # ptxas takes the operands of copies from uniform registers only where it sees one thread elected.
        with b.when(T.cuda.elect_sync()):
            self.for_each(make())

    def for_each(self, body: Body) -> None:
        grid = self.grid
        if not self.spec.schedule.persistent:
            self._whole(body, grid.first)
            return
        if self.stream is not None:
            self.stream.for_each(self._place, body)
            return
        tile = b.Variable("int32", grid.first)
        with b.repeat_while(tile.value < grid.n_blocks * grid.m_blocks):
            self._whole(body, tile.value)
            tile.set(tile.value + grid.walkers)

    def _whole(self, body: Body, tile: Expr) -> None:
        body(Piece(*self._place(tile), self.grid.iterations, self.grid.first_tile))

    def _place(self, tile: Expr) -> tuple[Expr, Expr]:
        """Return a tile's first packed tile along N and first activation row.

        The last tile along M ends at M and repeats some rows of the one before (equal values, stored
        twice): a tensor copy is several times slower on rows beyond M than on rows that exist.
        """
        row_tile, index = cut(self.spec, self.grid, tile)
        if self.expert_m is not None:
            return b.keep(row_tile), b.keep(self.expert_m)
        tile_m = self.spec.schedule.tile_m
        return b.keep(row_tile), b.keep(T.min(index * tile_m, T.max(self.m - tile_m, 0)))


@dataclass(frozen=True)
class ExpertTiles:
    """The tiles of a block that walks over those of all experts.

    spec, grid, args: The kernel's spec, the block's place in the grid, whose tiles along M are those that
        experts have, and the kernel's tensors.
    expert, first, stop: Of the present tile: its expert, its first activation row, and the expert's end.
    """

    spec: Spec
    grid: Grid
    args: Arguments
    warp: Warp
    run: Run | None
    expert: b.Variable
    first: b.Variable
    stop: b.Variable

    @property
    def shown(self) -> Arguments:
        """The arguments as the product of the present tile's expert sees them."""
        return args_of_expert(self.args, self.expert.value, self.stop.value)

    def for_one_thread(self, make: Callable[[], Body]) -> None:
        """As `Walk` says; the whole warp searches."""
        body = make()

        def elected(piece: Piece) -> None:
            with b.when(T.cuda.elect_sync()):
                body(piece)

        self.for_each(elected)

    def for_each(self, body: Body) -> None:
        grid, tile = self.grid, b.Variable("int32", self.grid.first)
        with b.repeat_while(tile.value < grid.n_blocks * grid.m_blocks):
            row_tile, index = (b.keep(part) for part in cut(self.spec, grid, tile.value))
            *rows, exists = find_rows(self.args, self.run, index, self.spec.schedule.tile_m, self.warp)
            for cell, value in zip((self.expert, self.first, self.stop), rows, strict=True):
                cell.set(value)
            with b.when(exists):
                body(Piece(row_tile, self.first.value, grid.iterations, grid.first_tile))
            tile.set(tile.value + grid.walkers)


def walk_experts(spec: Spec, grid: Grid, args: Arguments) -> ExpertTiles:
    """Return the walk over the tiles of all experts, whose ranges the kernels before may write."""
    tile_m, warp = spec.schedule.tile_m, Warp(b.bind(grid.thread % 32))
    run = None if args.slots is not None else find_run(args, tile_m, warp)
    m_blocks = b.keep(count_m_tiles(args, tile_m) if run is None else run.total)
    expert, first, stop = (b.Variable("int32", 0) for _ in range(3))
    return ExpertTiles(spec, replace(grid, m_blocks=m_blocks), args, warp, run, expert, first, stop)


def emit_of_expert(
    spec: Spec, grid: Grid, args: Arguments, overlap: Overlap, emit: Callable[[Arguments, Tiles], None]
) -> None:
    """Emit the roles with the arguments of the expert whose activation rows the block has, if any."""
    index = b.keep(cut(spec, grid, grid.first)[1])
    found = find_m_tile(args, index, spec.schedule.tile_m, b.bind(grid.thread % 32), overlap)
    first_m = b.keep(found.first)
    with b.when(found.exists):
        emit(found.args, Tiles(spec, grid, None, found.args.m, first_m))
