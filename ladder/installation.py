"""Where things are on this machine: versions, the cache folder, TVM's runtime libraries.

Imports nothing heavy, so that every layer may ask.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
from functools import cache
from pathlib import Path

from ladder import knobs
from tile_types.errors import MissingToolError

DISTRIBUTION = "apache-tvm"


def cache_root() -> Path:
    """Return the cache folder: LADDER_CACHE_DIR, else ``ladder`` in the user's cache folder."""
    configured = knobs.settings.cache_dir
    if configured is not None:
        return configured
    if os.environ.get("XDG_CACHE_HOME"):
        return Path(os.environ["XDG_CACHE_HOME"]) / "ladder"
    import platformdirs

    return Path(platformdirs.user_cache_dir("ladder", appauthor=False))


def installed_version(distribution: str, otherwise: str) -> str:
    """Return the version of an installed distribution, or ``otherwise``.

    Reads the one line: ``importlib.metadata.version`` parses a distribution's whole description.
    """
    try:
        text = importlib.metadata.distribution(distribution).read_text("METADATA") or ""
    except importlib.metadata.PackageNotFoundError:
        return otherwise
    stated = re.search(r"^Version: *(.+)$", text, re.MULTILINE)
    return stated[1].strip() if stated else importlib.metadata.version(distribution)


@cache
def ladder_version() -> str:
    """Return the version of the installed distribution, ``"0+source"`` in a bare source tree."""
    return installed_version("ladder-compiler", "0+source")


@cache
def tvm_version() -> str:
    """Return the version of the TVM runtime in use, without importing it.

    ``LADDER_RUNTIME_DIR`` may point at a bare copy; then its ``VERSION`` file counts.
    """
    directory = knobs.settings.runtime_dir
    if directory is not None and (directory / "VERSION").is_file():
        return (directory / "VERSION").read_text().strip()
    return installed_version(DISTRIBUTION, "unknown")


def _candidates() -> list[Path]:
    """Return folders that may hold the runtime libraries, best first."""
    if knobs.settings.runtime_dir is not None:
        return [knobs.settings.runtime_dir]
    folders = []
    # A source build has no distribution; then its package tells the folder.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        folders.append(Path(str(importlib.metadata.distribution(DISTRIBUTION).locate_file("tvm/lib"))))
    try:
        spec = importlib.util.find_spec("tvm")
    except (ImportError, ValueError):
        spec = None
    for location in (spec.submodule_search_locations or ()) if spec else ():
        folders += [Path(location) / "lib", Path(location).parents[1] / "build" / "lib"]
    return folders


def find_library(name: str) -> Path:
    """Return the path of one of the runtime's shared libraries.

    Raises MissingToolError if it is in none of the known places.
    """
    folders = _candidates()
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    places = ", ".join(map(str, folders)) or f"no {DISTRIBUTION} distribution is installed"
    raise MissingToolError(
        f"{name} not found (looked in: {places}); install {DISTRIBUTION}, or set LADDER_RUNTIME_DIR"
        " to a folder that holds it"
    )
