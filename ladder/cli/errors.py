"""How commands end that raise. Their errors' package loads numpy, so help does without this module."""

from __future__ import annotations

import logging

from ladder.cli import console
from ladder.cli.console import FAILED, USAGE
from tile_types.errors import (
    CheckpointError,
    ConversionError,
    DTypeError,
    LadderError,
    ParseError,
    ScheduleError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
)

BAD_INPUT = (
    CheckpointError,
    ConversionError,
    DTypeError,
    ParseError,
    ScheduleError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
)
"""What the user asked for cannot be; every other `LadderError` is a failure."""


def report(error: Exception) -> int:
    """Print one of our errors, or of the system's (a full disk), and return the exit code; raise others."""
    if isinstance(error, OSError):
        console.error(str(error))
        return FAILED
    if not isinstance(error, LadderError):
        raise error
    console.error(_one_line(error))
    return USAGE if isinstance(error, BAD_INPUT) else FAILED


def _one_line(error: LadderError) -> str:
    """Return an error's first line, or all of it if the user asked for detail."""
    text = str(error).strip()
    if logging.getLogger("ladder").isEnabledFor(logging.INFO):
        return text
    first, _, rest = text.partition("\n")
    return f"{first} [ladder --verbose shows the rest]" if rest.strip() else first
