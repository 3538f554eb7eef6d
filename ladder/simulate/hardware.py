"""The machine that cohorts run on: memory, barriers, and which warps have ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from ladder.simulate.barriers import BlockBarrier, ClusterBarrier, Mbarriers, NamedBarriers
from ladder.simulate.memory import Memory


class Hardware:
    """Memory and barriers of the blocks that are simulated together.

    blocks: Blocks, whole clusters.
    memory: Their memory.
    lanes: Lanes of a warp: 32 or 64.
    """

    def __init__(self, blocks: int, memory: Memory, lanes: int) -> None:
        agents = memory.agents
        self.blocks, self.memory, self.log, self.lanes = blocks, memory, memory.log, lanes
        self.block_warps, self.cluster_blocks = agents.warps, agents.blocks
        self.block_barrier = BlockBarrier(memory, blocks)
        self.cluster_barrier = ClusterBarrier(memory, blocks)
        self.mbarriers = Mbarriers(memory, blocks)
        self.named_barriers = NamedBarriers(memory, lanes)
        self.ended = np.zeros(blocks * agents.warps, np.bool_)
        self.counts: Counter[str] = Counter()
        # What tables of a machine family keep between their calls, by name.
        self.extras: dict[str, Any] = {}
        # What they check when all blocks have ended.
        self.at_end: list[Callable[[], None]] = []

    def block_has_left(self, block: int) -> bool:
        """Return whether all warps of a block have ended."""
        first = block * self.block_warps
        return bool(self.ended[first : first + self.block_warps].all())
