"""Watching for an exception that a program catches itself."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def noting_raised(error: BaseException) -> Iterator[list[str]]:
    """Note where exceptions of the same type and text are raised in this thread while a block runs.

    Functions that are called in the block run under a trace function, many times as slow; where a debugger
    has one of its own, nothing is noted.
    """
    kind, text, places = type(error), str(error), list[str]()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        frame.f_trace_lines = False
        if event == "exception" and argument[0] is kind and str(argument[1]) == text:
            places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    if sys.gettrace() is not None:
        yield places
        return
    sys.settrace(trace)
    try:
        yield places
    finally:
        sys.settrace(None)
