"""Tracebacks that show interpreted frames, not the frames of the interpreter.

An exception that leaves interpreted frames passes through frames of the interpreter, which its traceback
would show. These are replaced: `shell` makes a frame object with the name, file and lines of the code.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Generator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import Any, NoReturn

from ladder.capture.python.frames import is_stand_in

HOME = str(Path(__file__).parent.parent)
_NOP = bytes([dis.opmap["NOP"], 0])
RECORD = "<ladder record>"
"""The file name of generated code."""
Place = tuple[CodeType, dict[str, Any], int, int]
"""Code, globals, offset of the instruction, line."""


def _stub(held: Any) -> Generator[Any, Any, Any]:
    yield held


def shell(code: CodeType, names: dict[str, Any], held: Any = None) -> FrameType:
    """Return a frame object that looks like one of `code`, and keeps nothing alive but `held`.

    It is that of a generator, which refers to no frame that it was called from.
    """
    stub = _stub.__code__
    padding = _NOP * ((len(code.co_code) - len(stub.co_code)) // 2)
    made = stub.replace(
        co_filename=code.co_filename,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
        co_firstlineno=code.co_firstlineno,
        co_linetable=code.co_linetable,
        co_code=stub.co_code + padding,
    )
    frame: FrameType = FunctionType(made, names)(held).gi_frame
    return frame


def pushed(error: BaseException, place: Place) -> None:
    """Add `place` to the traceback of `error`: it has left a frame there."""
    code, names, offset, line = place
    inner = trimmed(error.__traceback__)
    error.__traceback__ = TracebackType(inner, shell(code, names), offset, line)


def holding(trace: TracebackType | None, held: Any) -> TracebackType | None:
    """Return a traceback whose outermost frame, if it has any, keeps `held` alive."""
    trace = trimmed(trace)
    if trace is None:
        return None
    frame = shell(trace.tb_frame.f_code, trace.tb_frame.f_globals, held)
    return TracebackType(trace.tb_next, frame, trace.tb_lasti, trace.tb_lineno)


def trimmed(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of Ladder, or those in which an operator is monitored."""
    kept = []
    while trace is not None:
        code = trace.tb_frame.f_code
        if code.co_name == "__torch_dispatch__" and code.co_filename.startswith(HOME):
            break
        ours = code.co_filename.startswith(HOME) or code.co_filename == RECORD
        if not ours and not is_stand_in(code):
            kept.append(trace)
        trace = trace.tb_next
    made: TracebackType | None = None
    for item in reversed(kept):
        same = item.tb_next is made
        made = item if same else TracebackType(made, item.tb_frame, item.tb_lasti, item.tb_lineno)
    return made


def surrounded(error: BaseException, outer: BaseException | None) -> None:
    """Note that `outer` was being handled when the first of an exception and its contexts was raised."""
    seen: set[int] = set()
    while error is not outer and error.__context__ is not None and id(error) not in seen:
        seen.add(id(error))
        error = error.__context__
    if outer is None or error is outer or error.__context__ is not None:
        return
    above = before(outer, error)
    if above is not None:
        above.__context__ = None
    error.__context__ = outer


def before(top: BaseException, error: BaseException) -> BaseException | None:
    """Return which of `top` and its contexts, which may go round, has `error` for its context."""
    seen: set[int] = set()
    inner: BaseException | None = top
    while inner is not None and id(inner) not in seen:
        if inner.__context__ is error:
            return inner
        seen.add(id(inner))
        inner = inner.__context__
    return None


def again(error: BaseException) -> None:
    """Raise `error`; its context stays what the program made it."""
    surrounded(error, sys.exc_info()[1])
    kept(error)


def kept(error: BaseException) -> NoReturn:
    """Raise `error`, whose context stays as it is: what is being handled here is not the program's."""
    context = error.__context__
    try:
        raise error
    finally:
        error.__context__ = context
