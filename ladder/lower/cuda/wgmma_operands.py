"""Weights of the wgmma pipeline: from a stage of the ring to the registers of the A operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.barriers import Ring
from ladder.lower.cuda.stored_tiles import load_operands
from ladder.lower.cuda.wgmma_geometry import MathThread, Spec
from ladder.lower.cuda.wgmma_memory import Memory
from ladder.lower.gpu.decode import GroupValues, load_order
from ladder.lower.gpu.emission import SharedTable
from ladder.lower.gpu.groups import bytes4, pair16
from schedules.layouts import EXPONENTS, TILE

SLAB_REGISTERS = 16
"""Operand registers of a slab and row tile."""


@dataclass(frozen=True)
class Registers:
    """Registers of a math thread.

    operands: Operands of one or two slabs.
    words: Packed words of one slab ahead, by row tile.
    scales, zeros: What operands are multiplied by, and zero points, by row tile; empty where there are none.
    """

    operands: Any
    words: list[Any]
    scales: list[Any]
    zeros: list[Any]


def allocate_registers(spec: Spec, *, scaled: bool, sets: int = 2) -> Registers:
    """Allocate ``sets`` sets of operands, for a slab each, and what is fetched for one slab ahead."""
    geo = spec.geo
    operands = b.local(sets * geo.m64 * SLAB_REGISTERS, "uint32")
    words = [b.local(geo.tiles_per_slab * geo.groups.bits, "uint32") for _ in range(geo.m64)]
    count = 2 * geo.held_rows
    held = geo.m64 if geo.groups.lane == 16 and scaled else 0
    scales = [b.local(count * spec.decoder.factors, "uint32") for _ in range(held)]
    parts = geo.groups.zero_parts
    zeros = [b.local(count * parts, "uint32") for _ in range(geo.m64 if parts else 0)]
    return Registers(operands, words, scales, zeros)


@dataclass(frozen=True)
class Operands:
    """Emits loads and decoding.

    table: The decode table, if the decoder has one.
    """

    spec: Spec
    memory: Memory
    who: MathThread
    ring: Ring
    table: SharedTable | None
    registers: Registers

    def row_tile(self, m: int) -> Expr:
        """Return row tile ``m`` of the warpgroup, as counted in the block."""
        return self.who.group * self.spec.geo.m64 + m

    def first_row(self, m: int) -> Expr:
        """Return the lane's row g of row tile ``m``, as counted in the block."""
        return self.row_tile(m) * TILE + self.who.warp * 16 + self.who.lane // 4

    # ---- loads ----------------------------------------------------------------------
    def fetch(self, slab: int) -> None:
        """Load packed words, scales and zero points of an iteration's slab, which the current stage holds."""
        for m in range(self.spec.geo.m64):
            for tile in range(self.spec.geo.tiles_per_slab):
                self.load_words(m, tile, slab)
            self.fetch_rows(m, slab)

    def load_words(self, m: int, tile: int, slab: int) -> None:
        """Load this thread's words of a packed tile of an iteration's slab."""
        geo, stage, target = self.spec.geo, self.ring.stage.value, self.registers.words[m]
        place = slab % geo.slabs * geo.tiles_per_slab + tile
        base = (self.row_tile(m) * geo.stage_tiles + place) * geo.groups.tile_words
        first = tile * geo.groups.bits
        if self.spec.gemm.stored:
            start = self.memory.words.ptr_to([stage, base])
            load_operands(self.spec.gemm.stored, start, self.who.warp, self.who.lane, target, first)
            return
        for offset, width in load_order(geo.groups.bits):
            source = base + offset + self.who.group_thread * width
            if width == 1:
                b.store(target, self.memory.words[stage, source], first)
            else:
                with b.vector(width) as v:
                    b.store(target, self.memory.words[stage, source + v], first + v)
            first += width

    def fetch_rows(self, m: int, slab: int) -> None:
        """Load scales and zero points of an iteration's slab, unless those of the slab before still hold."""
        geo = self.spec.geo
        if slab * geo.slab % geo.held_step == 0:
            if geo.groups.exponents:
                self._load_exponents(m, slab)
                return
            first = slab % geo.slabs * geo.slab // geo.scale_step
            for row in range(geo.held_rows):
                self._load_rows(m, first + row, row)

    def _load_exponents(self, m: int, slab: int) -> None:
        """Make scale operands of an iteration's exponents of a slab; iterations begin with whole words."""
        geo, low = self.spec.geo, self.first_row(m)
        for h in (0, 1):
            row = slab % geo.slabs * geo.slab // geo.row_step
            word = b.bind(self._staged(self.memory.scales, row, low + h * 8))
            for row in range(geo.held_rows):
                at = (slab * geo.held_rows + row) % EXPONENTS
                self._hold_scale(m, row, h, self.spec.decoder.kept(word, h, at))

    def _load_rows(self, m: int, step: int, row: int) -> None:
        """Load the scale and zero operands of rows g and g+8."""
        parts, low = self.spec.geo.groups.zero_parts, self.first_row(m)
        duplicate = pair16 if self.spec.geo.groups.lane == 16 else bytes4
        for h in (0, 1):
            if self.registers.scales:
                scale = duplicate(self._staged(self.memory.scales, step, low + h * 8))
                self._hold_scale(m, row, h, self.spec.decoder.kept(scale, h))
            for part in range(parts):
                value = self._staged(self.memory.zeros, step * parts + part, low + h * 8)
                b.store(self.registers.zeros[m], duplicate(value), (2 * row + h) * parts + part)

    def _hold_scale(self, m: int, row: int, half: int, factors: Sequence[Expr]) -> None:
        """Keep what operands of a scale row are multiplied by."""
        for index, factor in enumerate(factors):
            b.store(self.registers.scales[m], factor, (2 * row + half) * len(factors) + index)

    def _staged(self, buffer: Any, row: int, n: Expr) -> Expr:
        return buffer[self.ring.stage.value, row * self.spec.schedule.tile_n + n]

    # ---- decoding -------------------------------------------------------------------
    def decode(self, m: int, tile: int, bank: int) -> None:
        """Decode the fetched words of one packed tile of a slab, whose scales and zero points are held."""
        geo, own = self.spec.geo, self.registers.words[m]
        words = [own[tile * geo.groups.bits + i] for i in range(geo.groups.bits)]
        registers = SLAB_REGISTERS // geo.tiles_per_slab
        step = min(geo.scale_step, TILE)
        count = registers * step // TILE
        for part in range(TILE // step):
            values = self._held(m, (tile * TILE + part * step) // geo.scale_step)
            which = range(part * count, (part + 1) * count)
            target = (bank * geo.m64 + m) * SLAB_REGISTERS + tile * registers + part * count
            self.spec.decoder.registers(words, which, self.registers.operands, target, values, self.table)

    def _held(self, m: int, row: int) -> GroupValues:
        """Return the scale and zero operands of rows g and g+8, as the decoder takes them."""
        parts, registers = self.spec.geo.groups.zero_parts, self.registers
        scales = zeros = None
        if registers.scales:
            count = self.spec.decoder.factors
            kept = [registers.scales[m][2 * row * count + index] for index in range(2 * count)]
            scales = (kept[:count], kept[count:])
        if parts:
            held = [registers.zeros[m][2 * row * parts + index] for index in range(2 * parts)]
            zeros = tuple(held) if parts == 1 else (tuple(held[:2]), tuple(held[2:]))
        return GroupValues(scales, zeros, prepared=True)

    def step(self, bank: int, m: int, step: int) -> list[Expr]:
        """Return the four operand registers of a step of a slab."""
        first = (bank * self.spec.geo.m64 + m) * SLAB_REGISTERS + step * 4
        return [self.registers.operands[first + i] for i in range(4)]
