"""Stream-K: a persistent grid shares its last tiles evenly, cutting K wherever a share ends.

Work is counted in *units*, iterations of the math loop, tile after tile. Blocks walk whole tiles, in step so
that they find each other's operands in L2, until less than two rounds are left; the rest is cut into one
equal *share* of consecutive units per block. So a share may begin inside a tile: the block hands those
sums over through a workspace in global memory, as they lie in its registers, and the block that began
the tile takes them in, share by share, and stores the tile. Each thread takes what the same thread of
the other block left, so a warp waits for one flag; sums are added in a fixed order. Flags are raised by
a warp of its own: the math warps need not wait until their stores have reached L2.

Why it cannot go wrong:

* A slot and its flags belong to one share, which hands over at most once, and exactly one block takes it.
* The workspace is memory from the allocator that serves the launch's stream (`ladder.runtime.workspace`),
  whose contents are arbitrary: a flag is up if it holds `RAISED`, 64 bits that no data has, and is taken
  down before the launch ends. So nothing must be set up, and a graph may be replayed.
* A launch that starts early (`launch.Overlap`) touches the workspace only after it waited for the end
  of the launches before it, which may have had the same memory.
* Shares run from the last block to the first, so a block waits only for blocks of a lower index, which
  the GPU started before it: nobody waits for a block that cannot start (as two such grids that share
  the GPU might).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.ir import Call, Op
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_grid import Grid, Piece
from ladder.lower.cuda.wgmma_spec import Spec
from schedules.shares import WORKSPACE, share_begin, whole_tiles

Expr = Any

RAISED = 0x7FF57E1D7FF9B3C6
"""A flag that is up: NaNs, with payloads of their own, as float32 and as 16-bit floats."""

BARRIER = 3
"""Named barrier of what is handed over; math warpgroups that take turns have 1 and 2, epilogues 8 to 11."""

HAND_OVER = """
__device__ __forceinline__ void ladder_hand_over_{count}_{threads}(
    long long sums_at, long long flags, int share, int thread, const float* sums) {{
  float4* place = reinterpret_cast<float4*>(sums_at) + share * ({count} / 4 * {threads}) + thread;
#pragma unroll
  for (int i = 0; i < {count} / 4; ++i)
    __stcg(place + i * {threads},
           make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  asm volatile("bar.arrive {barrier}, {threads} + 32;" ::: "memory");
}}
"""

ANNOUNCE = """
__device__ __forceinline__ void ladder_announce_{threads}(long long flags, int share, int lane) {{
  unsigned long long* flag = reinterpret_cast<unsigned long long*>(flags) + share * ({threads} / 32) + lane;
  asm volatile("bar.sync {barrier}, {threads} + 32;" ::: "memory");
  if (lane < {threads} / 32)
    asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(flag), "l"({raised}ull) : "memory");
}}
"""

TAKE_OVER = """
__device__ __forceinline__ void ladder_take_over_{count}_{threads}(
    long long sums_at, long long flags, int share, int thread, float* sums) {{
  const float4* place = reinterpret_cast<const float4*>(sums_at) + share * ({count} / 4 * {threads}) + thread;
  unsigned long long* flag = reinterpret_cast<unsigned long long*>(flags) + (share * {threads} + thread) / 32;
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
class Stream:
    """One block's share of the units, and its part in the sums of tiles that were cut.

    spec, grid, workspace: The kernel's spec, the block's place in the grid, and where sums are handed over.
    iterations: Iterations of a whole tile.
    whole, units, offset: Tiles that are not cut; units of the others, and how many come before them.
    share, begin, end: The block's share, and its first unit and the one after its last, counted from
        ``offset``.
    """

    spec: Spec
    grid: Grid
    workspace: Workspace
    iterations: Expr
    whole: Expr
    units: Expr
    offset: Expr
    share: Expr
    begin: Expr
    end: Expr

    @property
    def _threads(self) -> int:
        return self.spec.schedule.warps * 32

    @property
    def _iteration_tiles(self) -> int:
        return self.spec.geo.body * self.spec.geo.tiles_per_slab

    def first(self) -> tuple[Expr, Expr]:
        """Return the first tile that this block works on, and the packed tile along K where it begins."""
        unit = b.keep(T.if_then_else(self.whole > 0, self.grid.first * self.iterations, self.begin))
        tile = b.keep(unit // self.iterations)
        return tile, b.keep((unit - tile * self.iterations) * self._iteration_tiles)

    def for_each(self, place: Callable[[Expr], tuple[Expr, Expr]], body: Callable[[Piece], None]) -> None:
        """Run ``body`` for whole tiles, then for the pieces of this block's share.

        ``place`` returns a tile's first packed tile along N and its first activation row.
        """
        iterations = self.iterations
        unit, last = b.Variable("int32", 0), b.Variable("int32", 0)
        following = b.Variable("int32", self.grid.first)
        self._take_run(unit, last, following)
        with b.repeat_while(unit.value < last.value):
            tile = b.keep(unit.value // iterations)
            skipped = b.keep(unit.value - tile * iterations)
            own = b.keep(T.min(iterations - skipped, last.value - unit.value))
            end = b.keep((tile + 1) * iterations - self.offset)
            body(Piece(*place(tile), own, skipped * self._iteration_tiles, skipped, end))
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
        """Hand over the sums of a piece that began inside its tile; else take in the others and store."""

        def collect() -> None:
            with b.when(piece.skipped + piece.iterations < self.iterations):
                self._collect(piece.end, sums)
            store()

        def hand_over() -> None:
            self._call("hand_over", HAND_OVER, self.share, sums)

        b.either(piece.skipped > 0, hand_over, collect)

    def announce(self) -> None:
        """Raise the flags of what the math warps hand over, so that they need not wait; one warp."""
        text = ANNOUNCE.format(threads=self._threads, raised=hex(RAISED), barrier=BARRIER)
        flags, lane = self.workspace.address + self.workspace.flags, self.grid.thread % 32
        with b.when(T.And(self.begin < self.end, self.begin % self.iterations > 0)):
            name = f"ladder_announce_{self._threads}"
            b.emit(b.call_inline(name, text, "void", flags, self.share, lane))

    def _collect(self, tile_end: Expr, sums: Any) -> None:
        """Add the sums of the following shares that lie in the tile at hand."""
        other, begin = b.Variable("int32", self.share + 1), b.Variable("int32", self.end)
        with b.repeat_while(begin.value < tile_end):
            end = b.keep(share_begin(other.value + 1, self.units, self.grid.walkers))
            with b.when(begin.value < end):  # else there are more blocks than units
                self._call("take_over", TAKE_OVER, other.value, sums)
            other.set(other.value + 1)
            begin.set(end)

    def _call(self, verb: str, source: str, share: Expr, sums: Any) -> None:
        count, threads, at = self.spec.sums, self._threads, self.workspace.address
        text = source.format(count=count, threads=threads, raised=hex(RAISED), barrier=BARRIER)
        name, flags = f"ladder_{verb}_{count}_{threads}", at + self.workspace.flags
        place = sums.ptr_to([0])
        b.emit(b.call_inline(name, text, "void", at, flags, share, self.grid.thread, place))


def divide(spec: Spec, grid: Grid, workspace: Workspace) -> Stream:
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
    return Stream(spec, grid, workspace, iterations, whole, units, offset, share, begin, end)
