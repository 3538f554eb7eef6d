"""Schedules that are legal by estimate, but whose kernels spill: `benchmarks.spills` found them.

LLVM keeps accumulators and operands of AMD kernels in 512 registers; which few values it moves to and fro
(one register here, into an accumulation register) no estimate tells. The next best schedule is chosen then.
"""

from __future__ import annotations

from ladder.ir.gemm import Gemm
from schedules.schedule import GpuSchedule
from targets import TileDevice

Key = tuple[str, str, str, int, tuple[int, int, int], int, str]

SPILLING: frozenset[Key] = frozenset(
    {
        ("rocm/gfx90a", "int2", "bfloat16", 128, (128, 256, 64), 1, "operand"),
        ("rocm/gfx90a", "uint2", "bfloat16", 128, (128, 256, 64), 1, "operand"),
        ("rocm/gfx90a", "ternary", "bfloat16", 128, (128, 256, 64), 1, "operand"),
        ("rocm/gfx950", "int3", "bfloat16", 128, (128, 256, 64), 1, "operand"),
        ("rocm/gfx950", "int1", "bfloat16", 128, (128, 64, 64), 2, "accumulator"),
        ("rocm/gfx950", "uint1", "bfloat16", 128, (128, 64, 64), 2, "accumulator"),
    }
)
"""Device, weight, activation, group; tile along M, N and K, slices of K, placement of the scales."""


LONGEST_DOT = 256
"""Elements of K of a stage beyond which dot products that no slices share spill: LLVM unrolls all of it."""


def is_known_to_spill(gemm: Gemm, device: TileDevice, schedule: GpuSchedule) -> bool:
    """Tell whether the kernel of a schedule was found to spill."""
    if schedule.pipeline == "dot" and schedule.split_k == 1 and schedule.tile_k > LONGEST_DOT:
        return True
    tile = (schedule.tile_m, schedule.tile_n, schedule.tile_k)
    types = (device.name, gemm.weight, gemm.activation, gemm.group_size)
    return (*types, tile, schedule.split_k, schedule.placement) in SPILLING
