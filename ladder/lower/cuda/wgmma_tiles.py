"""The walk of a block of the pipeline ``wgmma`` over its tiles; both roles walk alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_grid import Grid, Piece, cut
from ladder.lower.cuda.wgmma_spec import Spec
from ladder.lower.cuda.wgmma_stream import Stream

Expr = Any


@dataclass(frozen=True)
class Tiles:
    """The tiles of a block.

    spec, grid, stream: The kernel's spec, the block's place in the grid, and its share of tiles that are cut
        along K.
    m: Activation rows, or the row after the expert's last one.
    expert_m: First activation row of a grouped GEMM's tile; None otherwise.
    """

    spec: Spec
    grid: Grid
    stream: Stream | None
    m: Expr
    expert_m: Expr = None

    def for_each(self, body: Callable[[Piece], None]) -> None:
        """Run ``body`` for every tile of this block, or piece of a tile."""
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

    def _whole(self, body: Callable[[Piece], None], tile: Expr) -> None:
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
