"""The lock around TVM: one thread at a time emits kernels, and lowers those of GPUs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ladder.forks import renewed
from ladder.garbage import uncollected
from ladder.lower.tvm_import import import_tvm

_lock = renewed(threading.Lock())
_mine = threading.local()


@contextmanager
def tvm_lock() -> Iterator[None]:
    """Hold the lock, with TVM imported: two kernels are never emitted at once."""
    with _lock:
        if "tvm" not in sys.modules:
            with uncollected():
                import_tvm()
        _mine.held = True
        try:
            yield
        finally:
            _mine.held = False


@contextmanager
def tvm_unlocked() -> Iterator[None]:
    """Release the lock, if this thread holds it, while it waits for a device compiler."""
    held = getattr(_mine, "held", False)
    if held:
        _lock.release()
    try:
        yield
    finally:
        if held:
            _lock.acquire()
