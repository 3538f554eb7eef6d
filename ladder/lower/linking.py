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


def host_linker() -> tuple[str, ...]:
    """Return the command of a linker: ``CC``, a C compiler on PATH, else the packaged lld.

    Raises MissingToolError if there is none.
    """
    chosen = os.environ.get("CC")
    for name in (chosen,) if chosen else COMPILERS:
        if path := shutil.which(name):
            return (path,)
    if not chosen and importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "ld.lld")
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
