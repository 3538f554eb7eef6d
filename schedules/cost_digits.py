"""Predicted time of one block of the pipeline ``digits``."""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from schedules.footprint import digit_columns, k_slices, operand_bytes
from schedules.layouts import padded
from schedules.schedule import GpuSchedule
from targets import TileDevice

DIGIT_TILE_CYCLES = 115
"""digits: dependent latency of a period's products and its move to running sums, per tile.

The constants of digits were fitted to 60 runs on an H200, of one to four activation rows.
"""

DIGIT_STRIP_CYCLES = 2
"""digits: the same per strip of 16 rows of a warp (breaks ties, not fitted)."""

DIGIT_ISSUE_CYCLES = 4.9
"""digits: clocks of a scheduler per 16 x 64 weights, whatever the columns: logic in place of decoding."""

DIGIT_COLUMN_CYCLES = 22
"""digits: the same per eight columns: two products, and running sums."""

DIGIT_SPLIT_CYCLES = 19
"""digits: clocks of a scheduler per 32 elements of x of 16 bits that a block splits into digits."""

DIGIT_CLUSTER_CYCLES = 1e3
"""digits: what `GEMV_CLUSTER_CYCLES` is for gemv (two blocks against one at 8192 x 28672, not fitted)."""

DIGIT_BLOCK_CYCLES = 3.57e03
"""digits: starting a block: its first x, and adding up its slices."""


def digits_seconds(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> tuple[float, float, float]:
    """Return seconds of a block's longest chain, of its issue slots, and of splitting one row of x."""
    tiles = -(-padded(gemm.k) // (64 * k_slices(schedule)))
    strips = schedule.warp_rows // 16
    fragments = -(-digit_columns(gemm, schedule) // 8)
    issue = DIGIT_ISSUE_CYCLES + DIGIT_COLUMN_CYCLES * fragments
    items = padded(gemm.k) / 32 * (operand_bytes(gemm) - 1 or 0.25)  # of a row of x
    splitting = DIGIT_SPLIT_CYCLES * items / 4 / schedule.cluster
    tile = DIGIT_TILE_CYCLES + DIGIT_STRIP_CYCLES * strips
    chain = tiles * tile + DIGIT_BLOCK_CYCLES + DIGIT_CLUSTER_CYCLES * (schedule.cluster > 1)
    slots = tiles * strips * schedule.warps / 4 * issue
    return chain / device.clock, slots / device.clock, splitting / device.clock
