"""Sizes of a kernel of the pipeline ``digits``."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ladder.lower.cuda.digit_tokens import DIGITS, quads
from ladder.lower.cuda.gemv_geometry import Slices
from ladder.lower.gpu.groups import Groups
from schedules.layouts import TILE
from schedules.legal import (
    DIGIT_CHUNK_TILES,
    RESIDENT_THREADS,
    digit_columns,
    digit_tile_bytes,
    registers_per_thread,
)
from schedules.schedule import GpuSchedule
from targets import TileDevice

COLUMNS = 8
"""Columns of one product."""


@dataclass(frozen=True)
class Shape(Slices):
    """Sizes that follow from a problem, a device and a schedule."""

    groups: Groups
    device: TileDevice
    schedule: GpuSchedule

    @property
    def lane(self) -> int:
        """Bits of an element of x."""
        return self.groups.lane

    @property
    def digits(self) -> int:
        """Columns of a token."""
        return DIGITS if self.lane == 16 else 1

    @property
    def flushes(self) -> bool:
        """Whether sums become float32 every period; otherwise they stay integers."""
        return self.lane == 16 or self.groups.gemm.scale

    @property
    def period(self) -> int:
        """Tiles after which sums become float32, and that share a unit of x."""
        return gcd(self.groups.tiles, 2) if self.flushes else 1

    @property
    def token_blocks(self) -> int:
        """Fragments along the columns."""
        return -(-digit_columns(self.groups.gemm, self.schedule) // COLUMNS)

    @property
    def lanes(self) -> int:
        """Lanes of a fragment of x that differ: the others repeat them, their sums are not used."""
        return 4 * min(COLUMNS, digit_columns(self.groups.gemm, self.schedule))

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of x."""
        return TILE * digit_columns(self.groups.gemm, self.schedule)

    @property
    def resident_blocks(self) -> int:
        """Blocks per multiprocessor that registers and shared memory are meant for."""
        registers = -(-registers_per_thread(self.groups.gemm, self.schedule) // 8) * 8
        fitting = self.device.registers_per_unit // (self.threads * registers)
        return max(1, min(fitting, RESIDENT_THREADS // self.threads))

    @property
    def chunk_tiles(self) -> int:
        """Tiles of K that one chunk of x holds."""
        room = min(self.device.shared_per_unit // self.resident_blocks - 1024, self.device.shared_per_block)
        room -= 4 * (32 * self.schedule.tile_m + self.rows) + self.tile_bytes + 1024
        return int(min(room // digit_tile_bytes(self.groups.gemm, self.schedule), DIGIT_CHUNK_TILES) // 4 * 4)

    @property
    def classes(self) -> tuple[tuple[int, tuple[tuple[int, int], ...]], ...]:
        """Sums of a fragment: (exponent, pairs of quads), where x cannot make up for exponents."""
        found = quads(self.groups.bits, self.lane)
        if self.lane == 16:
            return ((0, ((0, 1), (2, 3))),)
        result = []
        for exponent in sorted({quad.exponent for quad in found}):
            own = [t for t, quad in enumerate(found) if quad.exponent == exponent]
            result.append((exponent, tuple((own[i], own[i + 1]) for i in range(0, len(own), 2))))
        return tuple(result)
