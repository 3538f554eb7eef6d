"""Choose the sizes of a kernel of the pipeline ``digits`` before any of it is emitted."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ladder.ir.gemm import Gemm
from ladder.lower.cuda.digit_decomposition import DIGITS, Quad, Splitter, quads
from ladder.lower.cuda.gemv_geometry import Slices
from ladder.lower.gpu.groups import Groups
from ladder.lower.gpu.proven import packed_order
from schedules.footprint import (
    DIGIT_CHUNK_TILES,
    RESIDENT_THREADS,
    digit_columns,
    digit_tile_bytes,
    registers_per_thread,
)
from schedules.layouts import TILE
from schedules.legal import check_legal
from schedules.schedule import GpuSchedule, check
from targets import TileDevice
from tile_types import get_type
from tile_types.forms import Affine, affine_forms

COLUMNS = 8
"""Columns of one product."""


@dataclass(frozen=True)
class DigitGeometry(Slices):
    """Sizes that follow from a problem, a device, a schedule, and the bytes that a block keeps besides."""

    groups: Groups
    device: TileDevice
    schedule: GpuSchedule
    held: int = 0

    @property
    def lane(self) -> int:
        """Bits of an element of x."""
        return self.groups.lane

    @property
    def digits(self) -> int:
        """Columns of the B operand that an activation row takes."""
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
    def column_blocks(self) -> int:
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
        room -= 4 * (32 * self.schedule.tile_m + self.rows) + self.tile_bytes + 1024 + self.held
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


def integer_form(weight: str) -> Affine:
    """Return the affine form of a type with the smallest offset that is a whole number of steps."""
    forms = [form for form in affine_forms(get_type(weight)) if (form.offset / form.factor).is_integer()]
    check(bool(forms), f"the codes of {weight} are not evenly spaced multiples of a step")
    return min(forms, key=lambda form: abs(form.offset))


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted.

    quads: Which codes of a packed word make an operand register.
    """

    gemm: Gemm
    schedule: GpuSchedule
    groups: Groups
    geo: DigitGeometry
    form: Affine
    splitter: Splitter
    quads: tuple[Quad, ...]

    @property
    def tile_words(self) -> int:
        """32-bit words of a packed tile."""
        return 128 * self.groups.bits

    @property
    def kind(self) -> str:
        """Type of the sums of a slice."""
        return "float32" if self.geo.flushes else "int32"

    @property
    def fragments(self) -> int:
        """Accumulator fragments of a warp."""
        return self.geo.row_blocks * self.geo.column_blocks

    @property
    def scale_parts(self) -> int:
        """Registers of a lane's share of a warp's scales."""
        return -(-self.schedule.warp_rows // 32)


def choose_spec(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, held: int = 0) -> Spec:
    """Return the sizes of a kernel; ``held`` bytes of shared memory are for what else a block keeps.

    Raises ScheduleError if the schedule does not fit the problem.
    """
    check_legal(gemm, device, schedule)
    groups = Groups(gemm, "accumulator")
    geo, form = DigitGeometry(groups, device, schedule, held), integer_form(gemm.weight)
    check(geo.chunk_tiles >= 4, f"{held} bytes beside x leave no room for its digits")
    element = get_type(gemm.weight).element_type
    check(packed_order(element, gemm.activation) == "lanes", f"codes of {gemm.weight} are not in place")
    check(
        schedule.stages % geo.period == 0,
        f"{schedule.stages} stages are no whole periods of {geo.period} tiles",
    )
    splitter = Splitter(gemm.activation, groups.bits, form, geo.lane, geo.period, geo.flushes)
    return Spec(gemm, schedule, groups, geo, form, splitter, quads(groups.bits, geo.lane))
