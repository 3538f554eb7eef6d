"""Ctrl-C while TVM is imported takes effect behind the import.

A package of native code that is left in the middle of its import cannot be imported again in that process:
the next attempt finds half of it, or crashes. The first compilation imports it, and takes longest.
"""

from __future__ import annotations

import importlib.machinery
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
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
