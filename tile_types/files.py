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
    part = final = path
    try:
        part, final = _places(path)
        yield part
        if part != final:
            part.replace(final)
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
