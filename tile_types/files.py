"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from tile_types.errors import ArtifactError, LadderError

PART = re.compile(r"\.[0-9a-f]{16}\.part")
"""How the name of a file ends that is being written."""

MOST_NAME = 255
"""Bytes that the name of a file has at most."""


@contextlib.contextmanager
def replacing(
    path: Path,
    error: type[LadderError] = ArtifactError,
    advice: str = "",
    folder: bool = False,
    lasting: bool = False,
) -> Iterator[Path]:
    """Give a file to write, beside ``path``, which takes the place of ``path`` once all is written.

    Until then, and if writing fails, what was at ``path`` stays. Links are followed; a device or a pipe is
    written itself. What killed processes had begun to write for ``path`` is removed: no process holds
    its lock.

    path: The final place.
    error: What is raised if the system refuses.
    advice: What its message ends with.
    folder: Whether the folder is made if it is not there.
    lasting: Whether the disk must have all of it before it takes that place: a loss of power, too,
        then leaves one of both, and disks that say late that they are full are heard.
    """
    with _beside(path, error, advice, folder) as (part, final):
        yield part
        if part != final:
            if lasting:
                _sync(part)
            part.replace(final)


def _sync(part: Path) -> None:
    descriptor = os.open(part, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_writable(path: Path) -> None:
    """Raise ArtifactError, before work that takes long, where `replacing` could not make the file."""
    with _beside(path, ArtifactError):
        pass


@contextlib.contextmanager
def _beside(
    path: Path, error: type[LadderError], advice: str = "", folder: bool = False
) -> Iterator[tuple[Path, Path]]:
    """Give where to write and what that replaces; what is left there in the end goes."""
    part = final = path
    with contextlib.ExitStack() as held:
        try:
            part, final = _places(path)
            if folder:
                final.parent.mkdir(parents=True, exist_ok=True)
            if part != final:
                _sweep(part, final)
                held.callback(os.close, _locked(part))
            yield part, final
        except OSError as cause:
            raise error(f"cannot write {path}: {cause.strerror or cause}{advice}") from cause
        finally:
            if part != final:
                with contextlib.suppress(OSError):
                    part.unlink()


def _places(path: Path) -> tuple[Path, Path]:
    """Return where to write and what that replaces, the same for what is no regular file."""
    try:
        final = path.resolve()
        if final.is_dir():
            raise IsADirectoryError("it is a folder")
        if final.exists() and not final.is_file():
            return final, final
        return final.with_name(_stem(final) + f".{secrets.token_hex(8)}.part"), final
    except (RuntimeError, ValueError) as cause:  # links in a circle, a zero byte
        raise OSError(str(cause)) from cause


def _stem(final: Path) -> str:
    """Return how the names of files begin that are to replace a file: hidden, as long as names may be."""
    return "." + os.fsdecode(os.fsencode(final.name)[: MOST_NAME - len(".0123456789abcdef.part") - 1])


def _locked(part: Path) -> int:
    """Make a file and return its descriptor, which holds its lock where the file system has locks."""
    while True:
        descriptor = os.open(part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if part.exists():
            return descriptor
        os.close(descriptor)  # another process swept it before it was locked


def _sweep(part: Path, final: Path) -> None:
    """Remove files that were begun for the same place and that no process is writing."""
    stem = _stem(final)
    with contextlib.suppress(OSError), os.scandir(final.parent) as entries:
        for entry in entries:
            if entry.name.startswith(stem) and PART.fullmatch(entry.name, len(stem)):
                _remove_abandoned(entry.path)


def _remove_abandoned(path: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        finally:
            os.close(descriptor)
