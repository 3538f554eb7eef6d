"""Blocks of one launch on an NVIDIA GPU, and how well they fill it."""

from __future__ import annotations

from dataclasses import dataclass

from ladder.ir.gemm import Gemm
from schedules.footprint import WARPGROUPS, block_rows, k_blocks, resources
from schedules.schedule import GpuSchedule
from targets import TileDevice

CLUSTER_LOSS = 0.04
"""Multiprocessors left over per further pair of blocks in a cluster: a cluster stays in one GPC."""


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


def grid_of(gemm: Gemm, device: TileDevice, schedule: GpuSchedule, m: int) -> Grid:
    """Return the blocks of a launch for M = ``m``."""
    along_m, along_n = -(-m // schedule.tile_m), -(-gemm.n // block_rows(schedule))
    split = k_blocks(schedule)
    needs = resources(gemm, device, schedule)
    shared = schedule.cluster if schedule.pipeline in WARPGROUPS else 1
    units = usable_units(device, split * shared)
    along_n = -(-along_n // shared) * shared  # clusters are whole: blocks beyond N repeat the last rows
    blocks = along_m * along_n * split
    rounds = -(-blocks // units)
    resident = max(1, needs.blocks_per_unit)
    return Grid(along_m, along_n, blocks, needs.stage, resident, rounds, blocks / (rounds * units))


def usable_units(device: TileDevice, cluster: int) -> int:
    """Return the multiprocessors that clusters of this many blocks can occupy."""
    if cluster == 1:
        return device.units
    return max(cluster, int(device.units * (1 - CLUSTER_LOSS * (cluster - 2))) // cluster * cluster)
