"""Models of the zoo, each in a process forked from one that has imported the libraries."""

from __future__ import annotations

import collections
import contextlib
import json
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Row = dict[str, Any]
Work = Callable[[str, Path], None]
"""Writes the row of a model of this name to a file, as a process of its own."""


class Child(NamedTuple):
    """A process that works on a model: until when, and where it writes its row."""

    name: str
    process: Any
    until: float
    output: Path

    def row(self, *, over: bool) -> Row:
        """Return the row of a process that has ended, or is ended here where its time is over.

        Of one whose time is over it is what was written until then.
        """
        lacking = {"outcome": "not finished"}
        if over:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                os.killpg(self.process.pid, signal.SIGKILL)
        else:
            self.process.join()
            lacking = {"outcome": "died", "error": f"exit code {self.process.exitcode}"}
        if self.output.exists():
            return dict(json.loads(self.output.read_text()))
        return {"name": self.name, "right": False, **lacking}


def write_row(row: Row, output: Path) -> None:
    """Write a row in one move, so that a process that is ended leaves a whole one."""
    part = output.with_suffix(".part")
    part.write_text(json.dumps(row, default=str))
    part.replace(output)


def _alone(work: Work, name: str, output: Path) -> None:
    os.setpgrp()  # what this process starts ends with it
    work(name, output)


def rows_of(
    names: Sequence[str],
    work: Work,
    folder: Path,
    *,
    jobs: int,
    limit: float,
    seconds: float,
    method: str = "fork",
) -> Iterator[Row]:
    """Yield the rows of models, `jobs` at a time; no thread runs beside the one that forks.

    folder: Where the rows are written.
    limit: Seconds that one model may take.
    seconds: After these no further model is begun, and those that run are ended.
    method: Of starting processes, as `multiprocessing` calls it; on GPUs they cannot be forked.
    """
    waiting, deadline = collections.deque(names), time.monotonic() + seconds
    running: dict[Any, Child] = {}
    context: Any = multiprocessing.get_context(method)
    while waiting or running:
        now = time.monotonic()
        while waiting and len(running) < jobs:
            name = waiting.popleft()
            if now >= deadline:
                yield {"name": name, "outcome": "not begun", "right": False}
                continue
            output = folder / f"{name.replace('/', '_')}.json"
            process = context.Process(target=_alone, args=(work, name, output))
            process.start()
            running[process.sentinel] = Child(name, process, min(now + limit, deadline), output)
        over = [at for at, child in running.items() if child.until <= now]
        ended = multiprocessing.connection.wait([*running], 0.0 if over else 0.5)
        for sentinel in {*over, *ended}:
            yield running.pop(sentinel).row(over=sentinel not in ended)
