"""Which access happened before which: vector clocks per warp, and who touched each byte last.

Every warp counts its own *epochs*; a synchronisation hands what a warp knows about the epochs of
others to whoever waits for it. Two accesses of the same byte, at least one of them a write, race
unless the later one's warp knows the epoch of the earlier. Asynchronous copies and products are
agents of their own whose epochs only a wait makes known, so what is read too early is found
whatever the order in which warps ran. The method is FastTrack's (Flanagan, Freund, PLDI 2009),
with whole warps as threads; lanes of one warp are told apart within an epoch: what one stores
another may read after ``__syncwarp`` or a wider barrier, and what one has read another may
overwrite after any instruction that all lanes execute together (``.sync.aligned``) as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ladder.simulate.findings import Log
from ladder.simulate.values import Array

NEVER = -1
ASYNC_LANE = -1
"""Lane of accesses that no thread makes itself."""

BARRIERS_PER_BLOCK = 40


@dataclass(frozen=True)
class Agents:
    """Places in a vector clock: the warps of a cluster and its asynchronous agents.

    warps: Warps of a block.
    blocks: Blocks of a cluster.
    """

    warps: int
    blocks: int

    @property
    def all_warps(self) -> int:
        """Warps of a cluster; their own places come first."""
        return self.warps * self.blocks

    @property
    def readers(self) -> int:
        """Agents that read shared memory: warps, and the matrix products and tensor stores of warpgroups."""
        return self.all_warps + 2 * -(-self.all_warps // 4)

    def products(self, warp: Array) -> Array:
        """Return the agent of the products of a warp's warpgroup; ``warp`` within the cluster."""
        return self.all_warps + warp // 4

    def stores(self, warp: Array) -> Array:
        """Return the agent of the tensor stores of a warp's warpgroup; ``warp`` within the cluster."""
        return self.all_warps + -(-self.all_warps // 4) + warp // 4

    def copies(self, warp: Array) -> Array:
        """Return the agent of a warp's asynchronous copies."""
        return self.readers + warp

    @property
    def barriers(self) -> int:
        """First agent of bulk copies, one for each barrier that they complete at."""
        return self.readers + self.all_warps

    @property
    def count(self) -> int:
        """Places in a clock."""
        return self.barriers + BARRIERS_PER_BLOCK * self.blocks


class Clocks:
    """Vector clocks: what each warp knows of the others.

    agents: Places in a clock.
    warps: Warps that are simulated together, whole clusters.
    """

    def __init__(self, agents: Agents, warps: int) -> None:
        self.agents = agents
        self.own = np.arange(warps) % agents.all_warps
        self.known = np.zeros((warps, agents.count), np.int32)
        self.known[np.arange(warps), self.own] = 1
        # Epochs that began with a synchronisation of the warp's lanes: of memory, and of execution only.
        self.lanes_synced = np.ones(warps, np.int32)
        self.lanes_met = np.ones(warps, np.int32)
        # Epochs up to which a warp's writes are visible to asynchronous reads (fence.proxy.async).
        self.fenced = np.zeros(warps, np.int32)

    def epoch(self, warps: Array) -> Array:
        return self.known[warps, self.own[warps]]

    def advance(self, warps: Array) -> None:
        """Begin a new epoch: what follows is not yet published."""
        self.known[warps, self.own[warps]] += 1

    def sync_lanes(self, warps: Array) -> None:
        """Order the accesses of a warp's lanes (bar.warp.sync and every wider barrier)."""
        self.advance(warps)
        self.lanes_synced[warps] = self.lanes_met[warps] = self.epoch(warps)

    def meet_lanes(self, warps: Array) -> None:
        """Note that all lanes have come here, as ``.sync.aligned`` instructions make sure."""
        self.advance(warps)
        self.lanes_met[warps] = self.epoch(warps)

    def fence_proxy(self, warps: Array) -> None:
        """Make writes so far visible to asynchronous reads."""
        self.fenced[warps] = self.epoch(warps)
        self.advance(warps)

    def published(self, warp: int, whole: bool) -> Array:
        """Return what an arrival of a warp hands on.

        If only some lanes arrive, accesses of the others after they last met are not included.
        """
        clock: Array = self.known[warp].copy()
        if not whole:
            clock[self.own[warp]] = self.lanes_met[warp] - 1
        return clock

    def learn(self, warps: Array, clock: Array) -> None:
        """Add what a synchronisation hands over, one row or one per warp."""
        self.known[warps] = np.maximum(self.known[warps], clock)


@dataclass(frozen=True)
class Actor:
    """Who accesses memory: for each access a warp, its agent, epoch and lane.

    warps: Warps whose knowledge counts.
    agents, epochs: Under which accesses are recorded.
    lanes: Lanes of the warps, or `ASYNC_LANE`.
    """

    warps: Array
    agents: Array
    epochs: Array
    lanes: Array


class Shadow:
    """Last writer and readers of every granule of the shared memory of all blocks.

    clocks: What warps know.
    granules: Granules of all blocks together.
    unit: Bytes per granule: no store is narrower.
    log: Where races go.
    """

    def __init__(self, clocks: Clocks, granules: int, unit: int, log: Log) -> None:
        self.clocks, self.unit, self.log = clocks, unit, log
        self.writer = np.zeros(granules, np.int32)
        self.written = np.full(granules, NEVER, np.int32)
        self.lane = np.zeros(granules, np.int8)
        self.statement = np.zeros(granules, np.int32)
        self.read = np.zeros((granules, clocks.agents.readers), np.int32)
        self.reader_statement = np.zeros(granules, np.int32)
        self.last_reader = np.zeros(granules, np.int32)
        self.reader_lane = np.zeros(granules, np.int8)

    def on_read(self, at: Array, actor: Actor, statement: int) -> None:
        """Check and record reads of granules ``at``; the actor's arrays broadcast against it."""
        written = self.written.take(at)
        if (written == NEVER).any():
            self._uninitialised(at, written, statement)
        self._check_writer(at, written, actor, statement, "reads")
        self.read[at, actor.agents] = actor.epochs
        self.reader_statement[at] = statement
        if actor.lanes.ndim:
            self.last_reader[at] = actor.agents
            self.reader_lane[at] = actor.lanes

    def on_write(self, at: Array, actor: Actor, statement: int) -> None:
        """Check and record writes of granules ``at``."""
        self._check_writer(at, self.written.take(at), actor, statement, "overwrites")
        self._check_readers(at, actor, statement)
        self.writer[at] = actor.agents
        self.written[at] = actor.epochs
        self.lane[at] = actor.lanes
        self.statement[at] = statement

    def _check_writer(self, at: Array, written: Array, actor: Actor, statement: int, verb: str) -> None:
        writer = self.writer.take(at)
        late = written > self.clocks.known[actor.warps, writer]
        mine = writer == self.clocks.own[actor.warps]
        apart = (
            mine & (written >= self.clocks.lanes_synced[actor.warps]) & (self.lane.take(at) != actor.lanes)
        )
        wrong = late | (apart & (actor.lanes != ASYNC_LANE))
        if wrong.any():
            self._report(at, wrong, actor, statement, f"{verb} bytes written by", self.statement)

    def _check_readers(self, at: Array, actor: Actor, statement: int) -> None:
        readers = self.clocks.agents.readers
        known = self.clocks.known[actor.warps, :readers]
        late = (self.read[at] > known).any(axis=-1)
        own = self.clocks.own[actor.warps]
        # Lanes of one warp: an instruction that all of them execute together orders reads before writes.
        mine = (self.last_reader.take(at) == own) & (self.reader_lane.take(at) != actor.lanes)
        apart = mine & (self.read[at, own] >= self.clocks.lanes_met[actor.warps])
        late = late | (apart & (actor.lanes != ASYNC_LANE))
        if late.any():
            self._report(at, late, actor, statement, "overwrites bytes read by", self.reader_statement)

    def check_proxy(self, at: Array, warps: Array, statement: int) -> None:
        """Report asynchronous reads of what threads stored without ``fence.proxy.async``."""
        agents = self.clocks.agents
        writer = self.writer.take(at)
        first = int(warps[0]) // agents.all_warps * agents.all_warps
        stored = (writer < agents.all_warps) & (self.written.take(at) != NEVER)
        if not stored.any():
            return
        fenced = self.clocks.fenced[first + np.minimum(writer, agents.all_warps - 1)]
        if (stored & (self.written.take(at) > fenced)).any():
            self.log.add("proxy", statement, "reads what threads stored without fence.proxy.async in between")

    def _report(
        self, at: Array, wrong: Array, actor: Actor, statement: int, what: str, others: Array
    ) -> None:
        where = np.unravel_index(int(np.argmax(wrong)), wrong.shape)
        place = int(np.broadcast_to(at, wrong.shape)[where])
        warp = int(np.broadcast_to(actor.warps, wrong.shape)[where])
        other = int(others[place])
        by = f"{self._agent_name(int(self.writer[place]))} in " if others is self.statement else ""
        message = f"warp {warp} {what} {by}{{other}}, and nothing orders the two"
        self.log.add("race", statement, message, f"{what} {other}", other)

    def _agent_name(self, agent: int) -> str:
        agents = self.clocks.agents
        if agent < agents.all_warps:
            return f"warp {agent}"
        if agent >= agents.barriers:
            return "an asynchronous copy whose barrier was not waited for"
        return f"cp.async of warp {agent - agents.readers} that was not waited for"

    def _uninitialised(self, at: Array, written: Array, statement: int) -> None:
        first = int(np.broadcast_to(at, written.shape)[written == NEVER][0])
        message = f"reads unit {first} of {self.unit} bytes of shared memory, which nothing wrote"
        self.log.add("unwritten bytes", statement, message)
