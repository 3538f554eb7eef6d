"""Bytes that a product brings from DRAM: what L2 holds is not read again.

Blocks that begin together take the same step of K at about the same time, so that what a wave of them
shares is read once; so do those that cut tails. Where stream-K cuts shares, they begin anywhere in K: there a
line is found in L2 only if it has not been replaced since its last use, which Che's approximation of an LRU
cache tells (Che, Tung and Wang 2002, "Hierarchical Web caching systems"): uses of a line are taken to be
independent.
"""

from __future__ import annotations

from math import exp

from schedules.cost import Traffic
from schedules.cost_grid import Grid
from schedules.schedule import GpuSchedule
from schedules.shares import whole_tiles
from targets import TileDevice

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
