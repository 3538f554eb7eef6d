"""Processes of a group that end together: when one fails, all raise the same error within seconds.

Without it a process waits for one that has failed until the group's timeout, minutes later.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ladder.runtime.peers import stop_waiting
from tile_types.errors import LadderError

BEAT = 0.25
"""Seconds between two looks at the other processes."""

INTERRUPT = getattr(signal, "SIGRTMAX", signal.SIGINT)
"""What interrupts Python in the main thread: behind a shell's ``&`` SIGINT is ignored."""

_numbers = itertools.count()
"""Every process enters its blocks in the same order, so that numbers tell them apart in the store."""


class RankFailedError(LadderError):
    """Another process of the group has failed."""


class Together:
    """A block of code that the processes of the default group carry out together: ``with together(): ...``.

    silence: Seconds without a sign of life after which a process counts as failed.
    grace: Seconds that a process has to leave the block, once another has failed; then it exits.
    Raises RankFailedError in every process but the one that failed, which raises its own error.
    """

    def __init__(self, silence: float = 20.0, grace: float = 5.0) -> None:
        self.silence, self.grace = silence, grace
        self.failure = ""
        self._ended = threading.Event()
        self._replaced: Any = None
        store: Any = dist.distributed_c10d._get_default_store()
        with contextlib.suppress(NotImplementedError, RuntimeError):  # one that cannot be cloned is shared
            store = store.clone()  # its own connection: another thread may wait in the first
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.store: Any = dist.distributed_c10d.PrefixStore(f"ladder/together/{next(_numbers)}", store)
        self._watcher = threading.Thread(target=self._watch, name="ladder-ranks", daemon=True)

    def __enter__(self) -> Together:
        if threading.current_thread() is threading.main_thread():
            self._replaced = signal.signal(INTERRUPT, signal.default_int_handler) or signal.SIG_DFL
        self._watcher.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Say how this process has ended; raise if another has failed."""
        try:
            self._ended.set()
            self._watcher.join()
        except KeyboardInterrupt:  # the watcher's, a moment too late
            if not self.failure:
                raise
        if self._replaced is not None:
            signal.signal(INTERRUPT, self._replaced)
        if error is None and not self.failure:
            with contextlib.suppress(RuntimeError):
                self.store.add(f"done/{self.rank}", 1)
            return
        self.failure = self.failure or self._said()
        if self.failure:
            raise RankFailedError(self.failure) from error
        with contextlib.suppress(RuntimeError):
            text = str(error).partition("\n")[0]
            self.store.set("failed", f"rank {self.rank} has failed: {type(error).__name__}: {text}")
            self._wait_for_others()

    def _said(self) -> str:
        """Return what a process that has failed left in the store."""
        with contextlib.suppress(RuntimeError):
            if self.store.check(["failed"]):
                return bytes(self.store.get("failed")).decode()
        return ""

    def _wait_for_others(self) -> None:
        """Stay until the others have read why: the store may go with this process."""
        limit = time.monotonic() + 4 * BEAT
        while self.store.add("read", 0) < self.count - 1 and time.monotonic() < limit:
            time.sleep(BEAT / 4)

    def _watch(self) -> None:
        seen = {rank: (0, time.monotonic()) for rank in range(self.count) if rank != self.rank}
        while not self._ended.wait(BEAT):
            try:
                self.failure = self._look(seen)
            except RuntimeError as error:
                self.failure = f"the group's store is gone: {error}".partition("\n")[0]
            if self.failure:
                self._leave()
                return

    def _look(self, seen: dict[int, tuple[int, float]]) -> str:
        """Show a sign of life, and return why another process has failed; empty if none has."""
        self.store.add(f"beat/{self.rank}", 1)
        if self.store.check(["failed"]):
            self.store.add("read", 1)
            return self._said()
        now = time.monotonic()
        for rank, (beats, since) in seen.items():
            found = self.store.add(f"beat/{rank}", 0)
            if found != beats or self.store.add(f"done/{rank}", 0):
                seen[rank] = found, now
            elif now - since > self.silence:
                return f"rank {rank} has given no sign of life for {self.silence:g} s"
        return ""

    def _leave(self) -> None:
        """End the block: collectives fail, Python is interrupted, and at last the process exits."""
        stop_waiting()
        with contextlib.suppress(Exception):  # what cannot be aborted may end by itself
            dist.distributed_c10d._abort_process_group()
        if self._replaced is not None and not self._ended.is_set():
            signal.pthread_kill(threading.main_thread().ident, INTERRUPT)  # type: ignore[arg-type]
        if not self._ended.wait(self.grace):
            print(f"ladder: {self.failure}", file=sys.stderr, flush=True)
            os._exit(1)


together = Together
