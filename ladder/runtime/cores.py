"""How many processor cores this process may use."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Return on how many cores the system lets this process run, of those that the machine has."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1
