"""Tiles that all blocks of a cluster read are copied once: each block copies some of the rows to all.

A block's barrier of a stage counts the bytes of all shares. A stage may be written once the groups of all
blocks have left it, which each says at the others' barriers; since that takes a step's time to arrive, shared
tiles are asked for a step later than a block's own (PTX ISA, cp.async.bulk.tensor, ``.multicast::cluster``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.wgmma import REMOTE_ARRIVE

if TYPE_CHECKING:
    from ladder.lower.blocks.kernel import BlockKernel

Expr = Any


class Sharing:
    """Refills the shared tiles of a group; does nothing where blocks share none.

    Parameters
    ----------
    kernel
        The kernel being emitted.
    """

    def __init__(self, kernel: BlockKernel) -> None:
        self.kernel, self.plan = kernel, kernel.schedule
        self.active = self.plan.sharing > 1

    def begin(self) -> None:
        """Allocate registers: the stage that is filled next, and the phase of its barrier."""
        if not self.active:
            return
        self.slot, self.phase = b.Variable("int32", 0), b.Variable("int32", 1)

    def _left(self, slot: Expr) -> Expr:
        """Return the barrier at which groups say that they have left a stage."""
        index = self.kernel.group * self.plan.stages + slot
        return self.kernel.arrivals.ptr_to([self.plan.groups * self.plan.stages + index])

    def leave(self, later: Expr, slot: Expr) -> None:
        """Say to all blocks that this group has left a stage, if a turn will fill it."""
        if not self.active:
            return
        kernel = self.kernel
        with b.when(T.And(later < kernel.turns, kernel.group_thread < self.plan.sharing)):
            place = self._left(slot)
            b.emit(b.call_inline("ladder_arrive_at", REMOTE_ARRIVE, "void", place, kernel.group_thread))

    def refill(self, turn: Expr, ahead: Expr) -> None:
        """Copy the shared tiles into the stage that was left a turn ago, once all blocks have left it."""
        if not self.active:
            return
        kernel, stages = self.kernel, self.plan.stages
        later = b.bind(turn + (stages - 2))
        here = T.And(T.And(turn > 0, later < kernel.turns), kernel.group_thread == 0)
        with b.when(here), kernel.scope():
            b.emit(T.cuda.mbarrier_wait(self._left(self.slot.value), self.phase.value))
            kernel.start_copies(later, self.slot.value, [x for x in kernel.loop_copies if x.is_shared])
        self.slot.set(ahead)
        self.phase.set(T.Select(ahead == stages - 1, self.phase.value ^ 1, self.phase.value))

    def end(self) -> None:
        """Say that this block no longer reaches the others' barriers."""
        if not self.active:
            return
        b.ptx("barrier.cluster.arrive.release")

    def part(self) -> None:
        """Stay until no other block reaches this one's barriers."""
        if not self.active:
            return
        b.ptx("barrier.cluster.wait.acquire")
