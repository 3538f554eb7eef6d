"""Which tiles of the output a block of the pipeline ``wgmma`` computes."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_spec import Spec
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import count_m_tiles


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
