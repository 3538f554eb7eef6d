"""Stream-K by tails: a persistent grid shares the tiles of its last round, and all blocks keep step in K.

Blocks walk whole tiles as long as there are tiles for all. Of the tiles that are left each has a block of its
own, which does its first turns of the math loop; the other blocks, the *helpers*, do the last turns of all
these tiles, the *tails*, tile after tile, in equal shares of consecutive turns. So all blocks read the same K
at about the same time, which shares of consecutive tiles (`ladder.lower.cuda.wgmma_stream`) do not: what many
of them need is in L2. A helper hands the sums of each tail over (`ladder.lower.cuda.wgmma_handover`), and the
tile's own block takes them in, share by share, and stores the tile; sums are added in a fixed order. It takes
in the more, one after the other, the fewer tiles are left: then shares are faster.

* A slot belongs to one share's part of one tile: their numbers, added, are the slot's, and grow from part to
  part of all tails.
* The first blocks are the helpers, so a block waits only for blocks of a lower index.
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
from schedules.shares import full_rounds, owned_turns, share_begin, share_with


@dataclass(frozen=True)
class Tails:
    """One block's part of the tiles that are cut, and of their sums.

    iterations, turn_tiles: Turns of a whole tile; packed tiles along K of one.
    whole, helpers: Tiles that are not cut; blocks that have no tile of their own among the others.
    owned, tail, units: Turns of a cut tile that its own block does, and that helpers do, at least 1; the
        turns of all tails.
    begin, end: Of a helper, its first turn among those of all tails, and the one after its last; of others
        0 and ``owned``.
    """

    grid: Grid
    sums: HandOver
    iterations: Expr
    turn_tiles: int
    whole: Expr
    helpers: Expr
    owned: Expr
    tail: Expr
    units: Expr
    begin: Expr
    end: Expr

    @property
    def _helps(self) -> Expr:
        return self.grid.first < self.helpers

    def first(self) -> tuple[Expr, Expr]:
        """As `Stream` says."""
        number = b.keep(self.begin // self.tail)
        own = self.whole + self.grid.first - self.helpers
        cut = T.if_then_else(self._helps, self.whole + number, own)
        turn = T.if_then_else(self._helps, self.owned + self.begin - number * self.tail, 0)
        tile = b.keep(T.if_then_else(self.whole > 0, self.grid.first, cut))
        return tile, b.keep(T.if_then_else(self.whole > 0, 0, turn) * self.turn_tiles)

    def for_each(self, place: Callable[[Expr], tuple[Expr, Expr]], body: Callable[[Piece], None]) -> None:
        """As `Stream` says."""
        tile, skipped, count = (b.Variable("int32", 0) for _ in range(3))
        following, done = b.Variable("int32", self.grid.first), b.Variable("int32", self.begin)

        def whole() -> None:
            tile.set(following.value)
            count.set(self.iterations)
            following.set(following.value + self.grid.walkers)

        def part() -> None:
            left = b.keep(self.end - done.value)
            tile.set(self.whole + self.grid.first - self.helpers)
            count.set(left)
            with b.when(self._helps):
                number = b.keep(done.value // self.tail)
                inside = b.keep(done.value - number * self.tail)
                tile.set(self.whole + number)
                skipped.set(self.owned + inside)
                count.set(T.min(self.tail - inside, left))
            done.set(done.value + count.value)

        def go_on() -> None:
            b.either(following.value < self.whole, whole, part)

        go_on()
        with b.repeat_while(count.value > 0):
            number = b.keep(tile.value - self.whole)
            first = b.keep(skipped.value * self.turn_tiles)
            body(Piece(*place(tile.value), b.keep(count.value), first, b.keep(skipped.value), number))
            go_on()

    def finish(self, piece: Piece, sums: Any, store: Callable[[], None]) -> None:
        """As `Stream` says."""

        def collect() -> None:
            with b.when(piece.iterations < self.iterations):
                self._collect(piece.number, sums)
            store()

        b.either(piece.skipped > 0, lambda: self.sums.give(self.grid.first + piece.number, sums), collect)

    def announce(self) -> None:
        """As `Stream` says."""
        done = b.Variable("int32", self.begin)
        with b.when(self._helps), b.repeat_while(done.value < self.end):
            number = b.keep(done.value // self.tail)
            self.sums.announce(self.grid.first + number)
            done.set((number + 1) * self.tail)

    def _collect(self, number: Expr, sums: Any) -> None:
        """Add the sums of the shares that lie in the tail of the tile at hand."""
        unit, last = b.keep(number * self.tail), b.keep((number + 1) * self.tail)
        first = share_with(unit, self.units, self.helpers)
        self.sums.take_shares(first, (unit, last), self.units, self.helpers, sums, number)


def divide(spec: Spec, grid: Grid, workspace: Workspace) -> Tails:
    """Compute this block's part; in the device part."""
    walkers = grid.walkers
    tiles = b.keep(grid.n_blocks * grid.m_blocks)
    iterations = b.keep(grid.iterations)
    whole = b.keep(full_rounds(tiles, walkers))
    left = b.keep(tiles - whole)
    helpers = b.keep(walkers - left)
    owned = b.keep(owned_turns(left, iterations, walkers, T.min))
    units = b.keep(left * (iterations - owned))
    begin, end = (share_begin(grid.first + step, units, helpers) for step in (0, 1))
    helps = grid.first < helpers
    begin, end = b.keep(T.if_then_else(helps, begin, 0)), b.keep(T.if_then_else(helps, end, owned))
    tail = b.keep(T.max(iterations - owned, 1))
    sums = HandOver(spec, workspace, grid.thread, "bar.sync")
    turn_tiles = spec.geo.body * spec.geo.tiles_per_slab
    return Tails(grid, sums, iterations, turn_tiles, whole, helpers, owned, tail, units, begin, end)
