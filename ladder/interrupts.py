"""What signals of the program mean while Ladder works: Ctrl-C in an import, and exceptions of handlers.

Ctrl-C while TVM is imported takes effect behind the import. A package of native code that is left in the
middle of its import cannot be imported again in that process: the next attempt finds half of it, or crashes.
The first compilation imports it, and takes longest.
"""

from __future__ import annotations

import importlib.machinery
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from types import CodeType, MethodType, ModuleType
from typing import Any

WHOLE = frozenset({"tvm", "tvm_ffi"})
"""Packages that are imported whole or not at all."""


def execute_whole(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute a module; Ctrl-C meanwhile takes effect when it has been imported.

    Only the main thread is ever interrupted.
    """
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or threading.current_thread() is not threading.main_thread():
        execute(module)
        return
    caught: list[int] = []
    signal.signal(signal.SIGINT, lambda number, frame: caught.append(number))
    try:
        execute(module)
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            threading.Thread(target=_interrupt_behind, args=(module.__spec__,), daemon=True).start()


def _interrupt_behind(spec: Any) -> None:
    while getattr(spec, "_initializing", False):
        time.sleep(0.001)
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class WholeImports:
    """Finds `WHOLE` where Python would, and lets their import end before an interrupt is told."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of one of the packages, or None for all others."""
        spec = importlib.machinery.PathFinder.find_spec(name, path, target) if name in WHOLE else None
        loader: Any = spec and spec.loader
        if hasattr(loader, "exec_module"):
            loader.exec_module = partial(execute_whole, loader.exec_module)
        return spec


def import_whole() -> None:
    """Have the packages imported so from now on."""
    sys.meta_path.insert(0, WholeImports)  # type: ignore[arg-type, unused-ignore]


def pass_on(error: BaseException) -> None:
    """Raise what `asynchronous` finds in an exception, if anything.

    Whoever catches what a compilation, a guard or a plan raises, and goes on without it, asks this first.
    """
    found = asynchronous(error)
    if found is not None:
        raise found


def asynchronous(error: BaseException) -> BaseException | None:
    """Return what a signal handler raised: Ctrl-C's, or one of the program's, as timeouts have them.

    It came up between any two lines, and says nothing of what ran there. What torch raised because of it is
    followed to its cause.
    """
    found: BaseException | None = error
    while found is not None:
        frames = {frame.f_code for frame, _ in traceback.walk_tb(found.__traceback__)}
        if isinstance(found, KeyboardInterrupt) or not frames.isdisjoint(_handlers()):
            return found
        found = found.__cause__
    return None


def _handlers() -> set[CodeType]:
    """Return the code of all signal handlers that are written in Python."""
    return {code for number in signal.valid_signals() for code in _codes(signal.getsignal(number))}


def _codes(handler: Any) -> list[CodeType]:
    """Return the code that calling a handler runs first; none if it is not Python's."""
    while isinstance(handler, (partial, MethodType)):
        handler = handler.func if isinstance(handler, partial) else handler.__func__
    called = handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__")
    code = getattr(called, "__code__", None)
    return [code] if isinstance(code, CodeType) else []
