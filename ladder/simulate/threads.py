"""Threads that execute an instruction together: warps, and which of their lanes are active."""

from __future__ import annotations

from typing import Any

import numpy as np

from ladder.simulate.findings import Log
from ladder.simulate.values import Array, Value, spread


class Threads:
    """The lanes of some warps.

    warps: Numbers of the warps among all that are simulated together, ascending.
    lanes: Lanes of a warp.
    block_warps: Warps of a block.
    log: Where findings go.
    """

    def __init__(self, warps: Array, lanes: int, block_warps: int, log: Log) -> None:
        self.warps, self.lanes, self.log = warps, lanes, log
        self.mask: Array | None = None
        self.touched = False
        self.count = len(warps)
        self.block = (warps // block_warps)[:, None]
        self.row_ids = np.repeat(np.arange(self.count), lanes)
        self.lane_ids = np.tile(np.arange(lanes), self.count)

    @property
    def active(self) -> Array:
        """Active threads, ``[warps, lanes]``."""
        return np.ones((self.count, self.lanes), np.bool_) if self.mask is None else self.mask

    def spread(self, value: Value, dtype: Any) -> Array:
        """Return a value as an array ``[warps, lanes]`` of a type."""
        return spread(value, self.count, dtype, self.lanes)

    def narrowed(self, condition: Value, sense: bool = True) -> Array:
        """Return the active threads for which a condition is ``sense``."""
        holds = np.asarray(condition, np.bool_)
        chosen = np.broadcast_to(holds if sense else ~holds, (self.count, self.lanes))
        return np.array(chosen) if self.mask is None else chosen & self.mask

    def active_warps(self) -> Array:
        """Return the rows of warps with an active lane."""
        return np.arange(self.count) if self.mask is None else np.flatnonzero(self.mask.any(axis=1))

    def require_whole(self, what: str, statement: int) -> None:
        """Report a warp-wide instruction that only some lanes of a warp reach."""
        if self.mask is None:
            return
        lanes = self.mask.sum(axis=1)
        if ((lanes > 0) & (lanes < self.lanes)).any():
            message = f"{what} needs all {self.lanes} lanes of a warp, {int(lanes[lanes > 0].min())} came"
            self.log.add("divergence", statement, message)


def first_active_lane(c: Threads) -> Array:
    """Return the mask of the first active lane of every warp."""
    active = c.active
    result = np.zeros_like(active)
    rows = c.active_warps()
    result[rows, active[rows].argmax(axis=1)] = True
    return result
