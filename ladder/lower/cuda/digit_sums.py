"""Sums of the pipeline ``digits``: running integer sums, totals, and how digits become one value again."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cuda.digit_activations import Memory
from ladder.lower.cuda.digit_decomposition import DIGIT_BITS, MAGIC, MAGIC_VALUE
from ladder.lower.cuda.digit_geometry import COLUMNS, Spec
from ladder.lower.cuda.gemv_geometry import STRIP
from ladder.lower.cuda.gemv_place import Warp

Expr = Any

PRODUCT = "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32"


class Sums:
    """The accumulators of a thread."""

    def __init__(self, spec: Spec, warp: Warp) -> None:
        self.spec, self.geo, self.warp = spec, spec.geo, warp
        self.count = spec.fragments * 4
        self.running = [b.local(self.count, "uint32") for _ in self.geo.classes]
        self.totals = b.local(self.count, spec.kind)
        for i in range(self.count):
            b.store(self.totals, T.float32(0) if self.geo.flushes else T.int32(0), i)

    # ---- running sums ---------------------------------------------------------------
    def clear(self) -> None:
        """Clear integer sums before a chunk."""
        if not self.geo.flushes:
            for sums in self.running:
                for i in range(self.count):
                    b.store(sums, T.uint32(0), i)

    def multiply(self, place: int, fragment: int, a: Any, x: Any, start: Any) -> None:
        """Emit a product into the sums of class ``place``; ``start``: where they begin, None to go on."""
        sums = [self.running[place][fragment * 4 + i] for i in range(4)]
        before = sums
        if start is not None:
            before = [start[i] for i in range(4)] if place == 0 else [T.uint32(MAGIC)] * 4
        b.ptx(PRODUCT, *sums, *a, *x, *before)

    # ---- totals ---------------------------------------------------------------------
    def keep_integers(self) -> None:
        """Move integer sums of a chunk to the totals; what places of codes add to them divides them."""
        if self.geo.flushes:
            return
        for i in range(self.count):
            down = self.spec.groups.bits * (i % 4 // 2)
            total = self.totals[i]
            for (exponent, _), sums in zip(self.geo.classes, self.running, strict=True):
                total = total + (T.Cast("int32", sums[i]) >> T.int32(exponent + down))
            b.store(self.totals, total, i)

    def flush(self, memory: Memory, scales: Any, period: Expr) -> None:
        """Add a period's sums, times their scales and the unit of x, to the totals.

        ``scales`` are the registers of the lane's scales, None where there are none.
        """
        geo = self.geo
        for column_block in range(geo.column_blocks):
            unit = self._unit(memory, period, column_block) if geo.lane == 16 else None
            own = [] if scales is None else self._own_scales(scales, unit)
            for row_block in range(geo.row_blocks):
                for half in range(2):
                    factor = self._factor(own, row_block, half, unit)
                    for i in (2 * half, 2 * half + 1):
                        at = (row_block * geo.column_blocks + column_block) * 4 + i
                        b.store(self.totals, self.totals[at] + self._as_float(at) * factor, at)

    def _unit(self, memory: Memory, period: Expr, column_block: int) -> Expr:
        tile_m = self.spec.schedule.tile_m
        m = (column_block * COLUMNS + self.warp.lane % 4 * 2) // self.geo.digits % tile_m
        return b.bind(T.reinterpret(memory.units[period * tile_m + m], dtype="float32"))

    @property
    def _one_unit(self) -> bool:
        return self.spec.schedule.tile_m == 1

    def _own_scales(self, scales: Any, unit: Expr | None) -> list[Expr]:
        """Return the scales that this lane has, times the unit of x if all columns have the same."""
        own = [T.Cast("float32", scales[i]) for i in range(self.spec.scale_parts)]
        return [b.bind(x * unit if self._one_unit and unit is not None else x) for x in own]

    def _factor(self, scales: list[Expr], row_block: int, half: int, unit: Expr | None) -> Expr:
        """Return the scale of a weight row, which another lane has, times the unit of x."""
        if not scales:
            return unit
        part, row = divmod(row_block * STRIP + 8 * half, 32)
        source = self.warp.lane // 4 + row
        scale = T.tvm_warp_shuffle(T.uint32(0xFFFFFFFF), scales[part], source, 32, 32)
        return b.bind(scale if unit is None or self._one_unit else scale * unit)

    def _as_float(self, at: int) -> Expr:
        """Return a fragment's finished sum as float32."""
        value: Expr = None
        for (exponent, _), sums in zip(self.geo.classes, self.running, strict=True):
            own = T.reinterpret(sums[at], dtype="float32") - T.float32(MAGIC_VALUE)
            own = own if exponent == 0 else own * T.float32(2.0**-exponent)
            value = own if value is None else value + own
        return value

    # ---- results --------------------------------------------------------------------
    def leave(self, memory: Memory) -> None:
        """Join the digits and leave the sums of the slice in shared memory."""
        geo, warp = self.geo, self.warp
        if not geo.flushes and self.spec.splitter.offset:
            self._add_offsets(memory.parts)
        for row_block in range(geo.row_blocks):
            for column_block in range(geo.column_blocks):
                at = (row_block * geo.column_blocks + column_block) * 4
                for half in range(2):
                    row = warp.row_warp * self.spec.schedule.warp_rows + row_block * STRIP + warp.lane // 4
                    if geo.lane == 16:
                        self._leave_digits(memory.slices, at + 2 * half, column_block, row + 8 * half, half)
                    else:
                        self._leave_integers(memory.slices, at + 2 * half, row + 8 * half, half)

    def _leave_digits(self, slices: Any, at: int, column_block: int, row: Expr, half: int) -> None:
        """Join the digits of an activation row, two each of neighbouring lanes."""
        lane = self.warp.lane
        low = self.totals[at] + self.totals[at + 1] * T.float32(2.0**DIGIT_BITS)
        upper = T.float32(2.0 ** (2 * DIGIT_BITS))
        low = b.Variable("float32", low * T.if_then_else(lane % 2 == 0, T.float32(1), upper)).value
        other = T.tvm_warp_shuffle_xor(T.uint32(0xFFFFFFFF), low, 1, 32, 32)
        gain = T.float32(self.spec.form.factor * 2.0 ** (-self.spec.groups.bits * half))
        value = b.bind((low + other) * gain)
        m = column_block * 2 + lane % 4 // 2
        with b.when(T.And(lane % 2 == 0, m < self.spec.schedule.tile_m)):
            b.store(slices, value, self.warp.slice, m, row)

    def _leave_integers(self, slices: Any, at: int, row: Expr, half: int) -> None:
        for i in range(2):
            m = self.warp.lane % 4 * 2 + i
            value = self.totals[at + i]
            if self.geo.flushes:
                value = value * T.float32(self.spec.form.factor * 2.0 ** (-self.spec.groups.bits * half))
            with b.when(m < self.spec.schedule.tile_m):
                b.store(slices, value, self.warp.slice, m, row)

    def _add_offsets(self, parts: Any) -> None:
        """Add what the offset of the type makes of the sums of x to the integer sums of the first slice."""
        schedule = self.spec.schedule
        for i in range(2):
            m = T.min(self.warp.lane % 4 * 2 + i, schedule.tile_m - 1)
            with b.when(self.warp.slice == 0):
                total: Expr = parts[0, m]
                for warp in range(1, schedule.warps):
                    total = total + parts[warp, m]
                shift = b.keep(total * self.spec.splitter.offset)
                for fragment in range(self.spec.fragments * 2):
                    at = 2 * fragment + i
                    b.store(self.totals, self.totals[at] + shift, at)
