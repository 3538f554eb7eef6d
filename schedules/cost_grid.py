"""Blocks of one launch on an NVIDIA GPU, and how well they fill it."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from ladder.ir.gemm import Gemm
from schedules.footprint import WARPGROUPS, block_rows, k_blocks, of_any_n, resources
from schedules.schedule import GpuSchedule
from targets import TileDevice

CLUSTER_LOSS = 0.04
"""Multiprocessors left over per further pair of blocks in a cluster: a cluster stays in one GPC."""


class Grid(NamedTuple):
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
