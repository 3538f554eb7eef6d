"""Reduction of slices of K over the blocks of a cluster, through distributed shared memory.

Every warp sends sums, as they lie in its registers, to the block that finishes them (PTX ISA, st.async), and
the warp there waits for all of them, adds and stores. Nobody waits for a barrier of the whole cluster, and no
block reads from one that may have left. What a block finishes:

* of tiles of few activation rows whole *units*: sixteen weight rows of a warp's row tile, dealt in turn;
* else some of the activation rows of all warps (`ColumnSums`), so that none is idle at the end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda import barriers
from ladder.lower.cuda.wgmma_geometry import WARP_ROWS, MathThread, Spec
from ladder.lower.cuda.wgmma_grid import Grid
from schedules.footprint import slices_in_turn

Sum = Callable[[int], Expr]
"""Returns the float32 sum of an accumulator of the thread."""

Store = Callable[[int, Sum, range], None]
"""Stores activation rows of a row tile of the warpgroup: the tile, its sums, the rows."""


class ClusterSums:
    """Shared memory and steps of one block's part in the sums of its cluster.

    pool: Shared memory.
    """

    def __init__(self, spec: Spec, grid: Grid, pool: Any) -> None:
        self.spec, self.grid, self.geo, self.slices = spec, grid, spec.geo, spec.schedule.split_k
        self.turns = slices_in_turn(spec.schedule)
        self.sets = (self.slices - 1) * self.turns
        *extents, barriers = self._extents()
        self.sums = pool.alloc((*extents, 32, 4), "float32", align=128)
        self.arrived = pool.alloc((barriers,), "uint64", align=8)

    def _extents(self) -> tuple[int, ...]:
        """Return the extents of what is received, by fours of each lane, and the number of barriers."""
        return self.geo.owned_units, self.sets, self.geo.accumulators // 4, self.geo.owned_units

    def initialise(self) -> None:
        """Let the barrier of every unit of this block expect the other blocks' sums; one thread."""
        units = self.spec.schedule.tile_n // WARP_ROWS
        for unit in range(self.geo.owned_units):
            barrier = self.arrived.ptr_to([unit])
            size = T.uint32(self.sets * self.geo.accumulators * 32 * 4)
            # Units may not go round evenly: the last blocks then own one less.
            with b.when(unit * self.slices + self.grid.slice < units):
                barriers.initialise(barrier)
                barriers.expect(barrier, size)

    def announce(self) -> None:
        """Tell the cluster that this block's barriers are ready; every thread."""
        b.ptx("barrier.cluster.arrive.release")

    def meet(self) -> None:
        """Wait until the barriers of all blocks are ready; every thread."""
        b.ptx("barrier.cluster.wait.acquire")

    def finish(self, who: MathThread, value: Sum, store: Store) -> None:
        """Send what other blocks finish, then ``store`` what this block does."""
        m64, own = self.geo.m64, self.grid.slice
        units = [b.keep((who.group * m64 + m) * 4 + who.warp) for m in range(m64)]
        self.meet()
        for m, unit in enumerate(units):
            with b.when(unit % self.slices != own):
                self._send(who.lane, m, unit, value)
        for m, unit in enumerate(units):
            with b.when(unit % self.slices == own):
                store(m, self._gathered(who.lane, m, unit, value), range(self.spec.schedule.tile_m))

    def _send(self, lane: Expr, m: int, unit: Expr, value: Sum) -> None:
        owner = unit % self.slices
        # A block's place among the senders leaves the owner out.
        place = self.grid.slice - T.Cast("int32", self.grid.slice > owner)
        rank = T.Cast("int32", owner * self.spec.schedule.cluster + self.grid.member)
        barrier = self.arrived.ptr_to([unit // self.slices])
        for turn in range(self.turns):
            first = turn * self.spec.sums + m * self.geo.accumulators
            for quad in range(self.geo.accumulators // 4):
                target = self.sums.ptr_to([unit // self.slices, place * self.turns + turn, quad, lane, 0])
                four = [value(first + quad * 4 + index) for index in range(4)]
                barriers.send(target, barrier, rank, four)

    def _gathered(self, lane: Expr, m: int, unit: Expr, value: Sum) -> Sum:
        """Add the other blocks' sums to this thread's, in the order of their ranks."""
        count, first = self.geo.accumulators, m * self.geo.accumulators
        barriers.wait(self.arrived.ptr_to([unit // self.slices]), 0)
        total, part = b.local(count, "float32"), b.local(4, "float32")
        if self.slices * self.turns > 2:
            self._add_in_order(lane, unit, total, part, lambda index: value(first + index))
            return lambda register: total[register - first]
        for index in range(count):
            b.store(total, value(first + index), index)
        for sender in range(self.slices - 1):
            for quad in range(count // 4):
                with b.vector(4) as v:
                    source = self.sums[unit // self.slices, sender, quad, lane, v]
                    b.store(part, source, v)
                for index in range(4):
                    b.store(total, total[quad * 4 + index] + part[index], quad * 4 + index)
        return lambda register: total[register - first]

    def _add_in_order(self, lane: Expr, unit: Expr, total: Any, part: Any, own: Sum) -> None:
        """Add all blocks' sums of a unit; ``own`` returns this thread's, one slice after another."""
        for rank in range(self.slices):
            mine = self.grid.slice == rank
            sender = b.keep(T.min(rank - T.Cast("int32", self.grid.slice < rank), self.slices - 2))
            for turn in range(self.turns):
                for quad in range(self.geo.accumulators // 4):
                    with b.vector(4) as v:
                        source = self.sums[unit // self.slices, sender * self.turns + turn, quad, lane, v]
                        b.store(part, source, v)
                    for index in range(4):
                        at = quad * 4 + index
                        value = T.Select(mine, own(turn * self.spec.sums + at), part[index])
                        b.store(total, value if rank == turn == 0 else total[at] + value, at)


QUAD_BYTES = 32 * 4 * 4
"""Bytes of four sums of each lane of a warp: of sixteen weight rows by eight activation rows."""


class ColumnSums(ClusterSums):
    """Sums of which each block finishes some activation rows, by eights that follow each other."""

    def _extents(self) -> tuple[int, ...]:
        warps = self.spec.schedule.warps
        return warps, self.geo.m64, self.sets, len(self._eights(0)), warps

    def _eights(self, rank: int) -> range:
        """Return the eights of activation rows that the block of a rank finishes: the first have one more."""
        each, more = divmod(self.spec.schedule.tile_m // 8, self.slices)
        first = rank * each + min(rank, more)
        return range(first, first + each + (rank < more))

    def initialise(self) -> None:
        """Let the barrier of every warp of this block expect the other blocks' sums; one thread."""
        own = T.uint32(0)
        for rank in range(self.slices):
            size = self.sets * self.geo.m64 * len(self._eights(rank)) * QUAD_BYTES
            own = T.Select(self.grid.slice == rank, T.uint32(size), own)
        own = b.bind(own)
        for warp in range(self.spec.schedule.warps):
            barrier = self.arrived.ptr_to([warp])
            barriers.initialise(barrier)
            barriers.expect(barrier, own)

    def finish(self, who: MathThread, value: Sum, store: Store) -> None:
        warp, own = b.keep(who.group * 4 + who.warp), self.grid.slice
        self.meet()
        for rank in range(self.slices):
            with b.when(own != rank):
                self._send_to(rank, who.lane, warp, value)
        for rank in range(self.slices):
            with b.when(own == rank):
                barriers.wait(self.arrived.ptr_to([warp]), 0)
                eights = self._eights(rank)
                for m in range(self.geo.m64):
                    total = self._total(rank, who.lane, warp, m, value)
                    store(m, total, range(8 * eights.start, 8 * eights.stop))

    def _send_to(self, rank: int, lane: Expr, warp: Expr, value: Sum) -> None:
        """Send the warp's sums of the rows that the block of a rank finishes."""
        # A block's place among the senders leaves the owner out.
        place = b.keep(self.grid.slice - T.Cast("int32", self.grid.slice > rank))
        block = b.keep(rank * self.spec.schedule.cluster + self.grid.member)
        barrier, eights = self.arrived.ptr_to([warp]), self._eights(rank)
        for m in range(self.geo.m64):
            for turn in range(self.turns):
                first = turn * self.spec.sums + m * self.geo.accumulators
                for at, eight in enumerate(eights):
                    target = self.sums.ptr_to([warp, m, place * self.turns + turn, at, lane, 0])
                    four = [value(first + eight * 4 + index) for index in range(4)]
                    barriers.send(target, barrier, block, four)

    def _total(self, rank: int, lane: Expr, warp: Expr, m: int, value: Sum) -> Sum:
        """Add all blocks' sums of a row tile, in the order of their ranks, in the block of a rank."""
        eights, first = self._eights(rank), m * self.geo.accumulators
        total, part = b.local(4 * len(eights), "float32"), b.local(4, "float32")
        sets = [(sender, turn) for sender in range(self.slices) for turn in range(self.turns)]
        for sender, turn in sets:
            place = (sender - (sender > rank)) * self.turns + turn
            for at, eight in enumerate(eights):
                if sender != rank:
                    with b.vector(4) as v:
                        b.store(part, self.sums[warp, m, place, at, lane, v], v)
                for index in range(4):
                    own = value(turn * self.spec.sums + first + 4 * eight + index)
                    one, to = own if sender == rank else part[index], 4 * at + index
                    b.store(total, one if sender == turn == 0 else total[to] + one, to)
        return lambda register: total[register - first - 4 * eights.start]
