"""Predicted time of one GEMM under one schedule, and what bounds it.

The model is a roofline per memory layer and core, corrected for what small problems suffer
from: units left idle, too few bytes in flight to cover latency (Little's law), the serial
chain of K steps, and the reduction of split K. It ranks candidates where no device is
present; profiling decides where one is. Constants named ``*_SECONDS`` were fitted to the H200 runs
of the project (cuBLAS-free kernels at 4096² and 8192², M = 1 … 4096).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import numpy as np

from ladder.ir.gemm import Gemm
from schedules.layouts import LANES, packed_group, padded, planes
from schedules.legal import block_rows, operand_bytes, resources, scale_bytes, weight_bits
from schedules.schedule import CpuSchedule, GpuSchedule, Schedule
from targets import Core, TileDevice
from tile_types import get_type
from tile_types.errors import ScheduleError

LAUNCH_SECONDS = 2.0e-6
"""A kernel in a CUDA graph, start to start, with nothing to do."""

STEP_SECONDS: Mapping[str, float] = {"gemv": 60e-9, "mma": 90e-9, "wgmma": 70e-9}
"""Serial cost of one K step of 64 that no other work of the block hides."""

CLUSTER_SECONDS = 1.0e-6
"""Two cluster barriers and the reads through distributed shared memory."""

BLOCK_REDUCE_SECONDS = 0.15e-6
"""Summing one more K slice through the block's own shared memory."""

OUTPUT_BYTES: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4}
ROUND_SECONDS = 1.5e-6
"""Prologue and epilogue of one round of blocks; a persistent kernel overlaps them with the next tile."""

CONTENTION = 0.03
"""How much of the parts that overlap with the longest one shows nevertheless."""

WARPS_TO_ISSUE = 16
"""Warps per SM below which dependent decode instructions leave issue slots empty."""

HALF_RATE_TOKENS = 32
"""Below this many tokens a wgmma takes as long as with this many."""


@dataclass(frozen=True)
class Cost:
    """A prediction.

    Parameters
    ----------
    seconds
        Predicted time of one call.
    bound
        Name of the largest part.
    parts
        ``(name, seconds)`` of every part of the model.
    bytes, flops
        Bytes that must cross DRAM once, and useful operations.
    """

    seconds: float
    bound: str
    parts: tuple[tuple[str, float], ...]
    bytes: int
    flops: int


def weight_bytes(gemm: Gemm) -> int:
    """Return the bytes of packed weights with their scales and zeros."""
    n, k = padded(gemm.n), padded(gemm.k)
    groups = -(-k // packed_group(gemm.group_size, gemm.k)) if gemm.activation in LANES else gemm.groups
    scales = scale_bytes(gemm, n, groups) if gemm.activation in LANES else 2 * n * groups
    return n * k * weight_bits(gemm) // 8 + scales


def minimum_bytes(gemm: Gemm, m: int) -> int:
    """Return the bytes that any kernel must move: weights, activations and results once."""
    activation = {"float32": 4, "float16": 2, "bfloat16": 2}.get(gemm.activation, 1)
    return weight_bytes(gemm) + m * gemm.k * activation + m * gemm.n * OUTPUT_BYTES[gemm.output]


@cache
def convert_ops(weight: str) -> float:
    """Return vector operations that turn one register of codes into operands.

    Evenly spaced values need one multiply-add; other exact types a shift and a rescale;
    codebooks a permute per two codes.
    """
    ttype = get_type(weight)
    if not ttype.exact:
        return 6.0
    if ttype.elem_bits > 8:
        return 0.0
    values = np.unique(ttype.values()[np.isfinite(ttype.values())])
    return 1.0 if len(np.unique(np.diff(values))) < 2 else 2.0


def decode_ops(gemm: Gemm, placement: str) -> float:
    """Return vector operations per weight to extract, convert, offset and scale it."""
    per_register = 1.5 * len(planes(weight_bits(gemm))) + convert_ops(gemm.weight)
    per_register += {"none": 0, "integer": 1, "float": 2}[gemm.zero]
    per_register += 1 if gemm.scale and placement == "operand" else 0
    return per_register * LANES.get(gemm.activation, 32) / 32


def predict(gemm: Gemm, device: TileDevice, schedule: Schedule, m: int) -> Cost:
    """Predict the time of one call.

    Parameters
    ----------
    gemm, device, schedule
        What runs where and how.
    m
        Rows of A.

    Raises
    ------
    ScheduleError
        If the schedule is of a kind that this device does not run.
    """
    if isinstance(schedule, GpuSchedule) and device.is_gpu:
        return _predict_gpu(gemm, device, schedule, m)
    if isinstance(schedule, CpuSchedule) and not device.is_gpu:
        return _predict_cpu(gemm, device, schedule, m)
    raise ScheduleError(f"{type(schedule).__name__} does not run on {device.name}")


def _cost(gemm: Gemm, m: int, overlapped: dict[str, float], serial: dict[str, float]) -> Cost:
    """Add what cannot overlap to the longest of what can."""
    parts = {**overlapped, **serial}
    longest = max(overlapped.values())
    contention = CONTENTION * (sum(overlapped.values()) - longest)
    seconds = longest + contention + sum(serial.values())
    flops = 2 * m * gemm.n * gemm.k
    return Cost(
        seconds, max(parts, key=parts.__getitem__), tuple(parts.items()), minimum_bytes(gemm, m), flops
    )


@dataclass(frozen=True)
class Grid:
    """Blocks of one launch and how well they fill the device."""

    along_m: int
    along_n: int
    blocks: int
    stage: int
    resident: int
    rounds: int
    fill: float


def _grid(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int) -> Grid:
    along_m, along_n = -(-m // schedule.tile_m), -(-gemm.n // block_rows(schedule))
    blocks = along_m * along_n * (schedule.split_k if schedule.pipeline == "wgmma" else 1)
    needs = resources(gemm, device, schedule)
    rounds = -(-blocks // device.units)
    fill = blocks / (rounds * device.units)
    return Grid(along_m, along_n, blocks, needs.stage, max(1, needs.blocks_per_unit), rounds, fill)


def _predict_gpu(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int) -> Cost:
    core = device.core_for(gemm.activation, schedule.pipeline)
    grid = _grid(gemm, device, schedule, m)
    compute, decode = _compute_seconds(gemm, device, schedule, core, grid)
    overlapped = {
        "dram": _dram_seconds(gemm, device, schedule, m, grid),
        "l2": _l2_seconds(gemm, device, m, grid),
        # Without warp specialisation half of the decoding waits for the tensor core.
        "core": compute if schedule.pipeline == "wgmma" else compute + 0.5 * decode,
        "decode": decode,
        "steps": _step_seconds(gemm, schedule, grid),
    }
    serial = {
        "launch": LAUNCH_SECONDS,
        "latency": 2 * device.layer("dram").latency,
        "reduce": _reduce_seconds(device, schedule),
        "rounds": _round_seconds(schedule, grid),
    }
    return _cost(gemm, m, overlapped, serial)


def _dram_seconds(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int, grid: Grid) -> float:
    """Time to stream from DRAM, limited by the bytes that the resident blocks keep in flight."""
    dram, l2 = device.layer("dram"), device.layer("l2")
    bandwidth = dram.bandwidth * dram.sustained
    once = minimum_bytes(gemm, m)
    moved = once
    if once > l2.capacity:  # a wave covers raster tiles of N by the rest along M and keeps only them in L2
        wave = min(grid.blocks, device.units * grid.resident)
        rows = min(schedule.raster, grid.along_n)
        columns = min(grid.along_m, -(-wave // rows))
        share = rows / grid.along_n * weight_bytes(gemm)
        share += columns / grid.along_m * m * gemm.k * operand_bytes(gemm)
        waves = grid.along_m * grid.along_n / (rows * columns)
        moved = max(once, int(waves * share))
    busy = min(grid.blocks, device.units * grid.resident)
    in_flight = busy * grid.stage * max(1, schedule.stages - 1)
    return moved / min(bandwidth, in_flight / dram.latency)


def _l2_seconds(gemm: Gemm, device: TileDevice, m: int, grid: Grid) -> float:
    """Time for every block to read its tiles through L2."""
    l2 = device.layer("l2")
    moved = grid.along_m * weight_bytes(gemm) + grid.along_n * m * gemm.k * operand_bytes(gemm)
    return moved / (l2.bandwidth * l2.sustained)


def _compute_seconds(
    gemm: Gemm, device: TileDevice, schedule: GpuSchedule, core: Core, grid: Grid
) -> tuple[float, float]:
    """Time of the tensor cores and of decoding, with the idle part of the last wave."""
    tokens = schedule.tile_m if schedule.pipeline != "wgmma" else max(schedule.tile_m, HALF_RATE_TOKENS)
    rows, columns = grid.along_n * block_rows(schedule), padded(gemm.k)
    flops = 2.0 * grid.along_m * tokens * rows * columns
    compute = flops / (device.peak(core) * core.sustained) / grid.fill
    # Warps beyond one per 16 rows of weights decode the same rows again.
    copies = max(1, schedule.warps * 16 // schedule.tile_n) if schedule.pipeline == "mma" else 1
    operations = decode_ops(gemm, schedule.placement) * grid.along_m * copies * rows * columns
    issue = min(1.0, min(grid.rounds, grid.resident) * schedule.warps / WARPS_TO_ISSUE)
    decode = operations / (device.vector_ops_per_cycle * device.units * device.clock * issue) / grid.fill
    return compute, decode


def _step_seconds(gemm: Gemm, schedule: GpuSchedule, grid: Grid) -> float:
    """Time of the serial chain of K steps, shared by the blocks that a unit interleaves."""
    steps = padded(gemm.k) / 64 / schedule.split_k
    shallow = 1 + 1 / max(1, schedule.stages - 1)
    return -(-grid.rounds // grid.resident) * steps * STEP_SECONDS[schedule.pipeline] * shallow


def _round_seconds(schedule: GpuSchedule, grid: Grid) -> float:
    """Time of prologues and epilogues that no other resident block hides."""
    exposed = -(-grid.rounds // grid.resident) - 1
    return 0.0 if schedule.persistent else exposed * ROUND_SECONDS


def _reduce_seconds(device: TileDevice, schedule: GpuSchedule) -> float:
    """Time to sum the slices of K."""
    if schedule.split_k == 1:
        return 0.0
    if schedule.pipeline == "gemv":
        return BLOCK_REDUCE_SECONDS * schedule.split_k
    bytes_read = 4 * schedule.tile_m * schedule.tile_n * (schedule.split_k - 1) / schedule.split_k
    per_unit = 0.25 * device.layer("shared").bandwidth / device.units
    return CLUSTER_SECONDS + bytes_read / per_unit


def _predict_cpu(gemm: Gemm, device: TileDevice, schedule: CpuSchedule, m: int) -> Cost:
    core = next((c for c in device.cores if c.name == schedule.core and c.a == gemm.activation), None)
    if core is None:
        raise ScheduleError(f"{device.name} has no core {schedule.core!r} for {gemm.activation} activations")
    dram = device.layer("dram")
    passes = -(-m // schedule.tile_m)
    rows = -(-schedule.tile_m // core.m) * core.m * passes
    vector = device.vector_ops_per_cycle * device.units * device.clock
    decoded = 1 if schedule.decode == "scratch" else passes
    operations = decode_ops(gemm, "operand") * gemm.n * gemm.k
    overlapped = {
        "dram": minimum_bytes(gemm, m) / (dram.bandwidth * dram.sustained),
        "core": 2.0 * rows * gemm.n * gemm.k / (device.peak(core) * core.sustained)
        + operations * decoded / vector,
    }
    return _cost(gemm, m, overlapped, {"launch": 3e-6})
