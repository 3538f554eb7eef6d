"""Snapshots of tensors: one pass of native code tells whether any has changed in identity, shape or version.

Guards and plans check many tensors before each call: a model of 32 layers has 840. By calls of torch for each
fact of each tensor that takes as long as a GPU computes some layers. The pass (``snapshot.cpp``)
reads the same facts where torch keeps them, and only says whether any differs; where one does, and where the
pass is not there, callers compare fact by fact. It is compiled with the headers of Python and torch, beside
the program, when it is first of use.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Sequence
from operator import is_
from pathlib import Path
from typing import Any

import torch

from ladder.installation import cache_root
from ladder.runtime.cache import KernelCache, is_whole, placed

log = logging.getLogger("ladder.snapshot")

SOURCE = Path(__file__).with_name("snapshot.cpp")
COMPILERS = ("c++", "g++", "clang++")
OPTIONS = ("-std=c++20", "-O2", "-shared", "-fPIC")
LEAST_FOR_NATIVE = 16
"""Tensors, and objects, below which calls of torch and Python take no longer."""

DICTIONARIES_COUNT = sys.version_info < (3, 12)
"""Whether dictionaries hold the number of their last change."""


class Native:
    """The compiled pass: from the cache, or from a compiler that a thread waits for."""

    def __init__(self) -> None:
        self.library: ctypes.PyDLL | None = None
        """None as long as it is being compiled, and where it cannot be."""
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Load or compile the library, once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._make, name="ladder-snapshot", daemon=True)
            self._thread.start()

    def wait(self) -> bool:
        """Wait for what was begun; tell whether the library is there."""
        self.begin()
        assert self._thread is not None
        self._thread.join()
        return self.library is not None

    def _make(self) -> None:
        try:
            path = _path()
            if not is_whole(path):
                with KernelCache().building(path.stem):
                    if not is_whole(path):
                        _compile(path)
            self.library = _loaded(path)
        except (OSError, subprocess.SubprocessError) as error:
            log.info("tensors are compared fact by fact: %s", error)


def _path() -> Path:
    versions = (torch.__version__, sys.version, platform.machine())
    facts = "\0".join((SOURCE.read_text(encoding="utf-8"), *versions, *OPTIONS))
    return cache_root() / "native" / f"snapshot-{hashlib.sha256(facts.encode()).hexdigest()[:16]}.so"


def _compile(path: Path) -> None:
    """Compile the library.

    Raises OSError, SubprocessError if there is no compiler, or it fails.
    """
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        raise FileNotFoundError("there is no C++ compiler")
    home = Path(torch.__file__).parent
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_suffix(f".{os.getpid()}")
    headers = (f"-I{home / 'include'}", f"-I{sysconfig.get_path('include')}")
    libraries = (f"-L{home / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,{home / 'lib'}")
    command = [*placed(path, draft), compiler, *OPTIONS, *headers, str(SOURCE), "-o", str(draft)]
    quiet = subprocess.DEVNULL  # pipes would end with this process
    subprocess.run([*command, *libraries], check=True, start_new_session=True, stdout=quiet, stderr=quiet)


def _loaded(path: Path) -> ctypes.PyDLL:
    library = ctypes.PyDLL(str(path))
    library.ladder_snapshot.restype = ctypes.c_void_p
    library.ladder_snapshot.argtypes = (ctypes.py_object, ctypes.c_int)
    library.ladder_refer_to.argtypes = (ctypes.py_object, ctypes.py_object)
    if DICTIONARIES_COUNT:
        for function in (library.ladder_copy_versions, library.ladder_same_versions):
            function.argtypes = (ctypes.py_object, ctypes.c_void_p)
    library.ladder_holds.argtypes = (ctypes.c_void_p, ctypes.py_object)
    library.ladder_release.argtypes = (ctypes.c_void_p,)
    return library


NATIVE = Native()

Tensors = list[Any] | tuple[Any, ...]


class Taken:
    """What the pass keeps of tensors; whoever asks it holds it, so that it stays while another is taken."""

    _address: int | None

    def __init__(self, library: ctypes.PyDLL, tensors: list[torch.Tensor], versions: bool) -> None:
        self._library, self._address = library, None
        self._address = library.ladder_snapshot(tensors, versions)

    def holds(self, tensors: Tensors) -> bool:
        """Tell whether these are the tensors, and all are what they were."""
        return self._address is not None and bool(self._library.ladder_holds(self._address, tensors))

    def __del__(self) -> None:
        if self._address is not None:
            self._library.ladder_release(self._address)


class Snapshot:
    """Tensors as they were when they were last confirmed.

    They are not kept alive: another one that lies where one lay is told apart by all that is kept of it.
    Of few, or where one is no plain strided tensor, no snapshot is taken.

    versions: Whether it matters that they are written, too.
    """

    def __init__(self, *, versions: bool = False) -> None:
        self._versions = versions
        self._last: Taken | None = None
        self._renewals = self._asked = 0

    def holds(self, tensors: Tensors) -> bool:
        """Tell whether tensors are those, and what they were; False may also mean that this is not known."""
        last = self._last
        return last is not None and last.holds(tensors)

    def confirm(self, tensors: Tensors, exact: Callable[[], bool]) -> bool:
        """Tell whether tensors are what they are to be: where they are not known to be, by `exact`.

        A new snapshot is taken before that, so that it differs from what changes meanwhile.
        """
        if self.holds(tensors):
            return True
        taken = self._taken(tensors)
        same = exact()
        if same and taken is not None:
            self._last = taken
        return same

    def _taken(self, tensors: Tensors) -> Taken | None:
        """Take a snapshot; more and more seldom, for tensors may change from call to call."""
        if len(tensors) < LEAST_FOR_NATIVE:
            return None
        NATIVE.begin()
        library = NATIVE.library
        if library is None:
            return None
        self._asked += 1
        if not self._asked >> self._renewals:
            return None
        self._asked, self._renewals = 0, self._renewals + 1
        return Taken(library, [*tensors], self._versions) if all(map(_is_plain, tensors)) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether torch keeps all facts of a tensor, and none is a Python object's."""
    plain = type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    return plain and tensor.layout is torch.strided and not tensor.is_nested


class DictionaryVersions:
    """The versions of many dictionaries as they were when they were last confirmed.

    dictionaries: They are kept alive; of few, and where they count no changes, no versions are taken.
    """

    def __init__(self, dictionaries: Sequence[dict[Any, Any]]) -> None:
        self._dictionaries = tuple(dictionaries) if DICTIONARIES_COUNT else ()
        self._copied: Any = None
        if len(self._dictionaries) >= LEAST_FOR_NATIVE:
            NATIVE.begin()

    def confirm(self, exact: Callable[[], bool]) -> bool:
        """Tell whether dictionaries are what they are to be, as `Snapshot.confirm` does."""
        library, copied = NATIVE.library, self._copied
        if library is None or len(self._dictionaries) < LEAST_FOR_NATIVE:
            return exact()
        if copied is not None and library.ladder_same_versions(self._dictionaries, copied):
            return True
        copied = (ctypes.c_uint64 * len(self._dictionaries))()
        library.ladder_copy_versions(self._dictionaries, copied)
        same = exact()
        self._copied = copied if same else None
        return same


def refer_to(owners: tuple[Any, ...], parts: list[Any]) -> bool:
    """Tell whether what objects refer to is `parts`, as ``gc.get_referents`` gives it."""
    library = NATIVE.library
    if library is not None:
        return bool(library.ladder_refer_to(owners, parts))
    return identical(gc.get_referents(*owners), parts)


def identical(found: Sequence[Any], known: Sequence[Any]) -> bool:
    """Tell whether two lists, or tuples, hold the same objects."""
    return len(found) == len(known) and all(map(is_, found, known))
