"""TVM's thread pool beside torch's: who spins, for how long, and on which core.

Measured on two cores, one of them busy with another process, bursts of 4096 x 4096 int4 (M = 1)
alternating with torch's:

* as TVM ships, the calling thread is pinned, and torch's threads inherit that mask;
* unpinned, idle workers spin for 150 ms and take a core from torch, whose bfloat16 GEMM at
  M = 16 then takes 8 ms instead of 2.5;
* unpinned and spinning 1 ms, a worker wakes on the caller's own core and stays: 550 us, not 330;
* as here, workers spin 1 ms and keep off the core on which the caller runs: 330 us.
"""

from __future__ import annotations

import ctypes
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

ENVIRONMENT = {"TVM_BIND_THREADS": "0", "TVM_THREAD_POOL_SPIN_COUNT": "2000"}
"""Defaults that the pool reads when it starts; the user's own values win."""

TASKS = Path("/proc/self/task")

BIG_CORES = 1
"""TVM's affinity mode that takes a number of threads."""

_current_core = getattr(ctypes.CDLL(None), "sched_getcpu", None)


@dataclass
class Workers:
    """The threads of one caller's pool and where they must not run."""

    allowed: set[int]
    ids: set[int] = field(default_factory=set)
    avoided: int = -1

    def keep_off(self, core: int) -> None:
        """Let every worker run anywhere but on ``core``."""
        self.avoided = core
        others = self.allowed - {core}
        for worker in tuple(self.ids) if others else ():
            try:
                os.sched_setaffinity(worker, others)
            except OSError:  # the thread has ended, or the system forbids it: placement is only advice
                self.ids.discard(worker)


class _Callers(threading.local):
    """Each calling thread owns a pool."""

    workers: Workers | None = None


_callers = _Callers()


def prepare_environment(count: int) -> None:
    """Set what the pool reads when it starts; call before anything runs in parallel."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["TVM_NUM_THREADS"] = str(count)


def start_workers(count: int) -> None:
    """Start the calling thread's pool, or change its size.

    Parameters
    ----------
    count
        Threads, the caller included.
    """
    import tvm_ffi

    before = _threads()
    tvm_ffi.get_global_func("runtime.config_threadpool")(BIG_CORES, count)
    if _callers.workers is None:
        can_place = hasattr(os, "sched_setaffinity") and _current_core is not None
        _callers.workers = Workers(os.sched_getaffinity(0) if can_place else set())
    _callers.workers.ids |= _threads() - before
    _callers.workers.avoided = -1


def keep_apart() -> None:
    """Keep the caller's workers off its core; a fraction of a microsecond unless the caller has moved.

    Starts the pool of a thread that calls for the first time, see `prepare_environment`.
    """
    if _callers.workers is None:
        count = os.environ.get("TVM_NUM_THREADS")
        if count is None:
            return  # nothing has loaded a kernel yet: there are no workers
        start_workers(int(count))
    workers = _callers.workers
    if workers is not None and _current_core is not None:
        core = _current_core()
        if core != workers.avoided:
            workers.keep_off(core)


def _threads() -> set[int]:
    """Return the ids of this process's threads (none where the system does not list them)."""
    return {int(path.name) for path in TASKS.iterdir()} if TASKS.exists() else set()
