"""Locks that a forked child finds free, and workers that end with their parent.

A child has only the thread that forked: a lock that another thread held at that moment would stay held there.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from typing import Any, TypeVar
from weakref import WeakSet

Lock = TypeVar("Lock", threading.Lock, threading.RLock)

_locks: WeakSet[Any] = WeakSet()


def renewed(lock: Lock) -> Lock:
    """Return the lock; in a child that is forked later it is free."""
    _locks.add(lock)
    return lock


def _renew() -> None:
    for lock in _locks:
        held_here = getattr(lock, "_is_owned", None)  # of RLocks
        if held_here is None or not held_here():
            lock._at_fork_reinit()


os.register_at_fork(after_in_child=_renew)


def follow_parent() -> None:
    """Let this worker process end where its parent does, however that is killed, and say nothing on Ctrl-C.

    To initialise pools: their workers hold the pipe that they wait at, and would wait for ever.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(multiprocessing.parent_process(),), daemon=True).start()


def _end_with(parent: Any) -> None:
    parent.join()
    os._exit(1)
