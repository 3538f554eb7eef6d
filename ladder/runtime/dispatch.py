"""Torch's dispatch of operators, restored after blocks in which operators fail on fake tensors."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import clear_frames

import torch


class _Expected(logging.Filter):
    """Drops what torch logs of fakes that fail in threads whose `expecting` is true: it is not the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.here = threading.local()

    @property
    def expecting(self) -> bool:
        """Whether this thread meets the errors itself."""
        return getattr(self.here, "expecting", False)

    @expecting.setter
    def expecting(self, value: bool) -> None:
        self.here.expecting = value

    def filter(self, record: logging.LogRecord) -> bool:
        """Say whether a record is written."""
        return not self.expecting


_expected = _Expected()
logging.getLogger("torch._subclasses.fake_tensor").addFilter(_expected)


@contextmanager
def dispatch_kept() -> Iterator[None]:
    """Let torch dispatch operators as before where a block fails; log no error of fakes: the caller meets it.

    Where the text of an error reads the fakes that it names, torch raises in turn until Python's stack is
    full; what should be undone then is not, and all operators of the thread would fail from there on.
    """
    excluded = torch._C._dispatch_tls_local_exclude_set()
    before, _expected.expecting = _expected.expecting, True
    try:
        yield
    except Exception as error:
        _let_go(error)
        _exclude(excluded)
        raise
    finally:
        _expected.expecting = before


def _exclude(keys: torch._C.DispatchKeySet) -> None:
    """Let this thread exclude these keys, and no others, where it dispatches operators."""
    now = torch._C._dispatch_tls_local_exclude_set()
    for key in torch._C.DispatchKey.__members__.values():
        if now.has(key) != keys.has(key):
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, keys.has(key))


def _let_go(error: BaseException | None) -> None:
    """Let go of what the frames hold that an exception passed: guards among it would be undone later."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        clear_frames(error.__traceback__)
        error = error.__context__
