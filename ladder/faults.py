"""Handling of Ladder's own faults: raise them where tests run, else warn once and carry on.

A fault is an exception that nobody raised on purpose to refuse a program. `LADDER_STRICT=1` raises it;
otherwise the program runs on without what failed, and one warning names file and line.
"""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

from ladder import knobs
from ladder.installation import ladder_version
from ladder.interrupts import pass_on

ROOTS = ("ladder", "tile_types", "schedules", "targets")
"""The packages whose lines a fault is looked for in."""

HOW_TO_REPORT = (
    "This is a fault of Ladder. Please report it with this message, the program or its graph, and what"
    " `ladder doctor` prints; LADDER_STRICT=1 raises it with its traceback."
)


class LadderWarning(UserWarning):
    """Something runs another way than was asked for; the message says what, and why."""


def tolerated(error: Exception, what: str, place: str = "") -> str:
    """Return the reason to go on without something that failed, after one warning for its place.

    error: What was caught.
    what: What happens instead.
    place: As `place_of_fault` says, where the exception has no traceback any more.
    Raises Exception: ``error`` itself, under ``LADDER_STRICT``, and where a signal handler raised it.
    """
    if knobs.settings.strict:
        raise error
    pass_on(error)
    place = place or place_of_fault(error)
    reason = f"{what}, for a fault: {type(error).__name__} at {place}: {_first_line(error)}"
    warn_once(place, f"{reason}\n{HOW_TO_REPORT}")
    return reason


def place_of_fault(error: BaseException) -> str:
    """Return file and line of the innermost line of Ladder's in a traceback, else of its last line."""
    lines = [(frame.f_code.co_filename, number) for frame, number in traceback.walk_tb(error.__traceback__)]
    found = [(ours, number) for file, number in lines if (ours := _within_ladder(file))]
    file, number = [("an unknown line", 0), *lines, *found][-1]
    return f"{file}:{number}" if lines else file


def _within_ladder(filename: str) -> str:
    """Return a file of ours from its package on; empty for the files of others."""
    home = Path(__file__).parent.parent
    path = Path(filename)
    if path.is_relative_to(home) and path.relative_to(home).parts[0] in ROOTS:
        return path.relative_to(home).as_posix()
    return ""


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


_warned: set[str] = set()
"""Faults that were warned of once."""


def warn_once(key: str, message: str) -> None:
    """Give a `LadderWarning`, the first time in this process for ``key``."""
    if key not in _warned:
        _warned.add(key)
        warn(message)


def warn(message: str) -> None:
    """Give a `LadderWarning`, which names the version."""
    warnings.warn(f"{message} (ladder {ladder_version()})", LadderWarning, stacklevel=2)
