"""Thread, warp and group indices of a kernel, and the loop steps of each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.blocks.analysis import BlockProgram
from ladder.lower.blocks.schedule import WARP, BlockSchedule

Expr = Any

RESIDENT_BLOCKS = 1
"""Blocks that a multiprocessor must be able to hold: leaves a thread as many registers as there are."""


@dataclass(frozen=True)
class Threads:
    """Indices of a thread, as expressions.

    plan: Division of the work.
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

    @staticmethod
    def declare(program: BlockProgram, plan: BlockSchedule) -> Threads:
        """Declare the launch, and compute a thread's indices."""
        b.device(RESIDENT_BLOCKS)
        (block,) = b.block_index([program.blocks * plan.cluster])
        rank: Expr = b.keep(b.cluster_rank([plan.cluster])[0]) if plan.cluster > 1 else 0
        block = b.keep(block // plan.cluster) if plan.cluster > 1 else block
        thread = b.thread_index(plan.threads)
        lane = b.bind(thread % WARP)
        warp = b.bind(thread // WARP)
        group: Expr = b.keep(warp // plan.group_warps) if plan.groups > 1 else 0
        row_warp: Expr = b.keep(warp % plan.row_warps) if plan.row_warps > 1 else 0
        within = warp % plan.group_warps // plan.row_warps
        column_warp: Expr = b.keep(within) if plan.column_warps > 1 else 0
        group_thread = b.bind(thread % (plan.group_warps * WARP))
        worker = b.keep(rank * plan.groups + group)
        iterations: Expr = program.steps // plan.sharers
        if program.steps % plan.sharers:
            iterations = b.keep((program.steps - worker + plan.sharers - 1) // plan.sharers)
        return Threads(
            plan,
            block,
            rank,
            thread,
            warp,
            lane,
            group,
            group_thread,
            row_warp,
            column_warp,
            worker,
            iterations,
        )

    def own_step(self, iteration: Expr) -> Expr:
        """Return the step of the loop that the thread's group takes in an iteration."""
        return self.worker + iteration * self.plan.sharers

    def sync_group(self) -> None:
        """Synchronize the warps of the group."""
        if self.plan.group_warps == 1:
            b.emit(T.cuda.warp_sync())
        elif self.plan.groups == 1:
            b.block_sync()
        else:
            b.ptx("bar.sync", T.Cast("uint32", self.group + 1), T.uint32(self.plan.group_warps * WARP))
