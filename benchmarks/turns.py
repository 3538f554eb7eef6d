"""Benchmarks in processes of their own: all prepare side by side, then each has the GPU in turn."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

READY = "READY for its turn"
"""A line that a process writes once it has prepared all; it goes on when it reads one."""


def wait_for_turn() -> None:
    """Tell that all is prepared, and wait until it is this process's turn."""
    print(READY, flush=True)
    sys.stdin.readline()


def take_turns(
    commands: Sequence[Sequence[str]],
    settings: Mapping[str, str],
    after: Callable[[int], None],
    patience: float,
) -> None:
    """Start commands, and let each go on alone once all are ready or have ended.

    Parameters
    ----------
    settings
        Their environment.
    after
        Called with the number of each command that has ended.
    patience
        Seconds after which those that are not ready are stopped.
    """
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings)
        for command in commands
    ]
    begin = time.perf_counter()
    waiting = [threading.Thread(target=_until_ready, args=(process,), daemon=True) for process in started]
    for thread in waiting:
        thread.start()
    for number, (thread, process) in enumerate(zip(waiting, started, strict=True)):
        thread.join(max(0.0, begin + patience - time.perf_counter()))
        if thread.is_alive():
            print(f"stopped: {' '.join(commands[number][3:])}", flush=True)
            process.kill()
    print(f"all ready after {time.perf_counter() - begin:.1f} s", flush=True)
    for number, process in enumerate(started):
        if process.poll() is None and process.stdin and process.stdout:
            with suppress(BrokenPipeError):  # it has ended meanwhile
                process.stdin.write("go\n")
                process.stdin.flush()
            for line in process.stdout:
                print(line, end="", flush=True)
        process.wait()
        after(number)


def _until_ready(process: subprocess.Popen[str]) -> None:
    """Show what a process writes until it is ready or ends."""
    assert process.stdout is not None  # that is how it was started
    for line in process.stdout:
        if line.strip() == READY:
            return
        print(line, end="", flush=True)
