"""Barriers in shared memory that count arrivals and bytes (mbarrier), and walks around rings of stages.

A ring has two barriers for each stage: ``full`` is for who reads it, ``empty`` for who writes it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b

REMOTE_ARRIVE = """
__device__ __forceinline__ void ladder_arrive_at(void* barrier, int rank) {
  unsigned address = (unsigned)__cvta_generic_to_shared(barrier), remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address), "r"(rank));
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" :: "r"(remote) : "memory");
}
"""


SEND = """
__device__ __forceinline__ void ladder_send4(
    void* place, void* barrier, int rank, float x, float y, float z, float w) {
  unsigned to = (unsigned)__cvta_generic_to_shared(place), at = (unsigned)__cvta_generic_to_shared(barrier);
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(to) : "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %0, %1;" : "+r"(at) : "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
               :: "r"(to), "f"(x), "f"(y), "f"(z), "f"(w), "r"(at) : "memory");
}
"""


def initialise(barrier: Expr, arrivals: int = 1) -> None:
    """Let a barrier count so many arrivals a phase; one thread."""
    b.emit(T.ptx.mbarrier.init.shared.b64(barrier, T.uint32(arrivals)))


def publish() -> None:
    """Let the cluster see barriers that were initialised."""
    b.emit(T.ptx.fence.mbarrier_init.release.cluster())


def expect(barrier: Expr, nbytes: Expr) -> None:
    """Arrive, and let the phase end when so many bytes have come too."""
    b.emit(T.ptx.mbarrier.arrive.expect_tx.shared.b64(barrier, nbytes))


def arrive(barrier: Expr) -> None:
    """Arrive at a barrier of the block."""
    b.emit(T.ptx.mbarrier.arrive.shared.b64(barrier, T.uint32(1)))


def arrive_at(barrier: Expr, rank: Expr) -> None:
    """Arrive at the same barrier of a block of the cluster."""
    b.emit(b.call_inline("ladder_arrive_at", REMOTE_ARRIVE, "void", barrier, rank))


def wait(barrier: Expr, phase: Expr) -> None:
    """Wait until a phase, 0 or 1, has ended."""
    b.emit(T.cuda.mbarrier_wait(barrier, phase))


def send(place: Expr, barrier: Expr, rank: Expr, four: Sequence[Expr]) -> None:
    """Store four float32 in shared memory of a block of the cluster; its barrier counts their bytes."""
    b.emit(b.call_inline("ladder_send4", SEND, "void", place, barrier, rank, *four))


class Ring:
    """Stage and phase of one role's walk around the ring."""

    def __init__(self, stages: int) -> None:
        self.stages = stages
        self.stage = b.Variable("int32", 0)
        self.phase = b.Variable("int32", 0)

    def await_full(self, full: Any) -> None:
        """Wait until the stage is full."""
        wait(full.ptr_to([self.stage.value]), self.phase.value)

    def await_empty(self, empty: Any) -> None:
        """Wait until the stage may be written; in the first round it may."""
        wait(empty.ptr_to([self.stage.value]), self.phase.value ^ 1)

    def advance(self) -> None:
        """Step to the next stage; the phase flips on every wrap."""
        self.stage.set(self.stage.value + 1)
        with b.when(self.stage.value == self.stages):
            self.stage.set(0)
            self.phase.set(self.phase.value ^ 1)

    def advance_if(self, condition: Expr) -> None:
        """Step to the next stage where ``condition`` holds, without a branch."""
        following = b.keep(self.stage.value + T.Cast("int32", condition))
        wraps = T.Cast("int32", following == self.stages)
        self.stage.set(following * (1 - wraps))
        self.phase.set(self.phase.value ^ wraps)
