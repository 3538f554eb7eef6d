"""What importing TVM waits for, done beside the choice of a plan.

TVM's import meets errors of its own libraries and goes on. The first error of a process reads and sorts the
symbols of all its libraries, torch's too, for a backtrace: half of the import's time, for which Python's lock
is not needed. So a thread asks for a backtrace earlier.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from ladder.runtime.library import RUNTIME

LIBRARIES = {RUNTIME: ctypes.RTLD_GLOBAL, "libtvm_compiler.so": ctypes.RTLD_LOCAL}
"""Libraries of TVM in the order and mode in which its import loads them: backtraces name their functions."""


@contextlib.contextmanager
def compiler_beside() -> Iterator[None]:
    """Prepare for the import of TVM while the block runs, unless TVM is imported already."""
    if "tvm" in sys.modules:
        yield
        return
    thread = threading.Thread(target=_read_symbols, name="ladder-symbols", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join()


def _read_symbols() -> None:
    """Have the symbols of all libraries read; what is missing is left to the import, which says so."""
    with contextlib.suppress(ImportError, OSError, AttributeError, ValueError):
        from tvm_ffi.libinfo import find_libtvm_ffi

        found = find_spec("tvm")
        for folder in map(Path, found.submodule_search_locations or () if found else ()):
            for name, mode in LIBRARIES.items():
                ctypes.CDLL(str(folder / "lib" / name), mode)
        backtrace = ctypes.CDLL(find_libtvm_ffi()).TVMFFIBacktrace
        backtrace.argtypes = ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_int
        backtrace.restype = ctypes.c_void_p
        backtrace(None, 0, None, 0)
