"""The machine: runs cohorts in a chosen order until all have ended, and says who waits where none can.

Orders are adversaries. Races do not depend on them (`ladder.simulate.order`), but values, full
rings and deadlocks may.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from ladder.simulate.barriers import BlockBarrier, ClusterBarrier, Mbarriers, NamedBarriers
from ladder.simulate.cohort import Cohort, merged
from ladder.simulate.findings import Log
from ladder.simulate.memory import Memory
from ladder.simulate.order import Agents
from ladder.simulate.program import Program
from ladder.simulate.values import Array

ORDERS = ("together", "first warps first", "last warps first", "random")
"""Orders of warps: all that can, at once; or warp by warp, by number or drawn at random."""


class Wait(Protocol):
    """What a cohort waits for; what differs between warps is kept by barriers, so cohorts may split."""

    statement: int

    def ready(self, c: Cohort) -> Array:
        """Return which of the cohort's warps may go on."""

    def complete(self, c: Cohort) -> None:
        """Let the cohort go on, with what it learns by that."""

    def describe(self, c: Cohort) -> str:
        """Return what is missing."""


class Machine:
    """Blocks that are simulated together.

    Parameters
    ----------
    program
        What every warp runs.
    agents
        Warps of a block, and blocks of a cluster.
    blocks
        Blocks, whole clusters.
    memory, log
        Their memory, and where findings go.
    order
        One of `ORDERS`.
    seed
        Of the random order.
    unit
        Warps that always stay together: 4 where warpgroups multiply.
    lanes
        Lanes of a warp: 32 or 64.
    """

    def __init__(
        self,
        program: Program,
        agents: Agents,
        blocks: int,
        memory: Memory,
        log: Log,
        order: str,
        seed: int,
        unit: int,
        lanes: int,
    ) -> None:
        self.program, self.agents, self.blocks = program, agents, blocks
        self.block_warps, self.memory, self.log = agents.warps, memory, log
        self.order, self.unit, self.random = order, unit, random.Random(seed)
        self.lanes = lanes
        self.cluster_blocks = agents.blocks
        self.block_barrier = BlockBarrier(self)
        self.cluster_barrier = ClusterBarrier(self)
        self.mbarriers = Mbarriers(self)
        self.named_barriers = NamedBarriers(self)
        self.ended = np.zeros(blocks * agents.warps, np.bool_)
        self.cohorts: list[Cohort] = []
        self.counts: Counter[str] = Counter()
        # What tables of a machine family keep between their calls, by name.
        self.extras: dict[str, Any] = {}

    # ---- cohorts -------------------------------------------------------------------------------
    def divide(self, c: Cohort, rows: Sequence[Array]) -> list[Cohort]:
        """Replace a cohort by cohorts of some of its rows each."""
        parts = [c.split(part) for part in rows]
        self.cohorts.remove(c)
        self.cohorts.extend(parts)
        return parts

    def end(self, c: Cohort) -> None:
        """Take a cohort whose kernel has ended off the machine."""
        self.ended[c.warps] = True
        self.cohorts.remove(c)

    def block_has_left(self, block: int) -> bool:
        """Return whether all warps of a block have ended."""
        first = block * self.block_warps
        return bool(self.ended[first : first + self.block_warps].all())

    # ---- running -------------------------------------------------------------------------------
    def run(self, slots: int, set_up: Callable[[Cohort], None]) -> None:
        """Run all blocks to their end; ``set_up`` fills each cohort's first registers."""
        everyone = Cohort(self, np.arange(self.blocks * self.block_warps), [None] * slots)
        set_up(everyone)
        self.cohorts = [everyone]
        if self.order != "together":
            self.divide(everyone, self._units())
        with np.errstate(all="ignore"):
            while self.cohorts:
                c = self._next()
                if c is None:
                    self._deadlock()
                    return
                self._advance(c)
        self.mbarriers.check_ended()

    def _units(self) -> list[Array]:
        """Return the warps of every unit that is scheduled apart."""
        firsts = range(0, self.block_warps, self.unit)
        within = [np.arange(first, min(first + self.unit, self.block_warps)) for first in firsts]
        return [part + block * self.block_warps for block in range(self.blocks) for part in within]

    def _advance(self, c: Cohort) -> None:
        """Run a cohort until it waits, ends or splits."""
        if c.wait is not None:
            c.wait.complete(c)
            c.wait = None
            c.counter += 1
        program, cohorts = self.program, len(self.cohorts)
        while c.wait is None and len(self.cohorts) == cohorts:
            program[c.counter].execute(self, c)

    def _next(self) -> Cohort | None:
        """Return a cohort that can go on; split one that only some warps of can, where none can whole."""
        ready = [(c, None if c.wait is None else c.wait.ready(c)) for c in self._ordered()]
        whole = [c for c, rows in ready if rows is None or rows.all()]
        if whole:
            return self._joined(whole[0]) if self.order == "together" else whole[0]
        for c, rows in ready:
            if rows is not None and rows.any():
                return self.divide(c, [np.flatnonzero(rows), np.flatnonzero(~rows)])[0]
        return None

    def _ordered(self) -> list[Cohort]:
        if self.order == "random":
            return self.random.sample(self.cohorts, len(self.cohorts))
        if self.order == "together":
            # Those that lag behind go first, so that others may join them.
            return sorted(self.cohorts, key=lambda c: c.counter)
        return sorted(self.cohorts, key=lambda c: int(c.warps[0]), reverse=self.order.startswith("last"))

    def _joined(self, c: Cohort) -> Cohort:
        """Merge a cohort with those at the same statement in the same state."""
        for other in [o for o in self.cohorts if o is not c and o.counter == c.counter]:
            if (other.wait is None) != (c.wait is None):
                continue
            if other.wait is not None and not other.wait.ready(other).all():
                continue
            both = merged(c, other)
            if both is not None:
                self.cohorts = [o for o in self.cohorts if o is not c and o is not other] + [both]
                c = both
        return c

    def _deadlock(self) -> None:
        """Report who waits for what."""
        for c in self.cohorts:
            assert c.wait is not None
            statement = c.wait.statement
            warps = ", ".join(map(str, c.warps[:6])) + (", ..." if c.count > 6 else "")
            self.log.add("deadlock", statement, f"warps {warps} wait for ever: {c.wait.describe(c)}")


def first_active_lane(c: Cohort) -> Array:
    """Return the mask of the first active lane of every warp."""
    active = c.active
    result = np.zeros_like(active)
    rows = c.active_warps()
    result[rows, active[rows].argmax(axis=1)] = True
    return result
