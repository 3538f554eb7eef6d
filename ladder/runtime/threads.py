"""The threads of CPU kernels: torch's (`launch`), or TVM's pool beside them where those cannot be had.

Three defaults of TVM would slow down programs that alternate its kernels with torch's operators:

* TVM pins the calling thread to a core, and torch's threads inherit that mask: nothing is pinned here;
* idle workers spin for about 150 ms and take cores from torch: they spin for about 1 ms here;
* a worker that is not pinned may wake on the caller's own core and stay there: workers keep off it here.

Torch's own workers spin too, many milliseconds after each operator; `kernels_alone` leaves them asleep.

A launch waits for every worker, which on a busy machine gets a core after some milliseconds: kernels of
little work run `alone`.

A forked child has none of its parent's threads. Where the thread that forked had workers, kernels and torch's
operators run inline in the child, in the thread that calls them; else the child starts workers of its own, in
TVM's pool: torch's may be lost.
Such a child may end by ``os._exit``, as multiprocessing's do, or as any other process: see `_leave_pool`.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ladder import knobs
from ladder.runtime import elf
from ladder.runtime.launch import Launch, in_one_thread

ENVIRONMENT = {"TVM_BIND_THREADS": "0", "TVM_THREAD_POOL_SPIN_COUNT": "2000"}
"""Defaults that the pool reads when it starts; the user's own values win."""

TASKS = Path("/proc/self/task")

CONCURRENCY = "_ZN3tvm7runtime9threading17SetMaxConcurrencyEi"
"""TVM's function that limits the threads of the calling thread's next launches; 0 lifts the limit."""

BIG_CORES = 1
"""TVM's affinity mode that takes a number of threads."""

_libc = ctypes.CDLL(None)
_current_core = getattr(_libc, "sched_getcpu", None)


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


@dataclass
class _Process:
    """State of this process.

    loaded: Whether TVM's runtime is loaded.
    inline: Whether kernels run inline.
    held: Number of torch's threads while its operators have one (`kernels_alone`), else 0.
    launch: What starts threads for kernels where those are torch's.
    parting: Whether a child that is being forked loses threads, which torch would wait for.
    parted: Whether this process, or one it stems from, has lost threads so.
    """

    loaded: bool = False
    inline: bool = False
    held: int = 0
    launch: Launch | None = None
    parting: bool = False
    parted: bool = False


_process = _Process()


def runs_inline() -> bool:
    """Tell whether kernels of this process run in the thread that calls them: it was forked from workers."""
    return _process.inline


def torch_threads() -> int:
    """Return the number of threads that torch was told to use."""
    import torch

    return _process.held or int(torch.get_num_threads())


@contextmanager
def kernels_alone() -> Iterator[None]:
    """Let kernels have all cores inside the block, and torch's operators the thread that calls them.

    For small operators between kernels: each would wake torch's workers, which then spin beside the kernels'.
    """
    import torch

    if _process.held or _process.inline:
        yield
        return
    count = torch.get_num_threads()
    _process.held = count
    try:
        torch.set_num_threads(1)
        share_threads()
        yield
    finally:
        _process.held = 0
        torch.set_num_threads(1 if _process.inline else count)
        share_threads()


@contextmanager
def torch_together() -> Iterator[None]:
    """Let torch's operators have all threads for large work within `kernels_alone`."""
    import torch

    if not _process.held:
        yield
        return
    torch.set_num_threads(_process.held)
    try:
        yield
    finally:
        torch.set_num_threads(1)


EXIT_SECONDS = 10
"""How long a forked child may take for what is left after Python's own clean-up."""

REPLACED = {
    "_ZNSt18condition_variableD1Ev": "getppid",
    "_ZNSt6thread4joinEv": "pthread_rwlockattr_init",
}
"""What the destructor of TVM's pool calls -> what it calls in a forked child, which has no workers.

* The destructor of a condition variable waits for the threads that wait for one: ``getppid`` does nothing.
* ``std::thread::join`` reads the descriptors of threads whose memory the C library has taken back:
  ``pthread_rwlockattr_init`` sets the eight bytes of a ``std::thread`` to zero, those of none.
"""


def _leave_pool() -> None:
    """Let this thread's exit from a forked child not wait for workers of the parent.

    The destructor of TVM's pool wakes its workers, joins them and destroys what they waited for: `REPLACED`.
    Where a worker held a lock at the moment of the fork, which it does for a fraction of a microsecond,
    SIGALRM ends the child. What is registered last runs first.
    """
    if elf.is_supported():
        for function, by in REPLACED.items():
            elf.replace("libtvm_runtime", function, by)
    register = getattr(_libc, "__cxa_thread_atexit_impl", None)
    if register is not None:
        register(ctypes.cast(_libc.alarm, ctypes.c_void_p), ctypes.c_void_p(EXIT_SECONDS), None)


def _forget_workers() -> None:
    """Start anew in a forked child: TVM reads the number of threads at every launch."""
    global _callers
    _process.parted = _process.parted or _process.parting
    if _callers.workers is None and not _process.inline:
        if _process.parted and _process.launch is not None:
            _process.launch.leave_openmp()
        return
    import torch

    if not _process.inline and not uses_openmp():
        _leave_pool()
    _callers, _process.inline = _Callers(), True
    share_threads()
    os.environ["TVM_NUM_THREADS"] = "1"
    torch.set_num_threads(1)  # its operators would wait for threads that the parent had


def _note_threads() -> None:
    """Note before a fork whether the child loses threads."""
    _process.parting = len(_threads()) > 1


os.register_at_fork(before=_note_threads, after_in_child=_forget_workers)


def runtime_is_loaded(launch: Launch | None) -> None:
    """Let callers start threads from now on, by ``launch`` or by TVM's pool."""
    _process.loaded, _process.launch = True, launch
    if launch is not None and _process.parted:
        launch.leave_openmp()
    share_threads()


def library_is_loaded(path: Path) -> None:
    """Let the kernels of a library start threads as all others do."""
    if _process.launch is not None:
        _process.launch.adopt(path)


def uses_openmp() -> bool:
    """Tell whether kernels run on the threads of torch's operators."""
    return _process.launch is not None and _process.launch.uses_openmp


def share_threads() -> None:
    """Tell the launch how many threads kernels use."""
    if _process.launch is not None:
        wanted = knobs.settings.num_threads or _process.held
        _process.launch.use_threads(1 if _process.inline else wanted)


def prepare_environment(count: int) -> None:
    """Set what the pool reads when it starts; call before anything runs in parallel."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    os.environ["TVM_NUM_THREADS"] = str(count)


def start_workers(count: int) -> None:
    """Start the calling thread's pool, or change its size.

    count: Threads, the caller included.
    """
    import tvm_ffi

    if _process.inline or uses_openmp():
        _callers.workers = Workers(set())
        return
    before = _threads()
    tvm_ffi.get_global_func("runtime.config_threadpool")(BIG_CORES, count)
    if _callers.workers is None:
        can_place = hasattr(os, "sched_setaffinity") and _current_core is not None
        _callers.workers = Workers(os.sched_getaffinity(0) if can_place else set())
    _callers.workers.ids |= _threads() - before
    _callers.workers.avoided = -1


def alone(entry: Callable[..., Any], runtime: Path) -> Callable[..., Any]:
    """Return a kernel that computes in the thread that calls it, without the threads of a pool.

    entry: The kernel.
    runtime: TVM's library, which is loaded.
    """
    if _process.launch is not None:
        return _process.launch.alone(entry)
    limit = getattr(ctypes.PyDLL(str(runtime)), CONCURRENCY, None)
    return entry if limit is None else in_one_thread(entry, limit)


def keep_apart() -> None:
    """Keep the caller's workers off its core; a fraction of a microsecond unless the caller has moved.

    Starts the pool of a thread that calls for the first time, see `prepare_environment`; before the runtime
    is loaded, no kernel runs, and nothing is to be kept apart.
    """
    if _callers.workers is None:
        if not _process.loaded:
            return
        start_workers(int(os.environ["TVM_NUM_THREADS"]))
    workers = _callers.workers
    if workers is not None and workers.ids and _current_core is not None:
        core = _current_core()
        if core != workers.avoided:
            workers.keep_off(core)


def _threads() -> set[int]:
    """Return the ids of this process's threads (none where the system does not list them)."""
    return {int(path.name) for path in TASKS.iterdir()} if TASKS.exists() else set()
