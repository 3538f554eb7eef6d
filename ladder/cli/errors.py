"""Messages and exit codes of commands that raise. It loads numpy, so ``--help`` does not import it."""

from __future__ import annotations

import errno
import logging
import traceback

from ladder.cli import console
from ladder.cli.console import FAILED, USAGE
from tile_types.errors import (
    ArtifactError,
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
    ArtifactError,
    CheckpointError,
    ConversionError,
    DTypeError,
    ParseError,
    ScheduleError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
)
"""What the user asked for cannot be, a file to read or write included; other `LadderError`s are failures."""

EXHAUSTED = (errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ENOSPC)
"""Errors of the system that no other request would have avoided."""


def report(error: Exception) -> int:
    """Print an error as one line and return the exit code.

    What is neither ours nor the system's, such as an error of the user's own module, is named with its
    place; if the user asked for detail, it is raised.
    """
    if isinstance(error, LadderError):
        console.error(_one_line(str(error)))
        exhausted = getattr(error.__cause__, "errno", None) in EXHAUSTED
        return USAGE if isinstance(error, BAD_INPUT) and not exhausted else FAILED
    if isinstance(error, OSError):
        console.error(_one_line(str(error)))
        return FAILED
    if _wants_detail():
        raise error
    last = traceback.extract_tb(error.__traceback__)[-1]
    name = type(error).__name__
    console.error(_one_line(f"{last.filename}:{last.lineno}: {name}: {str(error).strip()}\n(the traceback)"))
    return FAILED


def _wants_detail() -> bool:
    return logging.getLogger("ladder").isEnabledFor(logging.INFO)


def _one_line(text: str) -> str:
    """Return a message's first line, or all of it if the user asked for detail."""
    first, _, rest = text.strip().partition("\n")
    if _wants_detail() or not rest.strip():
        return text.strip()
    return f"{first} [ladder --verbose shows the rest]"
