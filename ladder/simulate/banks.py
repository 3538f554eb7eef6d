"""Bank conflicts: how many passes through shared memory an instruction takes, and how few it could.

Shared memory has 32 banks of 4 bytes. Accesses of 4 bytes or less go in one pass, of 8 bytes in
two half-warps, of 16 bytes in four quarter-warps; lanes of a pass that read the same word share it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ladder.simulate.values import Array

if TYPE_CHECKING:
    from ladder.simulate.cohort import Cohort

BANKS = 32
WORD = 4


@dataclass
class Conflicts:
    """Passes of one statement.

    Parameters
    ----------
    instructions
        Warp instructions.
    passes
        Passes that they took.
    ideal
        Passes that they would take without conflicts.
    """

    instructions: int = 0
    passes: int = 0
    ideal: int = 0

    @property
    def extra(self) -> int:
        """Passes lost to conflicts."""
        return self.passes - self.ideal


class BankMeter:
    """Counts passes per statement; equal patterns of addresses are counted once and remembered."""

    def __init__(self) -> None:
        self.statements: dict[int, Conflicts] = {}
        self._known: dict[tuple[int, bytes], tuple[int, int]] = {}

    def count(self, c: Cohort, where: Array, width: int, statement: int) -> None:
        """Count the passes of accesses at bytes ``where[warps, 32]``."""
        first = where[:, :1] // (BANKS * WORD) * (BANKS * WORD)
        pattern = where - first
        if c.mask is not None:
            pattern = np.where(c.mask, pattern, -1)
        key = (width, pattern.astype(np.int32).tobytes())
        if key not in self._known:
            parts = [passes(row, width) for row in pattern]
            self._known[key] = (sum(p for p, _ in parts), sum(i for _, i in parts))
        taken, ideal = self._known[key]
        entry = self.statements.setdefault(statement, Conflicts())
        entry.instructions += c.count
        entry.passes += taken
        entry.ideal += ideal


def passes(addresses: Array, width: int) -> tuple[int, int]:
    """Return passes and the least possible ones of 32 lanes' accesses; -1 stands for no access."""
    phases = max(width // WORD, 1)
    taken = ideal = 0
    for lanes in addresses.reshape(phases, -1):
        used = lanes[lanes >= 0]
        if not used.size:
            continue
        words = np.unique((used[:, None] + np.arange(0, max(width, WORD), WORD)) // WORD)
        taken += int(np.bincount(words % BANKS).max())
        ideal += -(-words.size // BANKS)
    return taken, ideal
