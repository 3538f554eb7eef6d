"""One thread copies scales into tensor memory and starts block-scaled products (PTX ISA, "tcgen05.mma")."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.scaled import FORMATS, ScaledGemm
from ladder.lower import builder as b
from ladder.lower.cuda.scaled_memory import Memory, Ring, Stages
from ladder.lower.cuda.tcgen05_memory import after_sync
from ladder.lower.cuda.tcgen05_products import DESCRIPTOR_HIGH, STEP_BYTES, STEPS, commit
from ladder.lower.cuda.wgmma_products import REMOTE_ARRIVE
from schedules.scaled import ATOM, ROWS, ScaledSchedule, scale_columns

Expr = Any

COPY = "tcgen05.cp.cta_group::{}.32x128b.warpx4"
"""An atom of scales to all four quarters of the lanes."""

SCALES_HIGH = 1 << 14 | 8
"""Upper half of an atom's descriptor: no swizzle, the constant 1, 128 bytes between groups of eight rows."""

EXPONENTS = 1 << 23
"""Instruction descriptor: scales are e8m0, else e4m3 without sign."""


def instruction_descriptor(form: ScaledGemm, columns: int, scale: int = 0, blocks: int = 1) -> int:
    """Return the instruction descriptor of a product of 128 rows of each block.

    ``scale`` says from which byte of a column on the scales of both operands lie.
    """
    first, second = FORMATS[form.weight], FORMATS[form.activation]
    kind = EXPONENTS if first.scale == "e8m0" else 0
    types = first.number << 7 | second.number << 10
    return scale << 4 | types | columns >> 3 << 17 | kind | blocks * ROWS >> 4 << 24 | scale << 29


@dataclass(frozen=True)
class Issuer:
    """Starts the products of a block.

    base: First address of its tensor memory: sums, then each stage's scales.
    """

    form: ScaledGemm
    schedule: ScaledSchedule
    memory: Memory
    base: Expr

    def multiply(self, iterations: Expr, m_tile: Expr) -> None:
        """Start the products of all slabs; ``finished`` completes with the last."""
        memory, ring, tile_m = self.memory, Ring(self.schedule.stages), self.schedule.tile_m
        x, w, scales = (_descriptor_low(part) for part in (memory.x, memory.w, memory.scales))
        # Activation rows of a tile begin at one of the four quarters of an atom.
        offset = (
            T.Cast("uint32", m_tile % (ROWS // tile_m) * (tile_m // 32)) if tile_m < ROWS else T.uint32(0)
        )
        offset = b.Variable("uint32", offset).value
        with b.loop(iterations) as iteration:
            stage = T.Cast("uint32", ring.stage.value)
            b.emit(T.cuda.mbarrier_wait(memory.full.ptr_to([ring.stage.value]), ring.phase.value))
            if memory.partner is not None:
                b.emit(T.cuda.mbarrier_wait(memory.partner.ptr_to([ring.stage.value]), ring.phase.value))
            after_sync()
            columns = scale_columns(self.form, self.schedule)
            first = b.Variable("uint32", self.base + T.uint32(tile_m) + stage * T.uint32(columns)).value
            self._copy_scales(scales + stage * T.uint32(memory.scales.stride >> 4), first)
            for step in range(STEPS):
                inside = T.uint32(step * STEP_BYTES >> 4)
                operands = [
                    T.Cast("uint64", low + stage * T.uint32(part.stride >> 4) + inside)
                    | T.uint64(DESCRIPTOR_HIGH << 32)
                    for low, part in ((w, memory.w), (x, memory.x))
                ]
                self._product(operands, first, offset, step, iteration)
            commit(memory.empty.ptr_to([ring.stage.value]), self.schedule.partners)
            ring.advance()
        commit(memory.finished.ptr_to([0]), self.schedule.partners)

    def report(self, iterations: Expr) -> None:
        """Tell the first block of a pair, whose thread starts the products of both, of each full stage."""
        memory, ring = self.memory, Ring(self.schedule.stages)
        with b.loop(iterations):
            full, partner = (part.ptr_to([ring.stage.value]) for part in (memory.full, memory.partner))
            b.emit(T.cuda.mbarrier_wait(full, ring.phase.value))
            b.emit(b.call_inline("ladder_arrive_at", REMOTE_ARRIVE, "void", partner, 0))
            ring.advance()

    def _copy_scales(self, low: Expr, first: Expr) -> None:
        """Copy a stage's atoms; those of x of 256 rows lie side by side."""
        atoms, wide = self.form.slab_atoms, self.schedule.x_atoms
        for atom in range(atoms * (1 + wide)):
            row, part = divmod(atom - atoms, atoms)
            column = 4 * atom if atom < atoms else 4 * (atoms + part * wide + row)
            source = T.Cast("uint64", low + T.uint32(atom * ATOM >> 4)) | T.uint64(SCALES_HIGH << 32)
            b.ptx(COPY.format(self.schedule.partners), first + T.uint32(column), source)

    def _product(self, operands: list[Expr], first: Expr, offset: Expr, step: int, iteration: Expr) -> None:
        """Start the product of a step of a slab; the first one of the tile overwrites the sums."""
        form, wide = self.form, self.schedule.x_atoms
        atom, scale = divmod(step * form.format.scale_vec, 4)
        group = self.schedule.partners
        number = T.uint32(instruction_descriptor(form, self.schedule.tile_m, scale, group))
        w_scales = first + T.uint32(4 * atom)
        x_scales = first + T.uint32(4 * (form.slab_atoms + atom * wide)) + offset
        adds = T.bool(True) if step else iteration > 0
        kind, vector = form.format.kind, form.format.scale_vec
        spelling = f"tcgen05.mma.cta_group::{group}.kind::{kind}.block_scale.scale_vec::{vector}X"
        b.ptx(spelling, self.base, *operands, number, w_scales, x_scales, adds)


def _descriptor_low(part: Stages) -> Expr:
    """Return the lower half of a descriptor: the address in units of 16 bytes, a leading offset not used."""
    address = T.cuda.cvta_generic_to_shared(part.place(0))
    low = T.Cast("uint32", address) >> T.uint32(4) | T.uint32(1 << 16)
    return b.Variable("uint32", low).value
