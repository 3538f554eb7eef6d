"""Plan of an iteration of the 8-bit loop, in plain integers: which products run when, and where.

A warpgroup's products are cut into *units*, by K and by activation rows. Where they must, sums of K
move from *partial* accumulators to float32 totals at the end of every interval: because a
group's scale applies to its sum alone, or because fp8 tensor cores keep few bits of long
sums. Units then write two sets of partial accumulators in turn: while the tensor core works
on one unit, the warps promote the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from ladder.lower.cuda.wgmma_geometry import WgmmaGeometry
from schedules.footprint import FP8_INTERVAL, PARTIAL_COLUMNS, promoted_columns, promotes_rarely

STEP = 32
"""Elements of K that one wgmma of 8-bit operands multiplies."""

INTEGER_ROWS = 224
"""Activation rows of one integer product at most: TVM 0.27 knows none of 256."""


@dataclass(frozen=True)
class Unit:
    """Products that one commit group starts.

    slab: Slab within the iteration.
    start, extent: Elements of K within the slab.
    m: Row tile of the warpgroup.
    first_m: First activation row.
    bank: Set of partial accumulators.
    fresh: Whether the first product overwrites the accumulators (without promotion: in the first iteration).
    done: Whether an interval ends here, so that the sums are promoted.
    """

    slab: int
    start: int
    extent: int
    m: int
    first_m: int
    bank: int
    fresh: bool
    done: bool

    @property
    def end(self) -> int:
        """Elements of K after the unit's last, within its slab."""
        return self.start + self.extent


@dataclass(frozen=True)
class Loop:
    """How a problem and a schedule cut the loop."""

    geo: WgmmaGeometry

    @property
    def unit_m(self) -> int:
        """Activation rows of one unit."""
        tile = self.geo.schedule.tile_m
        if self.geo.promotes:
            return promoted_columns(tile)
        return tile // 2 if self.integer and tile > INTEGER_ROWS else tile

    @property
    def integer(self) -> bool:
        return self.geo.gemm.activation == "int8"

    @property
    def positions(self) -> int:
        """Units that cover the warpgroup's tile once."""
        return self.geo.m64 * self.geo.schedule.tile_m // self.unit_m

    @property
    def bank_registers(self) -> int:
        """Accumulators per thread of one set of sums."""
        return self.unit_m // 2

    @property
    def long(self) -> bool:
        """Whether sums stay in the tensor core's registers over many iterations: no scales within K."""
        return not self.geo.promotes or (promotes_rarely(self.geo.gemm) and self.positions == 1)

    @property
    def iterations(self) -> int:
        """Iterations between promotions, where they are ``long`` and there are promotions."""
        return FP8_INTERVAL // self.iteration

    @property
    def banks(self) -> int:
        """Sets of sums that products write."""
        if self.long:
            return self.positions
        return 1 if self.unit_m > PARTIAL_COLUMNS else 2

    @property
    def drains(self) -> bool:
        """Whether every unit is promoted before the next one starts."""
        return not self.long and self.banks == 1

    @property
    def parted(self) -> bool:
        """Whether the activation rows of a large tile are multiplied and promoted in parts.

        Nothing is decoded ahead then: sums and totals leave registers for one set of operands.
        """
        return self.drains and self.positions > 1

    @property
    def operand_sets(self) -> int:
        """Slabs whose operands have registers."""
        return 1 if self.parted else 2

    @property
    def iteration(self) -> int:
        """Elements of K in one iteration of the loop."""
        return self.geo.body * self.geo.slab

    @property
    def interval(self) -> int:
        """Elements of K that an iteration sums on their own; divides an iteration, or a slab into units."""
        interval = gcd(self.geo.groups.size, self.iteration, self.geo.gemm.token_group)
        if self.long:
            return self.iteration
        return interval if self.positions <= self.banks else min(interval, self.geo.slab)

    def _bank(self, interval: int, position: int, unit: int) -> int:
        """Return the bank of a unit: another one than that of the unit before, which still runs."""
        if self.positions == 1:
            return interval % self.banks
        return position if self.positions <= self.banks else unit % self.banks

    def units(self) -> list[Unit]:
        """Return the units of one iteration in the order in which they start."""
        geo = self.geo
        extent = min(self.interval, geo.slab)
        found: list[Unit] = []
        for slab in range(geo.body):
            for start in range(0, geo.slab, extent):
                first = slab * geo.slab + start
                number = first // self.interval
                for position in range(self.positions):
                    m, part = divmod(position, self.positions // geo.m64)
                    found.append(
                        Unit(
                            slab=slab,
                            start=start,
                            extent=extent,
                            m=m,
                            first_m=part * self.unit_m,
                            bank=self._bank(number, position, len(found)),
                            fresh=first % self.interval == 0,
                            done=not self.long and (first + extent) % self.interval == 0,
                        )
                    )
        return found
