"""Kernels that later calls may need, built by a process beside this one while calls go on.

On GPUs a plan has a kernel for each range of M, and a call waits for its own alone. Once one was compiled,
this process of low priority compiles the plan's others, one after the other, into the cache, where calls
find them. A call that comes before its kernel builds it, or waits as for one that another rank builds. The
process ends with its parent. It is no thread: one that compiles holds Python's lock for much of its time.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterable
from multiprocessing import spawn
from queue import SimpleQueue

from ladder import knobs
from ladder.installation import cache_root
from ladder.runtime.build import trace

LONGEST = 4096
"""Bytes that a pipe takes whole or not at all."""

NICE = 10

_builders: list[subprocess.Popen[bytes]] = []
"""The process, once there is one."""

os.register_at_fork(after_in_child=_builders.clear)  # it is not a child of this process's children


def build(requests: Iterable[str]) -> None:
    """Have the kernels of requests (`ladder.runtime.compile.Request.text`) built, if that is possible.

    What cannot be passed on at once, or fails there, is left to the calls that need it.
    """
    if not (knobs.settings.cache and knobs.settings.ahead):
        return
    try:
        pipe = _builder().stdin
        assert pipe is not None  # that is how it was started
        for text in requests:
            line = f"{json.dumps([str(cache_root()), text])}\n".encode()
            if len(line) <= LONGEST:
                os.write(pipe.fileno(), line)
    except OSError as error:  # there is no room for processes or in the pipe, or the process was ended
        trace("kernels are not built ahead: %s", error)


def _builder() -> subprocess.Popen[bytes]:
    """Return the process, started on first use; raises OSError if that cannot be."""
    if not _builders:
        command = [os.fsdecode(spawn.get_executable()), "-m", __name__]
        found = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert found.stdin is not None  # as asked for
        os.set_blocking(found.stdin.fileno(), False)
        atexit.register(_end, found, os.getpid())
        _builders.append(found)
    return _builders[0]


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() == owner:  # not in a forked child
        process.kill()
        process.wait()


def _read(lines: SimpleQueue[str]) -> None:
    """Take what the parent asks for; end where it does."""
    for line in sys.stdin:
        lines.put(line)
    os._exit(0)


def main() -> None:
    """Build what standard input asks for, a cache folder and a request a line, until its end."""
    os.nice(NICE)
    lines: SimpleQueue[str] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    from ladder.runtime.compile import Request, obtain

    while True:
        folder, text = json.loads(lines.get())
        try:
            with knobs.override(cache_dir=folder):
                obtain(Request.parse(text))
        except Exception as error:  # the call that needs the kernel raises it
            trace("not built ahead: %s", error)


if __name__ == "__main__":
    main()
