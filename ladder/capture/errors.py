"""Exceptions of interpreted frames: the context, cause and traceback that CPython would have given them.

An exception goes through frames of ours as it leaves interpreted ones. Its traceback shows the latter
instead: each by a frame object with the code's name, file and lines, made by `shell`.
"""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, FunctionType, TracebackType
from typing import TYPE_CHECKING, Any

from ladder.capture.frames import Frame, is_stand_in
from ladder.capture.nodes import CaptureError, Node

if TYPE_CHECKING:
    from ladder.capture.core import Core

HOME = str(Path(__file__).parent)
_NOP = bytes([dis.opmap["NOP"], 0])
RECORD = "<ladder record>"
"""The file name of generated code."""
Place = tuple[CodeType, dict[str, Any], int, int]
"""Code, globals, offset of the instruction, line."""


def _stub(frame_of: Callable[[int], FrameType]) -> FrameType:
    return frame_of(0)


def shell(code: CodeType, names: dict[str, Any]) -> FrameType:
    """Return a frame object that looks like one of `code`."""
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
    frame: FrameType = FunctionType(made, names)(sys._getframe)
    return frame


def pushed(error: BaseException, place: Place) -> None:
    """Add `place` to the traceback of `error`: it has left a frame there."""
    code, names, offset, line = place
    inner = trimmed(error.__traceback__)
    error.__traceback__ = TracebackType(inner, shell(code, names), offset, line)


def trimmed(trace: TracebackType | None) -> TracebackType | None:
    """Return a traceback without frames of ours, and without what a watched operator runs in."""
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
        made = TracebackType(made, item.tb_frame, item.tb_lasti, item.tb_lineno)
    return made


def again(error: BaseException) -> None:
    """Raise `error`; its context stays what the program made it."""
    context = error.__context__
    if context is None:
        raise error
    try:
        raise error
    finally:
        error.__context__ = context


def leaves(machine: Core, frame: Frame, error: BaseException) -> None:
    """Note that `error` was raised, or came from a call, where `frame` stands."""
    item = frame.program.instructions[frame.index - 1]
    raises = item.op == "RAISE_VARARGS"
    if item.op == "RERAISE" or (raises and not item.arg):
        error.__traceback__ = trimmed(error.__traceback__)
        return
    node = _node_of(machine, error)
    _set_context(machine, error, anew=raises)
    if frame.code.co_filename.startswith(HOME):
        return  # it stands for a builtin, which has no frame
    place = (frame.code, frame.names, item.offset, item.line)
    pushed(error, place)
    if node is not None and machine.recording:
        heap = machine.heap
        heap.change(f"{heap.constant(pushed)}({node.var}, {heap.constant(place)})", [node], set())


def _node_of(machine: Core, error: BaseException) -> Node | None:
    """Return the node of an exception; one that a native has just raised is made known."""
    if not machine.recording:
        return None
    try:
        machine.heap.reference(error, set())
    except CaptureError:
        return None
    return machine.heap.find(error)


def _set_context(machine: Core, error: BaseException, *, anew: bool) -> None:
    handled = (frame.handled[-1] for frame in reversed(machine.frames) if frame.handled)
    current = next((item for item in handled if item is not None), None)
    if current is None or current is error or (error.__context__ is not None and not anew):
        return
    inner = current
    while inner.__context__ is not None:
        if inner.__context__ is error:
            set_field(machine, inner, "__context__", None)
            break
        inner = inner.__context__
    set_field(machine, error, "__context__", current)


def set_field(machine: Core, error: BaseException, name: str, value: Any) -> None:
    """Assign a field of an exception."""
    setattr(error, name, value)
    if not machine.recording:
        return
    heap, node, uses = machine.heap, _node_of(machine, error), set[str]()
    if node is None:
        return
    node.written.add(name)
    try:
        text = f"{node.var}.{name} = {heap.reference(value, uses)}"
    except CaptureError as reason:
        if node.external:
            machine.stop(str(reason), machine.here())
        node.recordable, node.origin = False, machine.here()
        return
    heap.change(text, [node], uses)
