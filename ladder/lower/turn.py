"""One thread at a time inside TVM; others may build meanwhile while a device compiler runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ladder.forks import renewed

_turn = renewed(threading.Lock())
_mine = threading.local()


@contextmanager
def tvm_turn() -> Iterator[None]:
    """Hold TVM: emission and passes of two kernels never run at once."""
    with _turn:
        _mine.held = True
        try:
            yield
        finally:
            _mine.held = False


@contextmanager
def yielded_turn() -> Iterator[None]:
    """Let other threads use TVM while this one, if it has the turn, waits for another program."""
    held = getattr(_mine, "held", False)
    if held:
        _turn.release()
    try:
        yield
    finally:
        if held:
            _turn.acquire()
