"""Thread, warp and group indices of a kernel, and the loop steps of each group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.lower import builder as b
from ladder.lower.blocks.analysis import BlockProgram
from ladder.lower.blocks.dialect import BlockDialect
from ladder.lower.blocks.schedule import BlockSchedule

Expr = Any


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
    def declare(program: BlockProgram, plan: BlockSchedule, dialect: BlockDialect) -> Threads:
        """Declare the launch, and compute a thread's indices."""
        block, rank, thread, warp = dialect.launch(program.blocks, plan)
        width = dialect.shape.lanes
        lane = b.bind(thread % width)
        warp = b.bind(warp)
        group: Expr = b.keep(warp // plan.group_warps) if plan.groups > 1 else 0
        row_warp: Expr = b.keep(warp % plan.row_warps) if plan.row_warps > 1 else 0
        within = warp % plan.group_warps // plan.row_warps
        column_warp: Expr = b.keep(within) if plan.column_warps > 1 else 0
        group_thread = b.bind(thread % (plan.group_warps * width))
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
            dialect.count(iterations),
        )

    def own_step(self, iteration: Expr) -> Expr:
        """Return the step of the loop that the thread's group takes in an iteration."""
        return self.worker + iteration * self.plan.sharers
