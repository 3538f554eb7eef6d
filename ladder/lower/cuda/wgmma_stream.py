"""Stream-K: a persistent grid shares its last tiles evenly, cutting K wherever a share ends.

Work is counted in *units*, iterations of the math loop, tile after tile. Blocks walk whole tiles, in step so
that they find each other's operands in L2, until less than two rounds are left; the rest is cut into one
equal *share* of consecutive units per block. So a share may begin inside a tile: the block hands those
sums over (`ladder.lower.cuda.wgmma_handover`), and the block that began the tile takes them in, share by
share, and stores the tile; sums are added in a fixed order.

* A slot of the workspace belongs to one share, which hands over at most once.
* Shares run from the last block to the first, so a block waits only for blocks of a lower index.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_grid import Grid, Piece
from ladder.lower.cuda.wgmma_handover import HandOver, Workspace
from ladder.lower.cuda.wgmma_spec import Spec
from schedules.shares import share_begin, whole_tiles


@dataclass(frozen=True)
class Shares:
    """One block's share of the units, and its part in the sums of tiles that were cut.

    iterations, turn_tiles: Iterations of a whole tile; packed tiles along K of one.
    whole, units, offset: Tiles that are not cut; units of the others, and how many come before them.
    share, begin, end: The block's share, and its first unit and the one after its last, counted from
        ``offset``.
    """

    grid: Grid
    sums: HandOver
    iterations: Expr
    turn_tiles: int
    whole: Expr
    units: Expr
    offset: Expr
    share: Expr
    begin: Expr
    end: Expr

    def first(self) -> tuple[Expr, Expr]:
        """As `Stream` says."""
        unit = b.keep(T.if_then_else(self.whole > 0, self.grid.first * self.iterations, self.begin))
        tile = b.keep(unit // self.iterations)
        return tile, b.keep((unit - tile * self.iterations) * self.turn_tiles)

    def for_each(self, place: Callable[[Expr], tuple[Expr, Expr]], body: Callable[[Piece], None]) -> None:
        """As `Stream` says."""
        iterations = self.iterations
        unit, last = b.Variable("int32", 0), b.Variable("int32", 0)
        following = b.Variable("int32", self.grid.first)
        self._take_run(unit, last, following)
        with b.repeat_while(unit.value < last.value):
            tile = b.keep(unit.value // iterations)
            skipped = b.keep(unit.value - tile * iterations)
            own = b.keep(T.min(iterations - skipped, last.value - unit.value))
            number = b.keep(tile - self.whole)
            body(Piece(*place(tile), own, skipped * self.turn_tiles, skipped, number))
            unit.set(unit.value + own)
            with b.when(unit.value >= last.value):
                self._take_run(unit, last, following)

    def _take_run(self, unit: b.Variable, last: b.Variable, following: b.Variable) -> None:
        """Go on to the next run of units: a whole tile, at last the share, or nothing."""
        walkers = self.grid.walkers

        def tile() -> None:
            unit.set(following.value * self.iterations)
            last.set(unit.value + self.iterations)

        def share() -> None:
            unit.set(self.offset + self.begin)
            last.set(self.offset + self.end)

        with b.when(following.value < self.whole + walkers):
            b.either(following.value < self.whole, tile, share)
            following.set(following.value + walkers)

    def finish(self, piece: Piece, sums: Any, store: Callable[[], None]) -> None:
        """As `Stream` says."""

        def collect() -> None:
            with b.when(piece.skipped + piece.iterations < self.iterations):
                self._collect((piece.number + 1) * self.iterations, sums)
            store()

        b.either(piece.skipped > 0, lambda: self.sums.give(self.share, sums), collect)

    def announce(self) -> None:
        """As `Stream` says."""
        with b.when(T.And(self.begin < self.end, self.begin % self.iterations > 0)):
            self.sums.announce(self.share)

    def _collect(self, tile_end: Expr, sums: Any) -> None:
        """Add the sums of the following shares that lie in the tile at hand."""
        self.sums.take_shares(self.share + 1, (self.end, tile_end), self.units, self.grid.walkers, sums)


def divide(spec: Spec, grid: Grid, workspace: Workspace) -> Shares:
    """Compute this block's share; in the device part."""
    walkers = grid.walkers
    tiles = b.keep(grid.n_blocks * grid.m_blocks)
    iterations = b.keep(grid.iterations)
    whole = b.keep(whole_tiles(tiles, walkers, T.max))
    units = b.keep((tiles - whole) * iterations)
    offset = b.keep(whole * iterations)
    share = b.keep(walkers - 1 - grid.first)
    begin = b.keep(share_begin(share, units, walkers))
    end = b.keep(share_begin(share + 1, units, walkers))
    sums = HandOver(spec, workspace, grid.thread, "bar.arrive")
    turn_tiles = spec.geo.body * spec.geo.tiles_per_slab
    return Shares(grid, sums, iterations, turn_tiles, whole, units, offset, share, begin, end)
