"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

from tile_types.errors import ArtifactError, LadderError


@contextlib.contextmanager
def replacing(path: Path, error: type[LadderError] = ArtifactError, advice: str = "") -> Iterator[Path]:
    """Give a file to write, beside ``path``, which takes the place of ``path`` once all is written.

    Until then, and if writing fails, what was at ``path`` stays. Links are followed; a device or a pipe is
    written itself.

    path: The final place.
    error: What is raised if the system refuses.
    advice: What its message ends with.
    """
    with _beside(path, error, advice) as (part, final):
        yield part
        if part != final:
            part.replace(final)


def require_writable(path: Path) -> None:
    """Raise ArtifactError, before work that takes long, where `replacing` could not make the file."""
    with _beside(path, ArtifactError, "") as (part, final):
        if part != final:
            part.touch()


@contextlib.contextmanager
def _beside(path: Path, error: type[LadderError], advice: str) -> Iterator[tuple[Path, Path]]:
    """Give where to write and what that replaces; what is left there in the end goes."""
    part = final = path
    try:
        part, final = _places(path)
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
        return final.with_name(f".{secrets.token_hex(8)}.part"), final
    except (RuntimeError, ValueError) as cause:  # links in a circle, a zero byte
        raise OSError(str(cause)) from cause
