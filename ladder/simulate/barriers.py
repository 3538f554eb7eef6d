"""Barriers: of a block, of a cluster, and mbarriers with their counts of arrivals and bytes.

A barrier hands on what everyone who arrived knew (`ladder.simulate.order`). Semantics: PTX ISA,
"bar", "barrier.cluster", "mbarrier".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.findings import Log
from ladder.simulate.memory import Memory
from ladder.simulate.order import ASYNC_LANE, BARRIERS_PER_BLOCK, Actor
from ladder.simulate.threads import Threads
from ladder.simulate.values import WITHIN, Array, Value


class GroupBarrier:
    """A barrier that all warps of a group pass together, again and again.

    memory, blocks: Memory of the blocks that are simulated together, and their number.
    warps: Warps of a group.
    name: How findings call it.
    """

    def __init__(self, memory: Memory, blocks: int, warps: int, name: str) -> None:
        self.clocks, self.warps, self.name = memory.clocks, warps, name
        every = blocks * memory.agents.warps
        groups = every // warps
        self.arrived = np.zeros(groups, np.int64)
        self.passed = np.zeros(groups, np.int64)
        self.clock = np.zeros((groups, memory.agents.count), np.int32)
        self.released = np.zeros_like(self.clock)
        self.target = np.zeros(every, np.int64)

    def arrive(self, c: Threads, statement: int) -> None:
        """Count a cohort's warps in, and let those pass whose group is complete."""
        c.require_whole(self.name, statement)
        clocks = self.clocks
        group = c.warps // self.warps
        self.target[c.warps] = self.passed[group] + 1
        np.maximum.at(self.clock, group, clocks.known[c.warps])
        clocks.sync_lanes(c.warps)
        np.add.at(self.arrived, group, 1)
        done = np.flatnonzero(self.arrived == self.warps)
        self.released[done] = self.clock[done]
        self.clock[done] = 0
        self.passed[done] += 1
        self.arrived[done] = 0

    def ready(self, c: Threads) -> Array:
        ready: Array = self.passed[c.warps // self.warps] >= self.target[c.warps]
        return ready

    def complete(self, c: Threads) -> None:
        """Hand on what the group knew."""
        clocks = self.clocks
        clocks.learn(c.warps, self.released[c.warps // self.warps])
        clocks.sync_lanes(c.warps)

    def describe(self, c: Threads) -> str:
        group = c.warps // self.warps
        stuck = group[self.passed[group] < self.target[c.warps]]
        return f"{self.name}: {self.arrived[stuck[0]]} of {self.warps} warps came"


class BlockBarrier(GroupBarrier):
    """``bar.sync 0``."""

    def __init__(self, memory: Memory, blocks: int) -> None:
        super().__init__(memory, blocks, memory.agents.warps, "the block's barrier")


class ClusterBarrier(GroupBarrier):
    """``barrier.cluster``: arriving and waiting may be apart."""

    def __init__(self, memory: Memory, blocks: int) -> None:
        super().__init__(memory, blocks, memory.agents.all_warps, "the cluster's barrier")


@dataclass
class GroupWait:
    """Wait for a barrier of a block or a cluster."""

    barrier: GroupBarrier
    statement: int

    def ready(self, c: Threads) -> Array:
        return self.barrier.ready(c)

    def complete(self, c: Threads) -> None:
        self.barrier.complete(c)

    def describe(self, c: Threads) -> str:
        return self.barrier.describe(c)


class NamedBarriers:
    """``bar.sync`` and ``bar.arrive`` with a number and a count of threads, of every block."""

    def __init__(self, memory: Memory, lanes: int) -> None:
        self.memory, self.lanes = memory, lanes
        self.arrived: dict[tuple[int, int], int] = {}
        self.expected: dict[tuple[int, int], int] = {}
        self.passed: dict[tuple[int, int], int] = {}
        self.clock: dict[tuple[int, int], Array] = {}
        self.released: dict[tuple[int, int], Array] = {}
        self.awaited: dict[int, tuple[tuple[int, int], int]] = {}

    def arrive(self, c: Threads, number: Value, threads: int, waits: bool, statement: int) -> None:
        """Count a cohort's warps in; those that wait go on when ``threads`` have come."""
        c.require_whole("a named barrier", statement)
        clocks = self.memory.clocks
        numbers = np.broadcast_to(np.asarray(number), (c.count, c.lanes))[:, 0].tolist()
        for warp, index in zip(c.warps.tolist(), numbers, strict=True):
            key = (warp // self.memory.agents.warps, index)
            if waits:
                self.awaited[warp] = key, self.passed.get(key, 0) + 1
            known = clocks.known[warp]
            self.clock[key] = np.maximum(self.clock[key], known) if key in self.clock else known.copy()
            self._count(key, threads, statement)
        clocks.sync_lanes(c.warps)

    def _count(self, key: tuple[int, int], threads: int, statement: int) -> None:
        before = self.arrived.get(key, 0)
        if before and self.expected[key] != threads:
            message = f"named barrier {key[1]} takes {self.expected[key]} threads, some say {threads}"
            self.memory.log.add("barrier", statement, message)
        self.expected[key], self.arrived[key] = threads, before + self.lanes
        if self.arrived[key] > threads:
            message = f"named barrier {key[1]} takes {threads} threads, more came"
            self.memory.log.add("barrier", statement, message)
        if self.arrived[key] >= threads:
            self.arrived[key] = 0
            self.passed[key] = self.passed.get(key, 0) + 1
            self.released[key] = self.clock.pop(key)


@dataclass
class NamedWait:
    """Wait at a named barrier; which one each warp waits at is in `NamedBarriers.awaited`."""

    owner: NamedBarriers
    statement: int

    def ready(self, c: Threads) -> Array:
        owner = self.owner
        goals = [owner.awaited[warp] for warp in c.warps.tolist()]
        return np.array([owner.passed.get(key, 0) >= goal for key, goal in goals])

    def complete(self, c: Threads) -> None:
        clocks = self.owner.memory.clocks
        for warp in c.warps.tolist():
            key, _ = self.owner.awaited.pop(warp)
            clocks.learn(np.array([warp]), self.owner.released[key])
        clocks.sync_lanes(c.warps)

    def describe(self, c: Threads) -> str:
        keys = {self.owner.awaited[warp][0] for warp in c.warps.tolist()}
        parts = [
            f"{number} of block {b} ({self.owner.arrived.get((b, number), 0)} came)" for b, number in keys
        ]
        return f"named barrier {', '.join(parts)}"


def _report(log: Log, message: str, statement: int, kind: str = "barrier") -> None:
    """Report a misuse, the same one once."""
    log.add(kind, statement, message, message.split(" gets ")[-1][:40])


class Mbarrier:
    """One mbarrier object.

    log, agents: Where findings go, and how many clocks there are.
    count: Arrivals of a phase.
    agent: Its place in the clocks of its cluster.
    name: How findings call it.
    """

    def __init__(self, log: Log, agents: int, count: int, agent: int, name: str) -> None:
        self.log, self.count, self.agent, self.name = log, count, agent, name
        self.pending, self.bytes, self.phase = count, 0, 0
        self.fenced, self.filled = False, 0
        self.statement = -1
        # What the phases that are over hand on, and what the arrivals so far will.
        self.clock = np.zeros(agents, np.int32)
        self.gathered = np.zeros_like(self.clock)

    def arrive(self, times: int, clock: Array, statement: int) -> None:
        """Count arrivals, which hand on what is known."""
        self.pending -= times
        self.statement = statement
        np.maximum(self.gathered, clock, out=self.gathered)
        if self.pending < 0:
            _report(self.log, f"{self.name} gets more arrivals than its count of {self.count}", statement)
            self.pending = 0
        self._turn()

    def expect(self, size: int) -> None:
        """Make the phase wait for bytes."""
        self.bytes += size

    def land(self, size: int) -> None:
        """Count bytes that a copy delivered."""
        self.filled = self.phase + 1
        self.bytes -= size
        self._turn()

    def _turn(self) -> None:
        if self.pending or self.bytes:
            return
        self.phase += 1
        self.pending = self.count
        self.clock = self.gathered.copy()
        self.clock[self.agent] = self.phase

    def passed(self, parity: int) -> bool:
        """Return whether the phase of a parity has completed (mbarrier.try_wait.parity)."""
        return (self.phase & 1) != parity

    def missing(self) -> str:
        """Return what the phase still needs."""
        parts = [f"{self.pending} of {self.count} arrivals"] * bool(self.pending)
        if self.bytes:
            more = f"{self.bytes} bytes more" if self.bytes > 0 else f"expect_tx of {-self.bytes} bytes"
            parts.append(more)
        return f"{self.name} in phase {self.phase} needs {' and '.join(parts) or 'a phase to complete'}"


class Mbarriers:
    """All mbarriers, by block and address; which one each warp waits for."""

    def __init__(self, memory: Memory, blocks: int) -> None:
        self.memory, self.blocks = memory, blocks
        self.table: dict[tuple[int, int], Mbarrier] = {}
        self.awaited: dict[int, tuple[Mbarrier, int]] = {}
        # What blocks did to each other: target block, agent and epoch, statement.
        self.visits: set[tuple[int, int, int, int]] = set()

    def report(self, message: str, statement: int, kind: str = "barrier") -> None:
        _report(self.memory.log, message, statement, kind)

    def create(self, block: int, address: int, count: int, statement: int) -> Mbarrier | None:
        address &= WITHIN
        agents = self.memory.agents
        if address % 8:
            self.report(f"an mbarrier at byte {address} is not aligned to 8", statement, "misaligned")
            return None
        inside = sum(1 for b, _ in self.table if b == block)
        agent = agents.barriers + block % agents.blocks * BARRIERS_PER_BLOCK + inside % BARRIERS_PER_BLOCK
        if (block, address) in self.table:
            self.report(f"the mbarrier at byte {address} is initialised twice", statement)
        barrier = Mbarrier(
            self.memory.log, agents.count, count, agent, f"mbarrier at byte {address} of block {block}"
        )
        self.table[block, address] = barrier
        return barrier

    def at(self, block: int, address: int, statement: int) -> Mbarrier | None:
        """Return an mbarrier, or report that there is none."""
        barrier = self.table.get((block, address))
        if barrier is None:
            self.report(f"byte {address} of block {block} holds no initialised mbarrier", statement)
        return barrier

    def reach(self, warp: int, block: int, address: int, statement: int) -> Mbarrier | None:
        """Return an mbarrier that a warp uses; its initialisation must be known to it."""
        address &= WITHIN
        memory, clocks = self.memory, self.memory.clocks
        if not 0 <= address <= memory.limit - 8:
            self.report(f"an mbarrier at byte {address} of shared memory of {memory.limit}", statement)
            return None
        flat = np.array([[block * memory.pitch + address]]) // memory.shadow.unit
        epoch = int(clocks.epoch(np.array([warp]))[0])
        agent = int(clocks.own[warp])
        actor = Actor(np.array(warp), np.array(agent), np.array(epoch), np.array(ASYNC_LANE))
        memory.shadow.on_read(flat, actor, statement)
        return self.at(block, address, statement)

    def visit(self, warp: int, block: int, statement: int) -> None:
        """Note an arrival at another block, which must not have ended before; copies are waited for."""
        if block != warp // self.memory.agents.warps:
            clocks = self.memory.clocks
            epoch = int(clocks.epoch(np.array([warp]))[0])
            self.visits.add((block, int(clocks.own[warp]), epoch, statement))

    def check_ended(self) -> None:
        """Report what was still under way when a block ended: copies, and visits of other blocks."""
        known = self.memory.clocks.known
        known = known.reshape(self.blocks, self.memory.agents.warps, -1).max(axis=1)
        for block, agent, epoch, statement in self.visits:
            if known[block, agent] < epoch:
                self.report("a block may have ended when another one reaches its memory", statement)
        for (block, _), barrier in self.table.items():
            if barrier.filled > known[block, barrier.agent]:
                message = (
                    f"a block ends without having waited for what arrives asynchronously at {barrier.name}"
                )
                self.report(message, barrier.statement)
        self._check_bytes()

    def _check_bytes(self) -> None:
        for barrier in self.table.values():
            if barrier.bytes:
                self.report(
                    f"the kernel ends while {barrier.missing()}: expect_tx and the bytes copied differ",
                    barrier.statement,
                )


@dataclass
class MbarrierWait:
    """Wait for the phase of a parity; `Mbarriers.awaited` says of which barrier each warp."""

    owner: Mbarriers
    statement: int

    def ready(self, c: Threads) -> Array:
        awaited = self.owner.awaited
        return np.array([w not in awaited or awaited[w][0].passed(awaited[w][1]) for w in c.warps.tolist()])

    def complete(self, c: Threads) -> None:
        clocks = self.owner.memory.clocks
        for warp in c.warps.tolist():
            if warp in self.owner.awaited:
                barrier, _ = self.owner.awaited.pop(warp)
                clocks.learn(np.array([warp]), barrier.clock)

    def describe(self, c: Threads) -> str:
        awaited = [self.owner.awaited[w] for w in c.warps.tolist() if w in self.owner.awaited]
        stuck = [barrier for barrier, parity in awaited if not barrier.passed(parity)]
        return stuck[0].missing() if stuck else "nothing"


def each_active(c: Threads, *values: Value) -> list[tuple[Any, ...]]:
    """Return ``(row, warp, lane, values...)`` of every active lane, as Python numbers."""
    rows, lanes = np.nonzero(c.active)
    spread = [np.broadcast_to(np.asarray(v), (c.count, c.lanes))[rows, lanes].tolist() for v in values]
    return list(zip(rows.tolist(), c.warps[rows].tolist(), lanes.tolist(), *spread, strict=True))
