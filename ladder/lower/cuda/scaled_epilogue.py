"""Sums of a block-scaled product: added over the cluster, rounded and stored, a weight row per thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.scaled import ScaledGemm
from ladder.lower import builder as b
from ladder.lower.cuda.scaled_memory import Memory, ScaledArguments
from ladder.lower.cuda.scaled_place import Place
from ladder.lower.cuda.tcgen05_memory import LANE, WARP_LANES, after_sync, before_sync
from ladder.lower.cuda.wgmma_cluster_sums import SEND
from ladder.lower.cuda.wgmma_products import pin_registers
from schedules.scaled import ROWS, ScaledSchedule

Expr = Any

COLUMNS = 32
"""Sums that a thread holds at a time."""


@dataclass(frozen=True)
class Epilogue:
    """Writes a block's tile.

    base: First address of its tensor memory.
    """

    form: ScaledGemm
    schedule: ScaledSchedule
    args: ScaledArguments
    memory: Memory
    base: Expr

    def finish(self, where: Place) -> None:
        """Wait for the sums, then write them."""
        args, split = self.args, self.schedule.split_k
        warp = b.bind(where.thread // 32)
        n, first_m = b.bind(where.n_tile * ROWS + where.thread), b.bind(where.m_tile * self.schedule.tile_m)
        held = b.local(COLUMNS, "float32")
        b.emit(T.cuda.mbarrier_wait(self.memory.finished.ptr_to([0]), 0))
        after_sync()
        lanes = T.Cast("uint32", warp * WARP_LANES << LANE)
        with b.loop(self.schedule.tile_m // COLUMNS, rolled=True) as part:
            place = self.base + lanes + T.Cast("uint32", part * COLUMNS)
            b.ptx(f"tcgen05.ld.sync.aligned.32x32b.x{COLUMNS}.b32", *[held[i] for i in range(COLUMNS)], place)
            b.ptx("tcgen05.wait::ld.sync.aligned")
            pin_registers(held, COLUMNS)
            own = 0 if split == 1 else where.rank * (COLUMNS // split)
            if split > 1:
                self._exchange(where, held)
            m = first_m + part * COLUMNS + own
            mine = n < args.n
            if self.schedule.rows < ROWS:
                mine = T.And(mine, where.thread // self.schedule.rows == where.part)
            with b.when(mine):
                self._store(n, m, held, COLUMNS // split)
        before_sync()

    def _exchange(self, where: Place, held: Any) -> None:
        """Send each block of the cluster the columns that it finishes, and add up the own ones."""
        split = self.schedule.split_k
        quads = COLUMNS // split // 4
        for owner in range(split):
            with b.when(where.rank != owner):
                sender = where.rank - T.Cast("int32", where.rank > owner)
                for quad in range(quads):
                    target = self.memory.sums.ptr_to([sender, quad, where.thread, 0])
                    four = [held[(owner * quads + quad) * 4 + i] for i in range(4)]
                    operands = (target, self.memory.arrived.ptr_to([0]), T.int32(owner), *four)
                    b.emit(b.call_inline("ladder_send4", SEND, "void", *operands))
        for owner in range(1, split):
            with b.when(where.rank == owner):
                for index in range(quads * 4):
                    b.store(held, held[owner * quads * 4 + index], index)
        b.emit(T.cuda.mbarrier_wait(self.memory.arrived.ptr_to([0]), 0))
        for sender in range(split - 1):
            for index in range(quads * 4):
                other = self.memory.sums[sender, index // 4, where.thread, index % 4]
                b.store(held, held[index] + other, index)

    def _store(self, n: Expr, m: Expr, held: Any, count: int) -> None:
        """Scale, round and store sums of neighbouring activation rows."""
        args, output = self.args, self.form.output
        factor = b.bind(args.factor[0])
        bias = T.Cast("float32", args.bias[n]) if args.bias is not None else None
        kept = b.Variable("float32", bias).value if bias is not None else None
        for index in range(count):
            with b.when(m + index < args.m):
                total = held[index] * factor
                value = total if kept is None else total + kept
                b.store(args.y, T.Cast(output, value), m + index, n)
