"""Bank conflicts: how many passes through shared memory an instruction takes, and how few it could.

Shared memory has banks of 4 bytes. A pass serves as many lanes as its bytes suffice for, of accesses of 4
bytes or less all that there are; lanes of a pass that read the same word share it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from ladder.simulate.threads import Threads
from ladder.simulate.values import LANES, Array

WORD = 4


@dataclass
class Conflicts:
    """Passes of one statement.

    instructions: Warp instructions.
    passes: Passes that they took.
    ideal: Passes that they would take without conflicts.
    """

    instructions: int = 0
    passes: int = 0
    ideal: int = 0

    @property
    def extra(self) -> int:
        """Passes lost to conflicts."""
        return self.passes - self.ideal


@dataclass(frozen=True)
class Banks:
    """The banks of a machine's shared memory.

    lanes: Lanes of a warp.
    count: Banks of 4 bytes; a pass moves a word of each.
    reads: Bytes that a lane reads at once -> lanes of each pass, where they do not follow each other.
    """

    lanes: int = LANES
    count: int = 32
    reads: Mapping[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def groups(self, width: int, is_read: bool) -> Array:
        """Return the lanes ``[passes, lanes]`` that each pass serves."""
        if is_read and width in self.reads:
            return np.array(self.reads[width])
        together = self.count * WORD // max(width, WORD)
        return np.arange(self.lanes).reshape(-1, min(together, self.lanes))

    def passes(self, addresses: Array, width: int, is_read: bool = True) -> tuple[int, int]:
        """Return the passes of one warp's accesses, and the least possible; -1 stands for no access."""
        taken = ideal = 0
        for lanes in addresses[self.groups(width, is_read)]:
            used = lanes[lanes >= 0]
            if not used.size:
                continue
            words = np.unique((used[:, None] + np.arange(0, max(width, WORD), WORD)) // WORD)
            taken += int(np.bincount(words % self.count).max())
            ideal += -(-words.size // self.count)
        return taken, ideal


class BankMeter:
    """Counts passes per statement; equal patterns of addresses are counted once and remembered."""

    def __init__(self, banks: Banks) -> None:
        self.banks = banks
        self.statements: dict[int, Conflicts] = {}
        self._known: dict[tuple[int, bool, bytes], tuple[int, int]] = {}

    def count(self, c: Threads, where: Array, width: int, statement: int, is_read: bool) -> None:
        """Count the passes of accesses at bytes ``where[warps, lanes]``."""
        row = self.banks.count * WORD
        pattern = where - where[:, :1] // row * row
        if c.mask is not None:
            pattern = np.where(c.mask, pattern, -1)
        key = (width, is_read, pattern.astype(np.int32).tobytes())
        if key not in self._known:
            parts = [self.banks.passes(warp, width, is_read) for warp in pattern]
            self._known[key] = (sum(p for p, _ in parts), sum(i for _, i in parts))
        taken, ideal = self._known[key]
        entry = self.statements.setdefault(statement, Conflicts())
        entry.instructions += c.count
        entry.passes += taken
        entry.ideal += ideal
