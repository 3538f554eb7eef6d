"""Blocks of one launch on an NVIDIA GPU, how well they fill it, and times of ``mma`` and ``digits``.

Bytes that a product brings from DRAM: what L2 holds is not read again.

Blocks that begin together take the same step of K at about the same time, so that what a wave of them
shares is read once; so do those that cut tails. Where stream-K cuts shares, they begin anywhere in K: there a
line is found in L2 only if it has not been replaced since its last use, which Che's approximation of an LRU
cache tells (Che, Tung and Wang 2002, "Hierarchical Web caching systems"): uses of a line are taken to be
independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import exp
from typing import NamedTuple

from ladder.ir.gemm import Gemm
from schedules.cost import Cost, Traffic, cost_of, decode_ops
from schedules.footprint import (
    WARPGROUPS,
    block_rows,
    digit_columns,
    k_blocks,
    k_slices,
    of_any_n,
    operand_bytes,
    resources,
)
from schedules.layouts import padded
from schedules.schedule import GpuSchedule
from schedules.shares import whole_tiles
from targets import Core, TileDevice

CLUSTER_LOSS = 0.04
"""Multiprocessors left over per further pair of blocks in a cluster: a cluster stays in one GPC."""


class Grid(NamedTuple):
    """Blocks of one launch and how well they fill the device; rounds: those of the busiest multiprocessor."""

    along_m: int
    along_n: int
    blocks: int
    stage: int
    resident: int
    rounds: float
    fill: float


def grid_of(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int) -> Grid:
    """Return the blocks of a launch for M = ``m``."""
    along_n, split, units, stage, resident = _launch(gemm, device, schedule)
    along_m = -(-m // schedule.tile_m)
    blocks = along_m * along_n * split
    rounds = -(-blocks // units)
    return Grid(along_m, along_n, blocks, stage, resident, rounds, blocks / (rounds * units))


@lru_cache(maxsize=16384)
def _launch(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> tuple[int, int, int, int, int]:
    """Return what M does not change: blocks along N and K, units, a stage's bytes, blocks per unit."""
    needs, split = resources(of_any_n(gemm), device, schedule), k_blocks(schedule)
    shared = schedule.cluster if schedule.pipeline in WARPGROUPS else 1
    along_n = -(-gemm.n // (block_rows(schedule) * shared)) * shared  # clusters are whole
    units = usable_units(device, split * shared)
    return along_n, split, units, needs.stage, max(1, needs.blocks_per_unit)


def usable_units(device: TileDevice, cluster: int) -> int:
    """Return the multiprocessors that clusters of this many blocks can occupy."""
    if cluster == 1:
        return device.units
    return max(cluster, int(device.units * (1 - CLUSTER_LOSS * (cluster - 2))) // cluster * cluster)


STEPS = 14
"""Halvings of the interval in which the age of what L2 replaces is sought."""


def moved_bytes(
    device: TileDevice, schedule: GpuSchedule, traffic: Traffic, grid: Grid, kept: float = 1.0
) -> int:
    """Return the bytes that cross DRAM, at least all operands and results once.

    kept: Share of L2 that holds operands which are used out of step.
    """
    (weights, activations, once), capacity = traffic, device.layer("l2").capacity
    if once <= capacity:
        return once
    tiles = grid.along_m * grid.along_n
    shares = schedule.stream_k and not schedule.tails
    whole = int(whole_tiles(tiles, device.units)) if shares else tiles
    in_step = _in_step(device, schedule, grid, weights, activations) * whole / tiles
    cut = tiles - whole
    if not cut:
        return max(once, int(in_step))
    rows, columns = min(grid.along_m, cut), cut / grid.along_m  # the last ones: all along M of few along N
    parts = (weights * max(1.0, columns) / grid.along_n, rows), (activations * rows / grid.along_m, columns)
    return max(once, int(in_step + _out_of_step(*parts, kept * capacity)))


def _in_step(
    device: TileDevice, schedule: GpuSchedule, grid: Grid, weights: float, activations: float
) -> float:
    """Return the bytes that waves of blocks read: each covers raster tiles of N by the rest along M."""
    wave = min(grid.blocks, device.units * grid.resident)
    rows = min(schedule.raster, grid.along_n)
    columns = min(grid.along_m, -(-wave // rows))
    share = rows / grid.along_n * weights + columns / grid.along_m * activations
    return grid.along_m * grid.along_n / (rows * columns) * share


def _out_of_step(weights: tuple[float, float], activations: tuple[float, float], capacity: float) -> float:
    """Return the bytes read of two operands (bytes, uses of each), used at random times of one run."""
    (first, uses), (second, others) = weights, activations
    low, high = 0.0, 1.0  # the age of a line that is replaced, as a share of the run
    for _ in range(STEPS):
        age = (low + high) / 2
        held = first * (1 - exp(-uses * age)) + second * (1 - exp(-others * age))
        low, high = (age, high) if held < capacity else (low, age)
    return first * max(1.0, uses * exp(-uses * low)) + second * max(1.0, others * exp(-others * low))


MMA_STEP_SECONDS = 90e-9
"""mma: serial cost of one K step of 64 that no other work of the block hides."""

ROUND_SECONDS = 1.5e-6
"""mma: prologue and epilogue of one round of blocks."""

WARPS_TO_ISSUE = 16
"""mma: warps per SM below which dependent decode instructions leave issue slots empty."""


def predict_mma(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int, grid: Grid, memory: Mapping[str, float]
) -> Cost:
    """Predict the time of one call.

    gemm, device, schedule, m: As of `schedules.cost_model.predict`.
    grid: The blocks of the launch.
    memory: Layer of memory -> seconds to move its bytes; and ``"launch"``, those of an empty launch.
    """
    core = device.core_for(gemm.activation, schedule.pipeline)
    compute, decode = _compute_seconds(gemm, device, schedule, core, grid)
    overlapped = {
        "dram": memory["dram"],
        "l2": memory["l2"],
        # Without warp specialisation half of the decoding waits for the tensor core.
        "core": compute + 0.5 * decode,
        "decode": decode,
        "steps": _step_seconds(gemm, schedule, grid),
    }
    serial = {
        "launch": memory["launch"],
        "latency": 2 * device.layer("dram").latency,
        "rounds": (-(-grid.rounds // grid.resident) - 1) * ROUND_SECONDS,
    }
    return cost_of(gemm, m, overlapped, serial)


def _compute_seconds(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, core: Core, grid: Grid
) -> tuple[float, float]:
    """Time of the tensor cores and of decoding, with the idle part of the last wave."""
    rows, columns = grid.along_n * block_rows(schedule), padded(gemm.k)
    flops = 2.0 * grid.along_m * schedule.tile_m * rows * columns
    compute = flops / (device.peak(core) * core.sustained) / grid.fill
    # Warps beyond one per 16 rows of weights decode the same rows again.
    copies = max(1, schedule.warps * 16 // schedule.tile_n)
    operations = decode_ops(gemm, schedule.placement) * grid.along_m * copies * rows * columns
    issue = min(1.0, min(grid.rounds, grid.resident) * schedule.warps / WARPS_TO_ISSUE)
    decode = operations / (device.vector_ops_per_cycle * device.units * device.clock * issue) / grid.fill
    return compute, decode


def _step_seconds(gemm: Gemm, schedule: GpuSchedule, grid: Grid) -> float:
    """Time of the serial chain of K steps, shared by the blocks that a unit interleaves."""
    shallow = 1 + 1 / max(1, schedule.stages - 1)
    steps = padded(gemm.k) / 64
    return -(-grid.rounds // grid.resident) * steps * MMA_STEP_SECONDS * shallow


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
