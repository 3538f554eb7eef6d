"""Stream-K: a persistent grid shares its last tiles, cutting them along K, and hands sums over.

Work is counted in *turns* of the math loop, tile after tile. Blocks walk whole tiles, in step so that they
find each other's operands in L2, until few are left; those are cut evenly (`Shares`) or by their tails
(`Tails`). A block whose part begins inside a tile hands those sums over through a workspace in global memory,
and the block that began the tile takes them in, share by share, and stores the tile; sums are added in a
fixed order.

Sums lie in a *slot* of the workspace as they lie in registers: each thread takes what the same thread of the
other block left, so a warp waits for one flag. Flags are raised by a warp of its own: the math warps need not
wait until their stores have reached L2.

Why it cannot go wrong:

* A slot and its flags are used once by a launch: one block hands over, and exactly one takes it.
* The workspace is memory from the allocator that serves the launch's stream (`ladder.runtime.workspace`),
  whose contents are arbitrary: a flag is up if it holds `RAISED`, 64 bits that no data has, and is taken
  down before the launch ends. So nothing must be set up, and a graph may be replayed.
* A launch that starts early (`launch.Overlap`) touches the workspace only after it waited for the end
  of the launches before it, which may have had the same memory.
* A block waits only for blocks of a lower index, which the GPU started before it: nobody waits for a block
  that cannot start (as two such grids that share the GPU might).
* Where a block hands over more than once, its math warps and the one that raises flags wait for each other
  each time: the barrier never counts a warp's next arrival for one that is late.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.ir import Call, Op
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_geometry import Spec
from ladder.lower.cuda.wgmma_grid import Grid, Piece
from schedules.shares import (
    WORKSPACE,
    full_rounds,
    owned_turns,
    share_begin,
    share_with,
    whole_tiles,
)

RAISED = 0x7FF57E1D7FF9B3C6
"""A flag that is up: NaNs, with payloads of their own, as float32 and as 16-bit floats."""

BARRIER = 3
"""Named barrier of what is handed over; math warpgroups that take turns have 1 and 2, epilogues 8 to 11."""

HAND_OVER = """
__device__ __forceinline__ void ladder_hand_over_{count}_{threads}(
    long long sums_at, long long flags, int slot, int thread, const float* sums) {{
  float4* place = reinterpret_cast<float4*>(sums_at) + slot * ({count} / 4 * {threads}) + thread;
#pragma unroll
  for (int i = 0; i < {count} / 4; ++i)
    __stcg(place + i * {threads},
           make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  asm volatile("{meet} {barrier}, {threads} + 32;" ::: "memory");
}}
"""

ANNOUNCE = """
__device__ __forceinline__ void ladder_announce_{threads}(long long flags, int slot, int lane) {{
  unsigned long long* flag = reinterpret_cast<unsigned long long*>(flags) + slot * ({threads} / 32) + lane;
  asm volatile("bar.sync {barrier}, {threads} + 32;" ::: "memory");
  if (lane < {threads} / 32)
    asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(flag), "l"({raised}ull) : "memory");
}}
"""

TAKE_OVER = """
__device__ __forceinline__ void ladder_take_over_{count}_{threads}(
    long long sums_at, long long flags, int slot, int thread, float* sums) {{
  const float4* place = reinterpret_cast<const float4*>(sums_at) + slot * ({count} / 4 * {threads}) + thread;
  unsigned long long* flag = reinterpret_cast<unsigned long long*>(flags) + (slot * {threads} + thread) / 32;
  unsigned long long found;
  do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(found) : "l"(flag) : "memory");
  while (found != {raised}ull);
  __syncwarp();
  if (thread % 32 == 0)
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(flag), "l"(0ull) : "memory");
#pragma unroll
  for (int i = 0; i < {count} / 4; ++i) {{
    float4 part = __ldcg(place + i * {threads});
    sums[4 * i] += part.x; sums[4 * i + 1] += part.y; sums[4 * i + 2] += part.z; sums[4 * i + 3] += part.w;
  }}
}}
"""


@dataclass(frozen=True)
class Workspace:
    """Global memory through which sums are handed over: its address, and where flags begin in it."""

    address: Expr
    flags: int


def declare_workspace(spec: Spec) -> Workspace:
    """Ask the host for the workspace; in the host part."""
    blocks, warps = spec.device.units, spec.schedule.warps
    sum_bytes = blocks * spec.sums * warps * 32 * 4
    call = Call(Op.get("tirx.tvm_call_packed"), [WORKSPACE, sum_bytes + blocks * warps * 8], ret_ty="int64")
    return Workspace(I.Bind(call), sum_bytes)


@dataclass(frozen=True)
class HandOver:
    """Emits what a block does with slots of the workspace.

    thread: The thread in its block.
    """

    spec: Spec
    workspace: Workspace
    thread: Expr

    @property
    def _text(self) -> dict[str, Any]:
        threads = self.spec.schedule.warps * 32
        meet = "bar.sync" if self.spec.schedule.tails else "bar.arrive"  # where blocks hand over once at most
        about = {"count": self.spec.sums, "threads": threads, "barrier": BARRIER}
        return {**about, "raised": hex(RAISED), "meet": meet}

    @property
    def _flags(self) -> Expr:
        return self.workspace.address + self.workspace.flags

    def announce(self, slot: Expr) -> None:
        """Wait for the math warps that hand over, and raise their flags; one warp."""
        name = "ladder_announce_{threads}".format(**self._text)
        text = ANNOUNCE.format(**self._text)
        b.emit(b.call_inline(name, text, "void", self._flags, slot, self.thread % 32))

    def give(self, slot: Expr, sums: Any) -> None:
        self._move("ladder_hand_over_{count}_{threads}", HAND_OVER, slot, sums)

    def take(self, slot: Expr, sums: Any) -> None:
        """Wait for what was handed over, and add it to a thread's sums."""
        self._move("ladder_take_over_{count}_{threads}", TAKE_OVER, slot, sums)

    def take_shares(
        self, first: Expr, turns: tuple[Expr, Expr], units: Expr, count: Expr, sums: Any, offset: Expr = 0
    ) -> None:
        """Add what shares hand over that follow each other; those without turns hand nothing over.

        first: The first share.
        turns: The first turn that is taken in, and the one behind the last.
        units, count: Turns that are shared, and shares.
        offset: A share's slot is its number and this.
        """
        share, at = b.Variable("int32", first), b.Variable("int32", turns[0])
        with b.repeat_while(at.value < turns[1]):
            end = b.keep(share_begin(share.value + 1, units, count))
            with b.when(at.value < end):
                self.take(share.value + offset, sums)
            share.set(share.value + 1)
            at.set(end)

    def _move(self, name: str, source: str, slot: Expr, sums: Any) -> None:
        text, at, place = self._text, self.workspace.address, sums.ptr_to([0])
        call = (name.format(**text), source.format(**text), "void", at, self._flags, slot, self.thread, place)
        b.emit(b.call_inline(*call))


@dataclass(frozen=True)
class Stream(ABC):
    """One block's part of tiles that are cut along K, and of their sums.

    iterations, turn_tiles: Turns of a whole tile; packed tiles along K of one.
    whole, units: Tiles that are not cut; turns of the others that are shared.
    begin, end: The block's first turn of those, and the one after its last.
    """

    grid: Grid
    sums: HandOver
    iterations: Expr
    turn_tiles: int
    whole: Expr
    units: Expr
    begin: Expr
    end: Expr

    @abstractmethod
    def first(self) -> tuple[Expr, Expr]:
        """Return the first tile that this block works on, and the packed tile along K where it begins."""

    @abstractmethod
    def for_each(self, place: Callable[[Expr], tuple[Expr, Expr]], body: Callable[[Piece], None]) -> None:
        """Run ``body`` for whole tiles, then for this block's pieces of others.

        ``place`` returns a tile's first packed tile along N and its first activation row.
        """

    @abstractmethod
    def finish(self, piece: Piece, sums: Any, store: Callable[[], None]) -> None:
        """Hand over the sums of a piece that began inside its tile; else take in the others and store."""

    @abstractmethod
    def announce(self) -> None:
        """Raise the flags of what the math warps hand over, so that they need not wait; one warp."""


@dataclass(frozen=True)
class Shares(Stream):
    """Tiles that are cut wherever a share ends: the last, fewer than two rounds, in equal shares of turns.

    * A slot of the workspace belongs to one share, which hands over at most once.
    * Shares run from the last block to the first, so a block waits only for blocks of a lower index.

    offset, share: Turns that come before those that are shared; the block's share.
    """

    offset: Expr
    share: Expr

    def first(self) -> tuple[Expr, Expr]:
        unit = b.keep(T.if_then_else(self.whole > 0, self.grid.first * self.iterations, self.begin))
        tile = b.keep(unit // self.iterations)
        return tile, b.keep((unit - tile * self.iterations) * self.turn_tiles)

    def for_each(self, place: Callable[[Expr], tuple[Expr, Expr]], body: Callable[[Piece], None]) -> None:
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
        def collect() -> None:
            with b.when(piece.skipped + piece.iterations < self.iterations):
                self._collect((piece.number + 1) * self.iterations, sums)
            store()

        b.either(piece.skipped > 0, lambda: self.sums.give(self.share, sums), collect)

    def announce(self) -> None:
        with b.when(T.And(self.begin < self.end, self.begin % self.iterations > 0)):
            self.sums.announce(self.share)

    def _collect(self, tile_end: Expr, sums: Any) -> None:
        """Add the sums of the following shares that lie in the tile at hand."""
        self.sums.take_shares(self.share + 1, (self.end, tile_end), self.units, self.grid.walkers, sums)


@dataclass(frozen=True)
class Tails(Stream):
    """Tiles of the last round, of which all blocks keep step in K.

    Each tile that is left has a block of its own, which does its first turns; the other blocks, the
    *helpers*, do the last turns of all these tiles, the *tails*, tile after tile, in equal shares of
    consecutive turns. So all blocks read the same K at about the same time, which `Shares` do not: what many
    of them need is in L2. A tile's block takes in the more shares, one after the other, the fewer tiles are
    left: then shares are faster.

    * A slot belongs to one share's part of one tile: their numbers, added, are the slot's, and grow from part
      to part of all tails.
    * The first blocks are the helpers, so a block waits only for blocks of a lower index.

    helpers: Blocks that have no tile of their own among the tiles that are cut.
    owned, tail: Turns of a cut tile that its own block does, from 0 on, and that helpers do, at least 1.
    """

    helpers: Expr
    owned: Expr
    tail: Expr

    @property
    def _helps(self) -> Expr:
        return self.grid.first < self.helpers

    def first(self) -> tuple[Expr, Expr]:
        number = b.keep(self.begin // self.tail)
        own = self.whole + self.grid.first - self.helpers
        cut = T.if_then_else(self._helps, self.whole + number, own)
        turn = T.if_then_else(self._helps, self.owned + self.begin - number * self.tail, 0)
        tile = b.keep(T.if_then_else(self.whole > 0, self.grid.first, cut))
        return tile, b.keep(T.if_then_else(self.whole > 0, 0, turn) * self.turn_tiles)

    def for_each(self, place: Callable[[Expr], tuple[Expr, Expr]], body: Callable[[Piece], None]) -> None:
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
        def collect() -> None:
            with b.when(piece.iterations < self.iterations):
                self._collect(piece.number, sums)
            store()

        b.either(piece.skipped > 0, lambda: self.sums.give(self.grid.first + piece.number, sums), collect)

    def announce(self) -> None:
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


def divide(spec: Spec, grid: Grid, workspace: Workspace) -> Stream:
    """Compute this block's part; in the device part."""
    tiles, iterations = b.keep(grid.n_blocks * grid.m_blocks), b.keep(grid.iterations)
    sums, turn_tiles = HandOver(spec, workspace, grid.thread), spec.geo.body * spec.geo.tiles_per_slab
    walkers = grid.walkers
    if not spec.schedule.tails:
        whole = b.keep(whole_tiles(tiles, walkers, T.max))
        units = b.keep((tiles - whole) * iterations)
        offset = b.keep(whole * iterations)
        share = b.keep(walkers - 1 - grid.first)
        begin, end = (b.keep(share_begin(share + step, units, walkers)) for step in (0, 1))
        return Shares(grid, sums, iterations, turn_tiles, whole, units, begin, end, offset, share)
    whole = b.keep(full_rounds(tiles, walkers))
    left = b.keep(tiles - whole)
    helpers = b.keep(walkers - left)
    owned = b.keep(owned_turns(left, iterations, walkers, T.min))
    units = b.keep(left * (iterations - owned))
    begin, end = (share_begin(grid.first + step, units, helpers) for step in (0, 1))
    helps = grid.first < helpers
    begin, end = b.keep(T.if_then_else(helps, begin, 0)), b.keep(T.if_then_else(helps, end, owned))
    tail = b.keep(T.max(iterations - owned, 1))
    return Tails(grid, sums, iterations, turn_tiles, whole, units, begin, end, helpers, owned, tail)
