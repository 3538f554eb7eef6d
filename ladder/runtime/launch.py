"""Launches of CPU kernels on the threads of torch's OpenMP library instead of TVM's.

Two pools of as many threads as there are cores take the cores from each other: workers of OpenMP spin some
milliseconds after each operator of torch, and TVM's threads yield their cores to them while they wait. So
kernels run on the threads that torch's operators run on (``launch.c``). The launch is compiled, without
headers of others, when the first kernel is loaded; where there is no compiler, or torch is built without
OpenMP, TVM's pool stays.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ladder.installation import cache_root
from ladder.lower.linking import host_linker
from ladder.runtime.cache import KernelCache, is_whole, placed
from tile_types.errors import MissingToolError

log = logging.getLogger("ladder.launch")

SOURCE = Path(__file__).with_name("launch.c")
OPTIONS = ("-O2", "-shared", "-fPIC", "-nostdlib")

LAUNCH = "__TVMBackendParallelLaunch"
"""What a kernel library that starts threads calls: the address of a function."""

OPENMP = ("GOMP_parallel", "omp_get_thread_num", "omp_in_parallel")
"""Functions of GNU's OpenMP library, which those of LLVM and Intel have too."""

TORCH_THREADS = "_ZN2at15get_num_threadsEv"
"""torch's function that returns its number of threads, in any thread."""


class _Facts(ctypes.Structure):
    """What ``launch.c`` calls ``ladder``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("parallel", "number", "nested", "torch", "other", "error")),
        ("threads", ctypes.c_int),
    )


class Launch:
    """The compiled launch, and what it was told.

    uses_openmp: Whether threads are torch's.
    """

    uses_openmp = True

    def __init__(self, library: ctypes.CDLL, functions: list[int]) -> None:
        self._address = _address(library.ladder_launch)
        self._facts = _Facts.in_dll(library, "ladder")
        self._facts.parallel, self._facts.number, self._facts.nested, self._facts.torch = functions[:4]
        self._facts.other, self._facts.error = functions[4:]
        self._alone = ctypes.PyDLL(library._name).ladder_alone

    def adopt(self, path: Path) -> None:
        """Let the kernels of a library that is loaded start threads by this launch."""
        try:
            library = ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            slot = ctypes.c_void_p.in_dll(library, LAUNCH)
        except (OSError, ValueError):  # it is not loaded by the system, or starts none
            return
        slot.value = self._address

    def use_threads(self, count: int) -> None:
        """Let kernels use so many threads; 0 means as many as torch's operators at each call."""
        self._facts.threads = count

    def leave_openmp(self) -> None:
        """Launch by TVM's pool from now on: a forked child may lack the threads of OpenMP's."""
        self.uses_openmp, self._facts.parallel = False, None

    def alone(self, entry: Callable[..., Any]) -> Callable[..., Any]:
        """Return a kernel that computes in the thread that calls it."""
        return in_one_thread(entry, self._alone)


def in_one_thread(entry: Callable[..., Any], limit: Callable[[int], Any]) -> Callable[..., Any]:
    """Return a kernel that computes in the thread that calls it.

    limit: Sets how many threads kernels of the calling thread use; 0 means all.
    """

    def run(*arguments: Any) -> None:
        limit(1)
        try:
            entry(*arguments)
        finally:
            limit(0)

    return run


def load(runtime: ctypes.CDLL) -> Launch | None:
    """Find or compile the launch; None where it cannot be, with a line in the log.

    runtime: TVM's, which launches where OpenMP may not.
    """
    import torch

    try:
        functions = [_openmp(name) for name in OPENMP]
        functions.append(_address(getattr(ctypes.CDLL(torch._C.__file__), TORCH_THREADS)))
        functions.append(_address(runtime.TVMBackendParallelLaunch))
        functions.append(_address(runtime.TVMFFIErrorSetRaisedFromCStr))
        return Launch(_compiled(), functions)
    except (AttributeError, MissingToolError, OSError, subprocess.SubprocessError) as error:
        log.info("kernels run on TVM's threads beside torch's: %s", error)
        return None


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def _openmp(name: str) -> int:
    """Return the function that torch calls: what all libraries see, else what torch brings."""
    import torch

    for library in (None, torch._C.__file__):
        if found := getattr(ctypes.CDLL(library), name, None):
            return _address(found)
    raise AttributeError(f"torch's OpenMP library has no {name}")


def _compiled() -> ctypes.CDLL:
    """Return the compiled launch: the cache's, or one of this process where the cache takes none.

    Raises MissingToolError, OSError, SubprocessError if it cannot be compiled.
    """
    facts = "\0".join((SOURCE.read_text(encoding="utf-8"), platform.machine(), *OPTIONS))
    path = cache_root() / "native" / f"launch-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with KernelCache().building(path.stem):
            if not is_whole(path):
                _compile(path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError) as error:
        log.info("no launch in %s (%s): it is compiled for this process alone", path.parent, error)
        with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
            _compile(Path(folder) / path.name)
            return ctypes.CDLL(str(Path(folder) / path.name))


def _compile(path: Path) -> None:
    draft = path.with_suffix(f".{os.getpid()}")
    compiler = host_linker()
    if compiler[-1] == "ld.lld":
        compiler = (*compiler[:-1], "cc")
    command = [*placed(path, draft), *compiler, *OPTIONS, str(SOURCE), "-o", str(draft)]
    subprocess.run(command, check=True, capture_output=True)
