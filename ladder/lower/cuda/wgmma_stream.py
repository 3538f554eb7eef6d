"""Stream-K: a persistent grid shares its last tiles evenly, cutting K wherever a share ends.

Work is counted in *units*, turns of the math loop, tile after tile. Blocks walk whole tiles, in step so
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
from typing import TYPE_CHECKING, Any

from tvm.ir import Call, Op
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import builder as b
from schedules.shares import WORKSPACE, share_begin, whole_tiles

if TYPE_CHECKING:
    from ladder.lower.cuda.wgmma import Kernel

Expr = Any

RAISED = 0x7FF57E1D7FF9B3C6
"""A flag that is up: NaNs, with payloads of their own, as float32 and as 16-bit floats."""

HAND_OVER = """
__device__ __forceinline__ void ladder_hand_over_{count}_{threads}(
    long long sums_at, long long flags, int share, int thread, const float* sums) {{
  float4* place = reinterpret_cast<float4*>(sums_at) + share * ({count} / 4 * {threads}) + thread;
#pragma unroll
  for (int i = 0; i < {count} / 4; ++i)
    __stcg(place + i * {threads},
           make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  asm volatile("bar.arrive 1, {threads} + 32;" ::: "memory");
}}
"""

ANNOUNCE = """
__device__ __forceinline__ void ladder_announce_{threads}(long long flags, int share, int lane) {{
  unsigned long long* flag = reinterpret_cast<unsigned long long*>(flags) + share * ({threads} / 32) + lane;
  asm volatile("bar.sync 1, {threads} + 32;" ::: "memory");
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


class Stream:
    """One block's walk over its units, and its part in the sums of tiles that were cut."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel, self.geo = kernel, kernel.geo
        self.threads = kernel.schedule.warps * 32
        self.count = self.geo.m64 * self.geo.accumulators

    def declare(self) -> None:
        """Ask the host for the workspace; in the host part."""
        blocks = self.kernel.device.units
        self.sum_bytes = blocks * self.count * self.threads * 4
        size = self.sum_bytes + blocks * self.kernel.schedule.warps * 8
        call = Call(Op.get("tirx.tvm_call_packed"), [WORKSPACE, size], ret_ty="int64")
        self.workspace = I.Bind(call)

    def divide(self) -> None:
        """Compute this block's share; in the device part, once the grid is known."""
        kernel = self.kernel
        tiles = b.keep(kernel.n_blocks * kernel.m_blocks)
        self.turns = kernel.turns = b.keep(kernel.turns)
        self.whole = b.keep(whole_tiles(tiles, kernel.walkers, T.max))
        self.units = b.keep((tiles - self.whole) * self.turns)
        self.offset = b.keep(self.whole * self.turns)
        self.share = b.keep(kernel.walkers - 1 - kernel.first)
        self.begin, self.end = b.keep(self._begin(self.share)), b.keep(self._begin(self.share + 1))

    def _begin(self, share: Expr) -> Expr:
        return share_begin(share, self.units, self.kernel.walkers)

    def first(self) -> tuple[Expr, Expr]:
        """Return the first tile that this block works on, and the packed tile along K where it begins."""
        unit = b.keep(T.if_then_else(self.whole > 0, self.kernel.first * self.turns, self.begin))
        tile = b.keep(unit // self.turns)
        return tile, b.keep((unit - tile * self.turns) * self._turn_tiles)

    @property
    def _turn_tiles(self) -> int:
        return self.geo.body * self.geo.tiles_per_slab

    def for_each_piece(self, body: Callable[[Expr, Expr], None]) -> None:
        """Run ``body(first row tile, first token)`` for whole tiles, then the pieces of this block's share.

        Meanwhile ``kernel.turns`` and ``kernel.first_tile`` are those of the piece.
        """
        kernel, turns = self.kernel, self.turns
        self.unit, self.last = b.Variable("int32", 0), b.Variable("int32", 0)
        self.following = b.Variable("int32", kernel.first)
        self._take_run()
        with b.repeat_while(self.unit.value < self.last.value):
            tile = b.keep(self.unit.value // turns)
            self.skipped = b.keep(self.unit.value - tile * turns)
            kernel.turns = b.keep(T.min(turns - self.skipped, self.last.value - self.unit.value))
            kernel.first_tile = self.skipped * self._turn_tiles
            self.tile_end = b.keep((tile + 1) * turns - self.offset)
            body(*map(b.keep, kernel.place(tile)))
            self.unit.set(self.unit.value + kernel.turns)
            with b.when(self.unit.value >= self.last.value):
                self._take_run()

    def _take_run(self) -> None:
        """Go on to the next run of units: a whole tile, at last the share, or nothing."""
        following = self.following

        def tile() -> None:
            self.unit.set(following.value * self.turns)
            self.last.set(self.unit.value + self.turns)

        def share() -> None:
            self.unit.set(self.offset + self.begin)
            self.last.set(self.offset + self.end)

        with b.when(following.value < self.whole + self.kernel.walkers):
            b.either(following.value < self.whole, tile, share)
            following.set(following.value + self.kernel.walkers)

    def finish(self, store: Callable[[], None]) -> None:
        """Hand over the sums of a piece that began inside its tile; else take in the others and store."""

        def collect() -> None:
            with b.when(self.skipped + self.kernel.turns < self.turns):
                self._collect()
            store()

        b.either(self.skipped > 0, lambda: self._call("hand_over", HAND_OVER, self.share), collect)

    def announce(self) -> None:
        """Raise the flags of what the math warps hand over, so that they need not wait; one warp."""
        text = ANNOUNCE.format(threads=self.threads, raised=hex(RAISED))
        flags, lane = self.workspace + self.sum_bytes, self.kernel.thread % 32
        with b.when(T.And(self.begin < self.end, self.begin % self.turns > 0)):
            name = f"ladder_announce_{self.threads}"
            b.emit(b.call_inline(name, text, "void", flags, self.share, lane))

    def _collect(self) -> None:
        """Add the sums of the following shares that lie in the tile at hand."""
        other, begin = b.Variable("int32", self.share + 1), b.Variable("int32", self.end)
        with b.repeat_while(begin.value < self.tile_end):
            end = b.keep(self._begin(other.value + 1))
            with b.when(begin.value < end):  # else there are more blocks than units
                self._call("take_over", TAKE_OVER, other.value)
            other.set(other.value + 1)
            begin.set(end)

    def _call(self, verb: str, source: str, share: Expr) -> None:
        text = source.format(count=self.count, threads=self.threads, raised=hex(RAISED))
        name = f"ladder_{verb}_{self.count}_{self.threads}"
        flags, sums = self.workspace + self.sum_bytes, self.kernel.partial.ptr_to([0])
        thread = self.kernel.thread
        b.emit(b.call_inline(name, text, "void", self.workspace, flags, share, thread, sums))
