"""The spec of an AMD kernel, which tile of the output a block computes, and which part of it a lane."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.grouped import count_m_tiles, find_m_tile
from ladder.lower.gpu.groups import Groups
from ladder.lower.gpu.raster import raster
from ladder.lower.rocm import dialect as d
from ladder.lower.rocm.decode import WaveDecoder, wave_decoder
from ladder.lower.rocm.geometry import WaveGeometry
from ladder.lower.rocm.grouped import WaveLanes
from ladder.lower.rocm.steps import STEPS_OF, WaveStep, best_step
from schedules.layouts import TILE
from schedules.schedule import GpuSchedule
from schedules.waves import GROUPS, STEP_ROWS, leaves_offsets
from targets import TileDevice

Expr = Any


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
