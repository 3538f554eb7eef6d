"""Locks that a forked child finds free.

A child has only the thread that forked: a lock that another thread held at that moment would stay held there.
"""

from __future__ import annotations

import os
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
