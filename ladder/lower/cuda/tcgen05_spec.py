"""Decisions about a kernel of the pipeline ``tcgen05`` before any of it is emitted."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.lower.cuda.wgmma_geometry import SHARED_RESERVED, WgmmaGeometry
from schedules.footprint import TENSOR_COLUMNS, registers_per_thread, tensor_columns
from targets import TileDevice

SLAB_COLUMNS = 32
"""Columns of tensor memory that 128 bytes of K take in each of its lanes."""

SLOTS = 2
"""Slabs of weights that tensor memory holds: one is multiplied while the next is decoded."""

SUM_COLUMN = SLOTS * SLAB_COLUMNS
"""First column of the sums: weights come before."""


LEAST_REGISTERS = 56
"""Registers without which ptxas cannot hold the operands of an instruction: sixteen of them and a mask."""


@dataclass(frozen=True)
class TensorGeometry(WgmmaGeometry):
    """Sizes as those of wgmma, of which a block has one instruction's 128 rows of weights.

    Packed tile h of the block, strip w of sixteen rows, row i, is lane 32w + 16h + i of tensor memory: warp
    w of a warpgroup reaches lanes 32w to 32w + 31 alone, and has that strip's codes in wgmma too.
    """

    @property
    def threads(self) -> int:
        """Threads of a block: those that decode, a producer's warp, and the one that multiplies."""
        return (self.schedule.warps + 2) * 32

    @property
    def partners(self) -> int:
        """Blocks that multiply together: what ``cta_group`` says."""
        return 1 + self.schedule.pair

    @property
    def reallocates(self) -> bool:
        """Whether registers move between warps: sums lie in tensor memory, so there is no need."""
        return False

    @property
    def columns(self) -> int:
        """Columns of tensor memory that a block allocates."""
        return tensor_columns(self.schedule)

    @property
    def register_estimate(self) -> int:
        """Registers that a decoding thread needs."""
        return registers_per_thread(self.gemm, self.schedule)

    def resident_blocks(self, device: TileDevice) -> int:
        """Return the blocks that share a multiprocessor, its tensor memory included."""
        shared = device.shared_per_unit // (self.shared_bytes + SHARED_RESERVED)
        registers = device.registers_per_unit // (self.threads * LEAST_REGISTERS)
        return max(1, min(shared, registers, TENSOR_COLUMNS // self.columns))
