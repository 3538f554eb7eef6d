"""Sums that one block of stream-K hands over to another, through a workspace in global memory.

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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from tvm.ir import Call, Op
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.wgmma_grid import Piece
from ladder.lower.cuda.wgmma_spec import Spec
from schedules.shares import WORKSPACE, share_begin

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


class Stream(Protocol):
    """One block's part of tiles that are cut along K, and of their sums."""

    def first(self) -> tuple[Expr, Expr]:
        """Return the first tile that this block works on, and the packed tile along K where it begins."""

    def for_each(self, place: Callable[[Expr], tuple[Expr, Expr]], body: Callable[[Piece], None]) -> None:
        """Run ``body`` for whole tiles, then for this block's pieces of others.

        ``place`` returns a tile's first packed tile along N and its first activation row.
        """

    def finish(self, piece: Piece, sums: Any, store: Callable[[], None]) -> None:
        """Hand over the sums of a piece that began inside its tile; else take in the others and store."""

    def announce(self) -> None:
        """Raise the flags of what the math warps hand over, so that they need not wait; one warp."""


@dataclass(frozen=True)
class HandOver:
    """Emits what a block does with slots of the workspace.

    thread: The thread in its block.
    meet: ``bar.arrive`` where a block hands over once at most, else ``bar.sync``.
    """

    spec: Spec
    workspace: Workspace
    thread: Expr
    meet: str

    @property
    def _text(self) -> dict[str, Any]:
        threads = self.spec.schedule.warps * 32
        about = {"count": self.spec.sums, "threads": threads, "barrier": BARRIER}
        return {**about, "raised": hex(RAISED), "meet": self.meet}

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
