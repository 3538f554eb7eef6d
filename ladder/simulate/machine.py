"""The machine: runs cohorts in a chosen order until all have ended, and says who waits where none can.

Orders are adversaries. Races do not depend on them (`ladder.simulate.order`), but values, full
rings and deadlocks may.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np

from ladder.simulate.cohort import Cohort, Cohorts
from ladder.simulate.hardware import Hardware
from ladder.simulate.program import Program
from ladder.simulate.values import Array

ORDERS = ("together", "first warps first", "last warps first", "random")
"""Orders of warps: all that can, at once; or warp by warp, by number or drawn at random."""


class Machine:
    """Runs a program on the blocks that are simulated together.

    program: What every warp runs.
    hardware: What it runs on.
    order: One of `ORDERS`.
    seed: Of the random order.
    unit: Warps that always stay together: 4 where warpgroups multiply.
    slots: Registers of a thread.
    set_up: Fills their first values.
    """

    def __init__(
        self,
        program: Program,
        hardware: Hardware,
        order: str,
        seed: int,
        unit: int,
        slots: int,
        set_up: Callable[[Cohort], None],
    ) -> None:
        self.program, self.hardware = program, hardware
        self.order, self.unit, self.random = order, unit, random.Random(seed)
        everyone = Cohort(hardware, np.arange(hardware.blocks * hardware.block_warps), [None] * slots)
        set_up(everyone)
        self.cohorts = Cohorts(everyone)
        if order != "together":
            self.cohorts.divide(everyone, self._units())

    def run(self) -> None:
        """Run all blocks to their end."""
        with np.errstate(all="ignore"):
            while self.cohorts.running:
                c = self._next()
                if c is None:
                    self._deadlock()
                    return
                self._advance(c)
        self.hardware.mbarriers.check_ended()
        for check in self.hardware.at_end:
            check()

    def _units(self) -> list[Array]:
        """Return the warps of every unit that is scheduled apart."""
        firsts = range(0, self.hardware.block_warps, self.unit)
        within = [np.arange(first, min(first + self.unit, self.hardware.block_warps)) for first in firsts]
        return [
            part + block * self.hardware.block_warps
            for block in range(self.hardware.blocks)
            for part in within
        ]

    def _advance(self, c: Cohort) -> None:
        """Run a cohort until it waits, ends or splits."""
        if c.wait is not None:
            c.wait.complete(c)
            c.wait = None
            c.counter += 1
        program, cohorts = self.program, len(self.cohorts.running)
        while c.wait is None and len(self.cohorts.running) == cohorts:
            program[c.counter].execute(self.cohorts, c)

    def _next(self) -> Cohort | None:
        """Return a cohort that can go on; split one that only some warps of can, where none can whole."""
        ready = [(c, None if c.wait is None else c.wait.ready(c)) for c in self._ordered()]
        whole = [c for c, rows in ready if rows is None or rows.all()]
        if whole:
            return self._joined(whole[0]) if self.order == "together" else whole[0]
        for c, rows in ready:
            if rows is not None and rows.any():
                return self.cohorts.divide(c, [np.flatnonzero(rows), np.flatnonzero(~rows)])[0]
        return None

    def _ordered(self) -> list[Cohort]:
        running = self.cohorts.running
        if self.order == "random":
            return self.random.sample(running, len(running))
        if self.order == "together":
            # Those that lag behind go first, so that others may join them.
            return sorted(running, key=lambda c: c.counter)
        return sorted(running, key=lambda c: int(c.warps[0]), reverse=self.order.startswith("last"))

    def _joined(self, c: Cohort) -> Cohort:
        """Merge a cohort with those at the same statement in the same state."""
        for other in [o for o in self.cohorts.running if o is not c and o.counter == c.counter]:
            if (other.wait is None) != (c.wait is None):
                continue
            if other.wait is not None and not other.wait.ready(other).all():
                continue
            c = self.cohorts.merge(c, other) or c
        return c

    def _deadlock(self) -> None:
        """Report who waits for what."""
        for c in self.cohorts.running:
            assert c.wait is not None
            statement = c.wait.statement
            warps = ", ".join(map(str, c.warps[:6])) + (", ..." if c.count > 6 else "")
            self.hardware.log.add("deadlock", statement, f"warps {warps} wait for ever: {c.wait.describe(c)}")
