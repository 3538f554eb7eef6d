"""The walk of a block of the pipeline ``wgmma`` over its tiles; both roles walk alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.grouped import Warp, find_m_tile
from ladder.lower.cuda.launch import Overlap
from ladder.lower.cuda.wgmma_grid import Grid, Piece, cut
from ladder.lower.cuda.wgmma_handover import Stream
from ladder.lower.cuda.wgmma_spec import Spec
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import Run, args_of_expert, count_m_tiles, find_rows, find_run

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
        """As `Walk` says."""
        # ptxas takes the operands of copies from uniform registers only where it sees one thread elected.
        with b.when(T.cuda.elect_sync()):
            self.for_each(make())

    def for_each(self, body: Body) -> None:
        """As `Walk` says."""
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
        """As `Walk` says."""
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
