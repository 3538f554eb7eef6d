"""Tensor memory of the blocks that are simulated together: its words, who has them, and what is ordered.

As in `ladder.simulate.order`, warps know epochs of others. Loads and stores of a warp are an agent of
their own, known to the warp itself after ``tcgen05.wait``, to others after ``fence::before_thread_sync`` and
what hands it on; products are an agent that ``tcgen05.commit`` makes known. What a warp has been told counts
for its own accesses only after ``fence::after_thread_sync`` (PTX ISA, "tcgen05 memory consistency model").
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ladder.simulate.hardware import Hardware
from ladder.simulate.order import NEVER
from ladder.simulate.values import Array

ROWS, COLUMNS = 128, 512
"""Lanes and columns of 32-bit words."""

PART = 16
"""Lanes whose accesses are told apart: those of the narrowest access."""


@dataclass(frozen=True)
class Access:
    """Who accesses words of a block: the warp, its agent and the agent's epoch.

    ``follows`` says whether it comes after reads by earlier products of its thread, whether committed or not.
    """

    warp: int
    agent: int
    epoch: int
    statement: int
    follows: bool = True


class TensorMemory:
    """Tensor memory, one per block.

    machine: What the blocks run on.
    """

    def __init__(self, machine: Hardware) -> None:
        self.machine = machine
        blocks, clocks = machine.blocks, machine.memory.clocks
        # NaN as float16, bfloat16 and float32.
        self.words = np.full((blocks, ROWS, COLUMNS), 0xFFFFFFFF, np.uint32)
        self.taken = np.zeros((blocks, COLUMNS), np.bool_)
        self.gives_up = np.zeros(blocks, np.bool_)
        granules = (blocks, ROWS // PART, COLUMNS)
        self.writer = np.zeros(granules, np.int32)
        self.written = np.full(granules, NEVER, np.int32)
        self.read = np.zeros((*granules, machine.memory.agents.count), np.int32)
        self.statement = np.zeros(granules, np.int32)
        self.started = np.zeros(len(clocks.own), np.int32)
        self.waited = np.zeros(len(clocks.own), np.int32)
        self.products = np.zeros(len(clocks.own), np.int32)
        self.group = 0
        # Of each column: the agent that allocated it, and that agent's epoch.
        self.giver = np.zeros((blocks, COLUMNS), np.int32)
        self.given = np.zeros((blocks, COLUMNS), np.int32)
        # What a warp knew at its last fence::after_thread_sync.
        self.seen = np.zeros_like(clocks.known)

    @staticmethod
    def of(machine: Hardware) -> TensorMemory:
        """Return the machine's tensor memory, made when it is first used."""
        found = machine.extras.get("tensor memory")
        if found is None:
            found = machine.extras["tensor memory"] = TensorMemory(machine)
            machine.at_end.append(found.check_freed)
        assert isinstance(found, TensorMemory)
        return found

    def use(self, group: int, statement: int) -> None:
        """Note for how many blocks a call says that it is: all calls of a kernel must say the same."""
        self.group = self.group or group
        if group != self.group:
            text = f"cta_group::{group} in a kernel that uses cta_group::{self.group}"
            self.machine.log.add("barrier", statement, text)

    # ---- who may access ----------------------------------------------------------------------------
    def own_access(self, warp: int, statement: int) -> Access:
        """Return a load or store of a warp, which it has not waited for yet."""
        self.started[warp] += 1
        memory = self.machine.memory
        agent = int(memory.agents.copies(memory.clocks.own[warp]))
        return Access(warp, agent, int(self.started[warp]), statement)

    def product(self, warp: int, statement: int, follows: bool = True) -> Access:
        """Return a product (or copy) that a warp starts, which the next commit will cover."""
        memory = self.machine.memory
        agent = int(memory.agents.products(memory.clocks.own[warp]))
        return Access(warp, agent, int(self.products[warp]) + 1, statement, follows)

    def fence_before(self, warps: Array) -> None:
        """Let what warps hand on from here include their loads and stores."""
        clocks = self.machine.memory.clocks
        clocks.known[warps, self.machine.memory.agents.copies(clocks.own[warps])] = self.waited[warps]

    def fence_after(self, warps: Array) -> None:
        """Let accesses of warps from here on come after what they have been told."""
        self.seen[warps] = self.machine.memory.clocks.known[warps]

    def on_read(self, block: int, parts: Array, columns: Array, access: Access) -> None:
        """Check and record a read of ``parts x columns``."""
        at = np.ix_(np.array([block]), parts, columns)
        if not self._exists(block, columns, access):
            return
        if (self.written[at] == NEVER).any():
            self._add("uninitialised", access, "reads tensor memory that nothing wrote")
        self._check(at, access, "reads", readers=False)
        self.read[(*at, np.array(access.agent))] = access.epoch

    def on_write(self, block: int, parts: Array, columns: Array, access: Access) -> None:
        """Check and record a write of ``parts x columns``."""
        at = np.ix_(np.array([block]), parts, columns)
        if not self._exists(block, columns, access):
            return
        self._check(at, access, "overwrites", readers=True)
        self.writer[at], self.written[at] = access.agent, access.epoch
        self.statement[at] = access.statement

    def _exists(self, block: int, columns: Array, access: Access) -> bool:
        if columns.max() < COLUMNS and self.taken[block, columns].all():
            self._check_given(block, columns, access)
            return True
        text = f"columns {int(columns.min())} to {int(columns.max())} of tensor memory are not allocated"
        self._add("out of bounds", access, text)
        return False

    def _check_given(self, block: int, columns: Array, access: Access) -> None:
        """Report columns whose allocation an access does not come after, by the rules of other accesses."""
        giver, given = self.giver[block, columns], self.given[block, columns]
        clocks = self.machine.memory.clocks
        own = int(self.machine.memory.agents.copies(clocks.own[access.warp]))
        for known, kind, reason in (
            (clocks.known[access.warp], "race", "and nothing orders the two"),
            (self.seen[access.warp], "asynchronous", "without tcgen05.fence::after_thread_sync since"),
        ):
            if ((given > known[giver]) & (giver != own)).any():
                self._add(kind, access, f"uses columns that another warp allocated, {reason}")
                return

    def _check(self, at: tuple[Array, ...], access: Access, verb: str, *, readers: bool) -> None:
        """Report what an access does not come after: the last write, and where it writes, reads."""
        told = self.machine.memory.clocks.known[access.warp].copy()
        seen = self.seen[access.warp].copy()
        agents = self.machine.memory.agents
        own = int(agents.copies(self.machine.memory.clocks.own[access.warp]))
        told[own] = seen[own] = self.waited[access.warp]
        read_before = told.copy(), seen.copy()
        if access.agent != own:  # products of one thread follow each other, those not committed too
            told[access.agent] = seen[access.agent] = access.epoch
        if access.follows:
            read_before = told, seen
        writer, written = self.writer[at], self.written[at]
        for known, reads, kind, reason in (
            (told, read_before[0], "race", "and nothing orders the two"),
            (
                seen,
                read_before[1],
                "asynchronous",
                "without tcgen05.fence::after_thread_sync since it was told",
            ),
        ):
            if (written > known[writer]).any():
                where = int(self.statement[at][written > known[writer]][0])
                self._add(kind, access, f"{verb} tensor memory written by {{other}}, {reason}", where)
                return
            if readers and (self.read[at] > reads).any():
                self._add(kind, access, f"{verb} tensor memory that others still read, {reason}")
                return

    def _add(self, kind: str, access: Access, message: str, other: int = -1) -> None:
        text = f"warp {access.warp} {message}"
        self.machine.log.add(kind, access.statement, text, message, other)

    # ---- allocation --------------------------------------------------------------------------------
    def allocate(self, block: int, columns: int, warp: int, statement: int) -> int:
        """Give a block columns, for a warp of it; return the first."""
        log = self.machine.log
        if columns < 32 or columns & (columns - 1) or columns > COLUMNS:
            log.add("out of bounds", statement, f"{columns} columns: a power of two from 32 to {COLUMNS}")
            columns = COLUMNS
        if self.gives_up[block]:
            log.add("barrier", statement, "a block allocates after relinquish_alloc_permit")
        free = np.flatnonzero(~self.taken[block].reshape(-1, columns).any(axis=1))
        if not free.size:
            log.add("deadlock", statement, f"a block waits for ever for {columns} columns of tensor memory")
            return 0
        first = int(free[0]) * columns
        which = slice(first, first + columns)
        access = self.own_access(warp, statement)
        self.waited[warp] = self.started[warp]  # the warp itself has them at once
        self.taken[block, which], self.giver[block, which] = True, access.agent
        self.given[block, which] = access.epoch
        return first

    def free(self, block: int, first: int, columns: int, access: Access) -> None:
        """Take columns back, which nobody may use any more."""
        every, which = np.arange(ROWS // PART), np.arange(first, first + columns)
        if not self._exists(block, which, access):
            return
        self._check(np.ix_(np.array([block]), every, which), access, "frees", readers=True)
        self.taken[block, which] = False

    def check_freed(self) -> None:
        """Report columns that a block kept."""
        if self.taken.any():
            text = f"a block ends with {int(self.taken.sum(axis=1).max())} columns of tensor memory allocated"
            self.machine.log.add("barrier", -1, text)
