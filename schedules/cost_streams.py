"""Work of one block of the pipelines that stream weights through registers: ``gemv`` and ``digits``."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.ir.gemm import Gemm
from schedules.codes import EMULATED, evenly_spaced
from schedules.cost import decode_ops
from schedules.cost_grid import Work
from schedules.footprint import (
    block_rows,
    digit_columns,
    k_slices,
    launch_registers,
    operand_bytes,
    promotes,
    registers_per_thread,
)
from schedules.group_values import shares_values
from schedules.layouts import lane_of, packed_group, padded
from schedules.schedule import GpuSchedule
from targets import TileDevice

BYTES: dict[str, float] = {
    "START_SECONDS": 2.09e-06,  # a launch that overlaps the end of the one before it, with nothing to do
    "WARP_SECONDS": 1e-08,  # the same for each warp of a multiprocessor, until all have begun
    "POWER": 1.66,  # how chain and issue slots add up, see `schedules.cost_grid.Work`
    "OVERLAP": 5.15,  # how multiprocessors, DRAM and L2 add up
    "CROWDED": 0.585,  # gemv: by how much of a multiprocessor's room blocks lie closer than spread evenly
    "UNIT_SHARE": 1.14,  # what a multiprocessor can read, over its even share of DRAM's bandwidth
    "TIGHT_LOSS": 0.4,  # gemv: share of time lost where registers are estimated not to suffice
    "TILE_CYCLES": 71.2,  # latency of a warp's packed tile: x fragments, decode, products in a chain
    "ISSUE_CYCLES": 9.06,  # issue slots per fragment of 16 x 64 weights, decoding aside
    "DECODE_CYCLES": 2.25,  # issue slots per vector operation of a decode
    "SUM_CYCLES": 12.9,  # scales on the accumulator: issue slots per sum of a thread and group
    "X_CYCLES": 4.39,  # issue slots of a warp per tile and eight rows of x: fragments that its strips share
    "RAMP_CYCLES": 200,  # of a block that nothing hides, per stage and strip: its first loads (not fitted)
    "TOKEN_CYCLES": 0.000131,  # latency of a block per byte of x that it passes through its buffers
    "COPY_CYCLES": 0.000277,  # the same, in time that it takes from its neighbours
    "CLUSTER_CYCLES": 10200,  # launching a cluster, its barriers, reading the other block's sums
    "DIGIT_TILE_CYCLES": 1.37,  # latency of a period's products and its move to running sums, per tile
    "DIGIT_STRIP_CYCLES": 2,  # the same per strip of 16 rows of a warp (breaks ties, not fitted)
    "DIGIT_ISSUE_CYCLES": 10.2,  # issue slots per 16 x 64 weights: logic in place of decoding
    "DIGIT_COLUMN_CYCLES": 38.4,  # the same per eight columns: two products, and running sums
    "DIGIT_SPLIT_CYCLES": 119,  # issue slots per 32 elements of x that a block splits into digits
    "DIGIT_CLUSTER_CYCLES": 11000,  # as CLUSTER_CYCLES
    "DIGIT_BLOCK_CYCLES": 1060,  # of a block that nothing hides: its first x, and adding up its slices
}
"""Constants where an element of x is a byte, of gemv unless ``DIGIT_`` precedes them.

Fitted to 638 runs of gemv and 38 of digits on an H200 and an H100.
"""

HALVES: dict[str, float] = {
    **BYTES,
    "START_SECONDS": 1.7e-06,
    "WARP_SECONDS": 1.5e-08,
    "RAMP_CYCLES": 100,
    "POWER": 2.02,
    "OVERLAP": 3.15,
    "CROWDED": 0.616,
    "UNIT_SHARE": 1.06,
    "TILE_CYCLES": 211,
    "ISSUE_CYCLES": 21.9,
    "DECODE_CYCLES": 0.753,
    "SUM_CYCLES": 2.89,
    "SHARED_SUM_CYCLES": 1.0,  # the same where lanes load a group's values for each other
    "OFFSET_SUM_CYCLES": 8.7,  # the same in clusters whose raw operands leave an offset times a sum of x
    "X_CYCLES": 27.5,
    "TOKEN_CYCLES": 0.0169,
    "COPY_CYCLES": 0.00407,
    "DIGIT_TILE_CYCLES": 294,
    "DIGIT_ISSUE_CYCLES": 5.62,
    "DIGIT_COLUMN_CYCLES": 25.3,
    "DIGIT_SPLIT_CYCLES": 29,
    "DIGIT_CLUSTER_CYCLES": 6080,
    "DIGIT_BLOCK_CYCLES": 2400,
}
"""The same where it has 16 bits.

Fitted to 1,644 runs of gemv and 91 of digits on both cards, beside those of ``wgmma`` at the same points
(the last of them: ``benchmarks/results/h200_gemv_end_2026-11-27.json``). Sums that share values or leave an
offset were fitted afterwards, beside runs of small groups (``h200_streamed_choices_2026-11-29.json``), then
`START_SECONDS`, `WARP_SECONDS` and `RAMP_CYCLES` to small layers (``h200_small_layers_2026-12-01.json``).
"""


def streaming(gemm: Gemm) -> Mapping[str, float]:
    """Return the constants for a problem."""
    return BYTES if lane_of(gemm.activation) == 8 else HALVES


def gemv_loss(gemm: Gemm, schedule: GpuSchedule) -> float:
    """Return by what a lack of registers stretches the work of gemv."""
    tight = registers_per_thread(gemm, schedule) > launch_registers(schedule.warps)
    return 1 + streaming(gemm)["TIGHT_LOSS"] * tight


def _of_cycles(
    gemm: Gemm, device: TileDevice, chain: float, issue: float, edge: float, row: tuple[float, float]
) -> Work:
    """Return the work of a block: all in cycles, but what each row of x adds, in seconds."""
    power, clock = streaming(gemm)["POWER"], device.clock
    return Work(chain / clock, issue / clock, 0.0, power, edge=edge / clock, row=row)


def gemv_work(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Work:
    """Return the work of one block: every warp decodes its strips of 16 rows of its slice's tiles."""
    own = streaming(gemm)
    turn = schedule.stages * k_slices(schedule)  # the last one takes as long as others
    tiles = -(-padded(gemm.k) // (64 * turn)) * schedule.stages
    strips = block_rows(schedule) * schedule.split_k // (16 * schedule.warps)  # per warp
    wide = gemm.activation.startswith("fp8") and device.compute_capability in EMULATED
    issue = own["ISSUE_CYCLES"] * schedule.tile_m / 8
    issue += 32 * decode_ops(gemm, schedule.placement) * own["DECODE_CYCLES"]
    issue = (1 + wide) * issue + own["X_CYCLES"] * schedule.tile_m / 8 / strips
    if promotes(gemm, schedule):
        groups = 64 / packed_group(gemm.group_size, gemm.k) if gemm.scale else 1
        issue += max(0.5, groups) * schedule.tile_m / 2 * own[_sums(gemm, schedule)]
    ramp = own["RAMP_CYCLES"] * min(schedule.stages, tiles) * strips
    chain = tiles * own["TILE_CYCLES"] + own["CLUSTER_CYCLES"] * (schedule.cluster > 1)
    slots = tiles * strips * schedule.warps / 4 * issue  # per scheduler
    copied = padded(gemm.k) * operand_bytes(gemm) / schedule.cluster / device.clock
    row = (own["TOKEN_CYCLES"] * copied, own["COPY_CYCLES"] * copied)
    return _of_cycles(gemm, device, chain, slots, ramp, row)


def _sums(gemm: Gemm, schedule: GpuSchedule) -> str:
    """Return the constant of what it takes to scale the sums of a group on the accumulator."""
    if shares_values(gemm):
        return "SHARED_SUM_CYCLES"
    leaves = gemm.activation == "float16" and evenly_spaced(gemm.weight)
    return "OFFSET_SUM_CYCLES" if leaves and schedule.cluster > 1 else "SUM_CYCLES"


def digits_work(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Work:
    """Return the work of one block: every warp multiplies the codes of its rows and slice in place."""
    own = streaming(gemm)
    tiles = -(-padded(gemm.k) // (64 * k_slices(schedule)))
    strips = schedule.warp_rows // 16
    fragments = -(-digit_columns(gemm, schedule) // 8)
    issue = own["DIGIT_ISSUE_CYCLES"] + own["DIGIT_COLUMN_CYCLES"] * fragments
    items = padded(gemm.k) / 32 * (operand_bytes(gemm) - 1 or 0.25)  # of a row of x
    splitting = own["DIGIT_SPLIT_CYCLES"] * items / 4 / schedule.cluster / device.clock
    chain = tiles * (own["DIGIT_TILE_CYCLES"] + own["DIGIT_STRIP_CYCLES"] * strips)
    chain += own["DIGIT_CLUSTER_CYCLES"] * (schedule.cluster > 1)
    slots = tiles * strips * schedule.warps / 4 * issue
    return _of_cycles(gemm, device, chain, slots, own["DIGIT_BLOCK_CYCLES"], (splitting, splitting))
