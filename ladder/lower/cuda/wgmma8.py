"""The sm_90a pipeline for 8-bit cores whose partial sums move to float32 totals.

Group scales apply to accumulators, and fp8 tensor cores keep few bits of long sums: so
every group of K is summed apart and added, scaled, to totals that stay in registers.
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda import wgmma_epilogue
from ladder.lower.cuda.wgmma import Kernel
from schedules.layouts import TILE

Expr = Any


class PromotingKernel(Kernel):
    """A kernel whose math warpgroups promote partial sums at group ends."""

    def _allocate(self) -> None:
        geo = self.geo
        self.partial = b.local(geo.m64 * geo.accumulators, "uint32" if self.integer else "float32")
        self.total = b.local(geo.m64 * geo.accumulators, "float32")
        self._allocate_operands()
        self.pending = b.local(2 * geo.m64, "float32")

    def _tile(self, row_tile: Expr, token: Expr) -> None:
        geo = self.geo
        for index in range(geo.m64 * geo.accumulators):
            b.store(self.total, T.float32(0), index)
        rows = wgmma_epilogue.row_values(self, row_tile)
        self._first_slab()
        with b.loop(self.turns) as turn:
            for slab in range(geo.body):
                self._slab(turn, slab)
            # ptxas serialises sums that are in flight across a loop's back edge and also
            # read by ordinary instructions, so each turn finishes what it started.
            self._finish_products()
            self._release()
        wgmma_epilogue.finish_tile(self, row_tile, token, rows)

    def _release_previous(self, turn: Expr, slab: int) -> None:
        if slab > 0:
            self._release()

    def _start_products(self, turn: Expr, slab: int) -> None:
        """Start products group by group, moving finished partial sums to the totals."""
        geo = self.geo
        within, bank = slab % geo.slabs, slab % 2
        step_k = geo.promotion_step
        for part in range(geo.slab // step_k):
            if slab + part > 0:
                self._finish_products()
            row = (within * geo.slab + part * step_k) // geo.scale_step
            if step_k >= 32:
                steps = range(part * step_k // 32, (part + 1) * step_k // 32)
                self._products(within, bank, steps, accumulate=False)
            else:
                self._half_step(within, bank, part)
            self._remember_scales(row)

    def _finish_products(self) -> None:
        """Wait for the group in flight and add it to the totals."""
        self._wait_products(0)
        for m in range(self.geo.m64):
            for index in range(self.geo.accumulators):
                position = m * self.geo.accumulators + index
                scale = self.pending[2 * m + index // 2 % 2]
                b.store(self.total, self.total[position] + self.partial_sum(position) * scale, position)

    def _half_step(self, within: int, bank: int, part: int) -> None:
        """Multiply 16 of a step's 32 elements: the registers of the other half are zero."""
        step, half = part // 2, part % 2
        b.emit(T.ptx.wgmma.fence.sync.aligned())
        for m in range(self.geo.m64):
            base = (bank * self.geo.m64 + m) * 16 + step * 4
            registers = [self.operands[base + i] if i // 2 == half else T.uint32(0) for i in range(4)]
            self._wgmma(m, registers, within, step, accumulate=False)
        b.emit(T.ptx.wgmma.commit_group.sync.aligned())

    def _remember_scales(self, row: int) -> None:
        """Keep the scales of the group in flight until its sums are promoted."""
        for m in range(self.geo.m64):
            low = self._row_tile(m) * TILE + self.warp * 16 + self.lane // 4
            for h in (0, 1):
                scaled = self.scales is not None
                value = self._staged(self.scales, row, low + h * 8) if scaled else T.float32(1)
                b.store(self.pending, value, 2 * m + h)
