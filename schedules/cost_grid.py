"""Blocks of one launch on an NVIDIA GPU, how long those of a multiprocessor take, and times of ``mma``.

Bytes that a product brings from DRAM: what L2 holds is not read again.

Blocks that begin together take the same step of K at about the same time, so that what a wave of them
shares is read once; so do those that cut tails. Where stream-K cuts shares, they begin anywhere in K: there a
line is found in L2 only if it has not been replaced since its last use, which Che's approximation of an LRU
cache tells (Che, Tung and Wang 2002, "Hierarchical Web caching systems"): uses of a line are taken to be
independent.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import exp
from typing import NamedTuple

from ladder.ir.gemm import Gemm
from schedules.cost import Cost, Traffic, cost_of, decode_ops
from schedules.footprint import (
    WARPGROUPS,
    block_rows,
    k_blocks,
    of_any_n,
    resources,
)
from schedules.layouts import padded
from schedules.schedule import GpuSchedule
from schedules.shares import whole_tiles
from targets import Core, TileDevice

CLUSTER_SHARE = 0.92
"""Part of the multiprocessors that clusters of more than two blocks can occupy: a cluster stays in one GPC.

On an H200 and an H100 120 blocks in clusters of four and eight run at once, 128 do not.
"""


class Grid(NamedTuple):
    """Blocks of one launch and how well they fill the device; rounds: those of the busiest multiprocessor."""

    along_m: int
    along_n: int
    blocks: int
    stage: int
    resident: int
    rounds: float
    fill: float


class Work(NamedTuple):
    """Seconds that a multiprocessor spends on the blocks of a launch, by cause.

    chain: Serial latency of one block, were it alone, that other work hides.
    edge: Start and end of one block, that nothing hides.
    issue, tensor: Time of the issue slots and of the tensor cores that one block takes from its neighbours.
    power: How chain and shared units add up: 1 in sequence, 2 partly overlapped.
    fills: Latency of loading all stages of a block, one after the other.
    stages, ring: Buffers among which the loads rotate; how the time of their turns joins that of the work.
    row: What each row of x adds to chain and issue, where blocks copy or split it themselves.
    """

    chain: float
    issue: float
    tensor: float
    power: float
    fills: float = 0.0
    stages: int = 1
    edge: float = 0.0
    ring: float = 0.0
    row: tuple[float, float] = (0.0, 0.0)

    def with_rows(self, rows: int) -> Work:
        """Return the work of a block that has so many rows of x."""
        chain, issue = self.row
        return Work(self.chain + rows * chain, self.issue + rows * issue, *self[2:])

    def together(self, blocks: float) -> float:
        """Return the time of ``blocks`` that run side by side.

        A buffer is asked for again when it has been used: with t per stage and a latency of f,
        s buffers turn around in f + t, so a stage takes the longer of t and (f + t) / s; a power joins them
        where it is given.
        """
        shared = (blocks * self.issue) ** self.power + (blocks * self.tensor) ** self.power
        used = float((self.chain**self.power + shared) ** (1 / self.power)) + self.edge
        paced = (self.fills + used) / self.stages
        if self.ring and paced:
            return float((used**self.ring + paced**self.ring) ** (1 / self.ring))
        return max(used, paced)

    def waves(self, blocks: float, resident: int) -> float:
        """Return the time of ``blocks``, at most ``resident`` of them at once."""
        full, rest = divmod(blocks, resident)
        return (full * self.together(resident) if full else 0.0) + (self.together(rest) if rest else 0.0)


class Launch(NamedTuple):
    """What M does not change of a launch: blocks along N and K, units, a stage's bytes, blocks per unit."""

    along_n: int
    split: int
    units: int
    stage: int
    resident: int


def grid_of(launch: Launch, tile_m: int, m: int, crowded: float) -> Grid:
    """Return the blocks of a launch for M = ``m``.

    crowded: By how much of a multiprocessor's room blocks lie closer than spread evenly.
    """
    along_n, split, units, stage, resident = launch
    along_m = -(-m // tile_m)
    blocks = along_m * along_n * split
    rounds: float = -(-blocks // units)
    fill = blocks / (rounds * units)
    room = min(resident, blocks) - rounds
    if crowded and room > 0:
        rounds += crowded * room
    return Grid(along_m, along_n, blocks, stage, resident, rounds, fill)


def launch_of(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> Launch:
    """Return what M does not change of a launch."""
    needs, split = resources(of_any_n(gemm), device, schedule), k_blocks(schedule)
    shared = schedule.cluster if schedule.pipeline in WARPGROUPS else 1
    along_n = -(-gemm.n // (block_rows(schedule) * shared)) * shared  # clusters are whole
    units = usable_units(device, split * shared)
    return Launch(along_n, split, units, needs.stage, max(1, needs.blocks_per_unit))


def usable_units(device: TileDevice, cluster: int) -> int:
    """Return the multiprocessors that clusters of this many blocks can occupy."""
    if cluster == 1:
        return device.units
    usable = device.units * (CLUSTER_SHARE if cluster > 2 else 1.0)
    return max(cluster, int(usable) // cluster * cluster)


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
