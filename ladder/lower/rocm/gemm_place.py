"""The spec of an AMD kernel, which tile of the output a block computes, and which part of it a lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.gpu.activation_tile import CHUNK_BYTES, CHUNK_WORDS, ActivationTile
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import Lanes, count_m_tiles, find_m_tile, raster
from ladder.lower.gpu.groups import Groups
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import WaveDecoder, wave_decoder
from ladder.lower.rocm.dialect import cross_lane, shuffle_xor
from ladder.lower.rocm.steps import RUN, STEPS_OF, WaveStep, best_step
from schedules import waves
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule, check
from schedules.waves import GROUPS, STEP_ROWS, WAVE, leaves_offsets
from targets import TileDevice


@dataclass(frozen=True)
class WaveLanes(Lanes):
    """The lanes of a wave, of kernels that never overlap with others of their stream."""

    count: int = WAVE

    def read(self, ranges: Any, index: Expr) -> Expr:
        return b.keep(ranges[index])

    def shuffle_xor(self, value: Expr, distance: int) -> Expr:
        return b.keep(shuffle_xor(value, "int32", self.lane, distance))

    def uniform(self, value: Expr) -> Expr:
        """Return the value in a scalar register, so that addresses and branches that follow are scalar."""
        return b.keep(cross_lane("int32", "llvm.amdgcn.readfirstlane", value))


HALF_WAVE_CHUNKS = 32
"""Chunks whose words 32 lanes, all that a pass of a 4-byte write serves, put into LDS at once."""


@dataclass(frozen=True)
class WaveTile(ActivationTile):
    """A tile of x whose chunks are written word by word, as `Activations` transposes them.

    The lanes of a pass write the same chunk of as many spans of four as they have: of some rows, which
    the swizzle tells apart, or of one long row, of which it must tell the spans apart.
    """

    def place(self, row: Any, chunk: Any) -> Any:
        if self.chunks == 4:
            return super().place(row, chunk)
        rows = max(1, HALF_WAVE_CHUNKS // self.chunks)
        return row * self.chunks + (chunk ^ row % 8 ^ chunk // 8 * rows % 4)


@dataclass(frozen=True)
class WaveGeometry:
    """Sizes that follow from a problem, a device and a schedule of `schedules.footprint.WAVES`."""

    groups: Groups
    step: WaveStep
    device: TileDevice
    schedule: GpuSchedule

    def __post_init__(self) -> None:
        s = self.schedule
        check(s.stages == 2, f"x has two stages in LDS, got stages={s.stages}")
        check(
            bool(waves.divisions(s)),
            f"{s.warps} waves, {s.split_k} slices of K, do not divide a tile of {s.tile_m}"
            f" x {waves.tile_rows(s)}",
        )
        check(
            self.shared_bytes <= self.device.shared_per_block,
            f"{self.shared_bytes} bytes of LDS exceed the {self.device.shared_per_block} of"
            f" {self.device.name}; use smaller tiles",
        )

    # ---- division of labour ---------------------------------------------------------
    @property
    def threads(self) -> int:
        """Threads of a block."""
        return waves.block_lanes(self.schedule)

    @property
    def rows(self) -> int:
        """Weight rows of a block."""
        return waves.tile_rows(self.schedule)

    @property
    def row_waves(self) -> int:
        """Waves along rows."""
        return waves.division(self.schedule).row_waves

    @property
    def row_blocks(self) -> int:
        """Steps along rows of a wave."""
        return self.rows // waves.STEP_ROWS // self.row_waves

    @property
    def wave_m(self) -> int:
        """Activation rows of a wave."""
        return self.schedule.tile_m // waves.division(self.schedule).m_waves

    @property
    def m_blocks(self) -> int:
        """Steps along M of a wave."""
        return self.wave_m // self.step.columns

    # ---- stages ---------------------------------------------------------------------
    @property
    def slice_tiles(self) -> int:
        """Packed tiles along K of a wave in a stage."""
        return self.schedule.tile_k // TILE

    @property
    def stage_tiles(self) -> int:
        """Packed tiles along K in a stage: those of all slices."""
        return self.slice_tiles * self.schedule.split_k

    @property
    def tile_chunks(self) -> int:
        """16-byte chunks per activation row of one packed tile."""
        return TILE * self.step.element_bytes // CHUNK_BYTES

    @property
    def per_chunk(self) -> int:
        """Elements of x of a chunk."""
        return CHUNK_BYTES // self.step.element_bytes

    @property
    def x_tile(self) -> WaveTile:
        """Layout of a stage of x."""
        return WaveTile(self.tile_chunks * self.stage_tiles)

    @property
    def stage_chunks(self) -> int:
        """Chunks of a stage."""
        return self.schedule.tile_m * self.tile_chunks * self.stage_tiles

    @property
    def pieces(self) -> int:
        """Chunks of a stage that a thread copies, some of them perhaps beyond the tile."""
        return -(-self.stage_chunks // self.threads)

    @property
    def zeros(self) -> int:
        """The first word of LDS of zeros, which columns read of other columns' groups."""
        return 2 * self.stage_chunks * CHUNK_WORDS

    def zeros_beside(self, chunk: int) -> int:
        """Return the first of four words of zeros in the half of the banks that has no chunk of these four.

        chunk: The first of four chunks of a row that lanes of other columns read at the same time.
        """
        return self.zeros + (1 - chunk // 4 % 2) * (waves.ZERO_WORDS - CHUNK_WORDS)

    def column_sum(self, period: Any, slice_: Any, column: Any) -> Any:
        """Return the word of LDS of a column's sum of x; those of two periods are kept."""
        return (
            self.zeros
            + waves.ZERO_WORDS
            + (period % 2 * self.schedule.split_k + slice_) * waves.SLICE_SUMS
            + column
        )

    # ---- results --------------------------------------------------------------------
    @property
    def joins(self) -> bool:
        """Whether sums of several waves or lanes are added up through LDS."""
        return waves.joins_waves(self.schedule)

    @property
    def parts(self) -> int:
        """Partial sums of an output in LDS."""
        return waves.parts(self.schedule)

    def sum_word(self, part: Any, m: Any, row: Any) -> Any:
        """Return the word of a partial sum; of a multiple of four rows, of those that follow it too.

        The swizzle spreads the runs of four rows of neighbouring activation rows over the banks.
        """
        run = row // RUN ^ m % 8
        return part * waves.part_words(self.schedule) + m * self.rows + run * RUN + row % RUN

    @property
    def shared_bytes(self) -> int:
        """LDS of a block; partial sums reuse that of x."""
        return waves.lds_bytes(self.groups.gemm, self.schedule)


@dataclass(frozen=True)
class Spec:
    """Decisions about a kernel before it is emitted; ``raw``: operands leave offsets to the sums."""

    gemm: Gemm
    device: TileDevice
    schedule: GpuSchedule
    step: WaveStep
    groups: Groups
    geo: WaveGeometry
    raw: bool
    decoder: WaveDecoder

    @property
    def has_columns(self) -> bool:
        """Whether columns of matrix instructions are groups of K (`ladder.lower.rocm.gemm_scales`)."""
        return self.schedule.pipeline == GROUPS


def choose_spec(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Spec:
    """Return the instruction, the sizes and the decoder of a kernel.

    Raises DeviceError if the device has no instruction for the activations.
    Raises ScheduleError if the schedule does not fit the device.
    """
    step = best_step(STEPS_OF[schedule.pipeline], device, gemm.activation)
    groups = Groups(gemm, schedule.placement)
    geo, raw = WaveGeometry(groups, step, device, schedule), leaves_offsets(gemm, schedule)
    return Spec(gemm, device, schedule, step, groups, geo, raw, wave_decoder(gemm, device, raw=raw))


@dataclass(frozen=True)
class Place:
    """Where a lane works.

    args: The arguments as the product of this block's activation rows sees them.
    thread, lane: The thread in its block, and the lane in its wave.
    first_m, wave_m: First activation row of the block, and of the wave within the block.
    exists: Whether there are such activation rows.
    slice: The wave's slice of K.
    all_blocks: 32-row blocks of the whole weight.
    first_block, row_block: First 32-row block of the block, and of the wave.
    holders: Which thread's packed words the lane takes, by part.
    """

    args: Arguments
    thread: Expr
    lane: Expr
    first_m: Expr
    wave_m: Expr
    exists: Expr
    slice: Expr
    all_blocks: Expr
    first_block: Expr
    row_block: Expr
    holders: list[Expr]


def find_place(spec: Spec, args: Arguments) -> Place:
    """Emit which tile this block and which part of it this lane works on."""
    geo, schedule, step, dies = spec.geo, spec.schedule, spec.step, spec.device.dies
    all_blocks = args.n_tiles * (TILE // STEP_ROWS)
    own = geo.rows // STEP_ROWS
    rows = (all_blocks + own - 1) // own
    columns = count_m_tiles(args, schedule.tile_m)
    dealt, thread = d.launch(rows * columns, geo.threads)
    block = b.keep(together(dealt, rows * columns, dies)) if dies > 1 else dealt
    row, column = raster(block, rows, columns, schedule.raster)
    row_tile = b.bind(row)
    lane = b.bind(thread % spec.device.warp)
    lanes = WaveLanes(lane, spec.device.warp)
    found = find_m_tile(args, b.keep(column), schedule.tile_m, lanes)
    first_m = b.keep(found.first)
    wave, per_slice = lanes.uniform(thread // spec.device.warp), schedule.warps // schedule.split_k
    first_block = b.keep(row_tile * own)
    split = schedule.split_k > 1
    slice_: Expr = wave // per_slice if split else 0
    place = wave % per_slice if split else wave
    row_block = b.keep(first_block + place % geo.row_waves * geo.row_blocks)
    wave_m = b.keep(place // geo.row_waves * geo.wave_m)
    holders = [b.bind(step.holder(lane, part)) for part in range(step.parts)]
    return Place(
        found.args, thread, lane, first_m, wave_m, found.exists, slice_, all_blocks, first_block, row_block,
        holders,
    )  # fmt: skip


def together(block: Expr, blocks: Expr, dies: int) -> Expr:
    """Return a block's place in an order in which the blocks of a die follow each other.

    Dies with an L2 of their own get blocks in turn (MI300X: eight). Neighbouring tiles share rows of x or
    weights, so a die should work on a run of them.
    """
    each, rest, die = T.truncdiv(blocks, dies), T.truncmod(blocks, dies), T.truncmod(block, dies)
    return die * each + T.min(die, rest) + T.truncdiv(block, dies)
