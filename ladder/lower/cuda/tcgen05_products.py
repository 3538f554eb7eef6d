"""Products of the pipeline ``tcgen05``: one thread starts them all, and barriers say when they are done.

The first operand, decoded weights, and the sums lie in tensor memory; x lies in shared memory, 128 swizzled
bytes of K per activation row (PTX ISA, "tcgen05.mma", "Instruction descriptor", "Shared memory descriptor").
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.tcgen05_memory import SLAB_COLUMNS, SLOTS, SUM_COLUMN, TensorMemory, after_sync
from ladder.lower.cuda.wgmma_geometry import ROW_BYTES
from ladder.lower.cuda.wgmma_grid import Grid, Piece
from ladder.lower.cuda.wgmma_memory import Memory, Ring
from ladder.lower.cuda.wgmma_spec import Spec

ROWS = 128
"""Weight rows of one block's part of an instruction."""

STEPS, STEP_BYTES = 4, 32
"""Products along K in a slab, and bytes of a row of x that each takes."""

COMMIT = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.b64"

COMMIT_TO_ALL = "tcgen05.commit.cta_group::{}.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
"""The same, at the barriers of several blocks."""

PAIR = 0b11
"""Both blocks of a pair."""

DESCRIPTOR_HIGH = 2 << 29 | 1 << 14 | 64
"""Upper half of x's descriptor: 128-byte swizzle, the constant 1, 1024 bytes between groups of eight rows."""

MASK_WORDS = 4
"""Words for each block of a mask of lanes of the sums that are left out: none."""


@dataclass(frozen=True)
class Kind:
    """An instruction's kind, and the numbers of an operand's type and of its sums' in its descriptor."""

    name: str
    number: int
    sums: int = 1


KINDS: Mapping[str, Kind] = {
    "float16": Kind("kind::f16", 0),
    "bfloat16": Kind("kind::f16", 1),
    "fp8_e4m3": Kind("kind::f8f6f4", 0),
    "fp8_e5m2": Kind("kind::f8f6f4", 1),
    "int8": Kind("kind::i8", 1, 2),
}
"""Operand types that this pipeline multiplies."""


def instruction_descriptor(weight: str, activation: str, columns: int, blocks: int = 1) -> int:
    """Return the instruction descriptor of a product of 128 rows of each block, both operands K-major."""
    first, second = KINDS[weight], KINDS[activation]
    types = second.sums << 4 | first.number << 7 | second.number << 10
    return types | columns >> 3 << 17 | blocks * ROWS >> 4 << 24


def commit(barrier: Expr, group: int, mask: Expr | None = None) -> None:
    """Have the products so far arrive at a barrier when they are done, or at those of several blocks."""
    if group == 2:
        mask = T.uint16(PAIR)
    if mask is None:
        b.ptx(COMMIT.format(group), barrier)
    else:
        b.ptx(COMMIT_TO_ALL.format(group), barrier, mask)


@dataclass(frozen=True)
class Issuer:
    """Starts the products of a block.

    base: First address of its tensor memory.
    k_tiles: Packed tiles along K.
    """

    spec: Spec
    grid: Grid
    memory: Memory
    tensor: TensorMemory
    base: Expr
    k_tiles: Expr

    def tile(self, piece: Piece) -> None:
        """Start the products of one tile, slab after slab; ``finished`` completes with the last."""
        geo, ring = self.tensor.geo, Ring(self.spec.schedule.stages)
        phase = b.Variable("int32", 0)
        start = b.local(1, "uint32")
        # The low half of x's descriptor: its address in units of 16 bytes, and a leading offset not used.
        address = T.cuda.cvta_generic_to_shared(self.memory.x.ptr_to([0, 0]))
        b.store(start, T.Cast("uint32", address) >> T.uint32(4) | T.uint32(1 << 16), 0)
        with b.loop(piece.iterations) as iteration:
            for slab in range(geo.body):
                if slab % geo.slabs == 0:
                    b.emit(
                        T.cuda.mbarrier_wait(self.memory.full.ptr_to([ring.stage.value]), ring.phase.value)
                    )
                slot = slab % SLOTS
                b.emit(T.cuda.mbarrier_wait(self.tensor.decoded.ptr_to([slot]), phase.value))
                after_sync()
                # Tiles beyond K repeat the last one: infinities times the zeros of x would be NaN.
                first = piece.first_tile + (iteration * geo.body + slab) * geo.tiles_per_slab
                each = STEPS // geo.tiles_per_slab
                for tile in range(geo.tiles_per_slab):
                    with b.when(first + tile < self.k_tiles):
                        for step in range(tile * each, tile * each + each):
                            self._product(iteration, slab, step, ring.stage.value, start[0])
                commit(self.tensor.free.ptr_to([slot]), geo.partners)
                if slot == SLOTS - 1:
                    phase.set(phase.value ^ 1)
                if (slab + 1) % geo.slabs == 0:
                    self._leave(ring.stage.value)
                    ring.advance()
        commit(self.tensor.finished.ptr_to([0]), geo.partners)

    def _leave(self, stage: Expr) -> None:
        """Have products arrive, when they are done, at every block that copies a share of their x."""
        empty, cluster = self.memory.empty.ptr_to([stage]), self.spec.schedule.cluster
        every = T.Cast("uint16", ((1 << cluster) - 1) << (self.grid.slice * cluster))
        commit(empty, self.tensor.geo.partners, every if cluster > 1 else None)

    def _product(self, iteration: Expr, slab: int, step: int, stage: Expr, start: Expr) -> None:
        """Start the product of a step of a slab; the first one of the tile overwrites the sums."""
        geo, spec = self.spec.geo, self.spec
        tile_m, group = spec.schedule.tile_m, self.tensor.geo.partners
        inside = slab % geo.slabs * geo.held_m * ROW_BYTES + step * STEP_BYTES
        low = start + T.Cast("uint32", stage) * T.uint32(geo.x_bytes >> 4) + T.uint32(inside >> 4)
        x = T.Cast("uint64", low) | T.uint64(DESCRIPTOR_HIGH << 32)
        weights = self.base + T.uint32(slab % SLOTS * SLAB_COLUMNS + step * SLAB_COLUMNS // STEPS)
        number = instruction_descriptor(spec.decoder.operand, spec.gemm.activation, tile_m, group)
        adds = T.bool(True) if step or slab else iteration > 0
        spelling = f"tcgen05.mma.cta_group::{group}.{KINDS[spec.gemm.activation].name}"
        masks = [T.uint32(0)] * (MASK_WORDS * group)
        b.ptx(spelling, self.base + T.uint32(SUM_COLUMN), weights, x, T.uint32(number), *masks, adds)
