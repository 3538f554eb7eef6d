"""Thread, warp and group indices of a kernel, and the loop steps of each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower.blocks.schedule import BlockSchedule

Expr = Any


@dataclass(frozen=True)
class Threads:
    """Indices of a thread, as expressions.

    block: Number of the block within the grid; the blocks of a cluster have the same.
    rank: Of the block within its cluster.
    thread, warp: Within the block.
    lane: Within the warp.
    group: Group of warps within the block.
    group_thread: Thread within the group.
    row_warp, column_warp: Place of the warp among those that split rows, and columns.
    worker: Number of the group among all that share the loop.
    iterations: Steps of the loop that the group takes.
    """

    plan: BlockSchedule
    block: Expr
    rank: Expr
    thread: Expr
    warp: Expr
    lane: Expr
    group: Expr
    group_thread: Expr
    row_warp: Expr
    column_warp: Expr
    worker: Expr
    iterations: Expr

    def own_step(self, iteration: Expr) -> Expr:
        """Return the step of the loop that the thread's group takes in an iteration."""
        return self.worker + iteration * self.plan.sharers
