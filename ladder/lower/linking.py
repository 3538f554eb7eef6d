"""The linker that makes libraries of kernels. Imports nothing of Ladder: a worker loads this file alone."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

COMPILERS = ("cc", "gcc", "clang")


def packaged_linker() -> tuple[str, ...] | None:
    """Return the command of the lld in package ``ziglang``; None unless its program is there.

    A folder of that name is a package too, as imports see it, whatever it holds.
    """
    found = importlib.util.find_spec("ziglang")
    folders = found.submodule_search_locations if found is not None else None
    if not any(Path(folder, name).is_file() for folder in folders or () for name in ("zig", "zig.exe")):
        return None
    return (sys.executable, "-m", "ziglang", "ld.lld")


def host_linker() -> tuple[str, ...]:
    """Return the command of a linker: ``CC``, a C compiler on PATH, else the packaged lld.

    Raises MissingToolError if there is none.
    """
    chosen = os.environ.get("CC")
    for name in (chosen,) if chosen else COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if not chosen and (packaged := packaged_linker()):
        return packaged
    raise _error("MissingToolError")(
        f"cannot link a kernel: {f'CC={chosen} is no program' if chosen else 'no C compiler is on PATH'};"
        " `pip install ziglang` brings a linker, or install gcc or clang"
    )


def link(library: str | Path, files: Sequence[str | Path], *, name: str = "") -> None:
    """Make a shared library of objects.

    name: What other libraries know it by.
    Raises MissingToolError without a linker, CompilerError if it fails.
    """
    command = host_linker()
    alone = command[-1] == "ld.lld"
    named = [f"-soname={name}" if alone else f"-Wl,-soname,{name}"] if name else []
    libraries = _c_libraries() if alone else ["-lm"]
    command = (*command, "-shared", *named, "-o", str(library), *map(str, files), *libraries)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise _error("CompilerError")(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _error(name: str) -> type[Exception]:
    """Return a class of errors, whose module is loaded only now."""
    return getattr(importlib.import_module("tile_types.errors"), name)  # type: ignore[no-any-return]


def _c_libraries() -> list[str]:
    """Return where this process has the libraries of C, whose names and versions objects take."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8")
    return sorted(set(re.findall(r"/\S*/lib[cm]\.so\.6$", mapped, re.MULTILINE)))
