"""Predicted time of the pipeline ``mma``: a roofline that was not fitted."""

from __future__ import annotations

from collections.abc import Mapping

from ladder.ir.gemm import Gemm
from schedules.cost import Cost, cost_of, decode_ops
from schedules.cost_grid import Grid
from schedules.footprint import block_rows
from schedules.layouts import padded
from schedules.schedule import GpuSchedule
from targets import Core, TileDevice

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
