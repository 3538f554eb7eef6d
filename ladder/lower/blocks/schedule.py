"""How a block graph is laid over warps: what a search of µGraphs leaves open."""

from __future__ import annotations

from dataclasses import dataclass

WARP = 32


@dataclass(frozen=True)
class BlockSchedule:
    """Division of a block graph's work.

    Parameters
    ----------
    groups
        Groups of warps. Group i takes steps i, i + groups x cluster, ... of the loop, with copies, buffers
        and accumulators of its own; accumulators are joined afterwards.
    row_warps
        Warps of a group: they share its tiles and split the rows of what they compute.
    stages
        Steps whose tiles a group holds in shared memory, those under way included.
    cluster
        Blocks that share a loop: each takes its part of the steps, accumulators are joined through
        distributed shared memory.
    """

    groups: int = 1
    row_warps: int = 1
    stages: int = 2
    cluster: int = 1

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.groups * self.row_warps

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP

    @property
    def sharers(self) -> int:
        """Groups that share a loop, over all blocks of a cluster."""
        return self.groups * self.cluster
