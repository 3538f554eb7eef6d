"""Room on Python's stack: one frame of a program takes several of ours while it is interpreted."""

from __future__ import annotations

import sys
import threading

from ladder.forks import renewed


class Room:
    """A context in which `frames` more frames fit on the stack, for as many threads as are within."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self._lock = renewed(threading.Lock())
        self._within = 0
        self._limit = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._limit = sys.getrecursionlimit()
                sys.setrecursionlimit(self._limit + self.frames)
            self._within += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._within -= 1
            ours = sys.getrecursionlimit() == self._limit + self.frames  # else the program has set it
            if ours and not self._within:
                sys.setrecursionlimit(self._limit)
