"""How stream-K divides work, its workspace, and what blocks of a cluster finish.

A *unit* is one turn of a kernel's loop over K. The functions work on Python integers and on TIR
expressions alike, so that tests evaluate exactly the arithmetic that kernels use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schedules.schedule import GpuSchedule

Index = Any
"""A Python integer or a TIR expression."""

WORKSPACE = "ladder.workspace"
"""Name under which a kernel's host code finds what gives it a workspace: bytes -> address."""

LEAST_SHARED = 16
"""Activation rows for each block of a cluster from which on they share rows, see `shares_columns`."""


def whole_tiles(tiles: Index, blocks: int, highest: Callable[..., Index] = max) -> Index:
    """Return how many of ``tiles`` are walked whole before shares: the full rounds but the last one."""
    return highest(tiles // blocks - 1, 0) * blocks


def share_begin(share: Index, units: Index, blocks: Index) -> Index:
    """Return the first of ``units`` that belongs to a share, of which there is one per block."""
    return share * units // blocks


def full_rounds(tiles: Index, blocks: int) -> Index:
    """Return how many of ``tiles`` are walked whole where tails are cut: the full rounds of all blocks."""
    return tiles // blocks * blocks


def owned_turns(left: Index, turns: Index, blocks: int, lowest: Callable[..., Index] = min) -> Index:
    """Return how many of the turns of each of the ``left`` tiles, fewer than blocks, its own block does.

    The same as others do, and one more: these hand their sums over.
    """
    return lowest(turns, (left * turns + blocks - 1) // blocks + 1)


def share_with(unit: Index, units: Index, blocks: Index) -> Index:
    """Return the share that a unit belongs to: the inverse of `share_begin`."""
    return ((unit + 1) * blocks + units - 1) // units - 1


def most_parts(tiles: int, blocks: int, tails: bool) -> int:
    """Return of how many other blocks the block of a tile takes in sums, at most."""
    if not tails:
        return -(-blocks // tiles)
    left = tiles % blocks
    return -(-(blocks - left) // left) + 1 if left else 0


def shares_columns(schedule: GpuSchedule) -> bool:
    """Whether blocks of wgmma that share K finish some activation rows of all weight rows each.

    Else they finish all activation rows of some weight rows: tiles of few rows have not enough eights, and
    pairs of blocks of several warpgroups were not faster.
    """
    wanted = schedule.split_k > 2 or (schedule.split_k == 2 and schedule.warps == 4)
    return wanted and schedule.tile_m >= LEAST_SHARED * schedule.split_k
