"""Schedules of attention for few query tokens, what they cost, and which is taken."""

from __future__ import annotations

from dataclasses import dataclass

from schedules.schedule import Schedule, check

FRAGMENT = 16
"""Keys of a matrix instruction."""

STEP_ROWS = 8
"""Rows of q (tokens times heads of a group) of a matrix instruction."""

WARP = 32

CLUSTERS = (1, 2, 4, 8, 16)
"""Blocks of a cluster."""


@dataclass(frozen=True)
class AttentionSchedule(Schedule):
    """How one launch walks the keys.

    Parameters
    ----------
    rows
        Rows of q that a block has: 8 or 16.
    warps
        Warps of a block: they take fragments of keys in turn.
    cluster
        Blocks that share the keys of a head, 1 to 16 (more than 8 not on every chip of an architecture).
    fragments
        Fragments of keys that a warp takes at a time.
    resident
        Blocks that a multiprocessor must be able to hold: limits registers.
    """

    rows: int = 8
    warps: int = 8
    cluster: int = 1
    fragments: int = 1
    resident: int = 1

    def __post_init__(self) -> None:
        check(self.rows in (8, 16), f"a block has 8 or 16 rows of q, got {self.rows}")
        check(1 <= self.warps <= 16, f"a block has 1 to 16 warps, got {self.warps}")
        check(self.cluster in CLUSTERS, f"clusters have {CLUSTERS} blocks, got {self.cluster}")
        check(self.fragments in (1, 2), f"a warp takes 1 or 2 fragments at a time, got {self.fragments}")

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return self.warps * WARP
