"""Exceptions raised in interpreted frames: context, cause and traceback are set as CPython sets them."""

from __future__ import annotations

from typing import Any

from ladder.capture.heap.nodes import CaptureError, Node
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.frames import Frame, closes
from ladder.capture.python.tracebacks import HOME, holding, pushed, trimmed


def leaves(vm: Interpreter, frame: Frame, error: BaseException) -> None:
    """Note that `error` was raised, or came from a call, where `frame` stands."""
    item = frame.program.instructions[frame.index - 1]
    raises = item.op == "RAISE_VARARGS"
    if item.op == "RERAISE" or (raises and not item.arg):
        error.__traceback__ = trimmed(error.__traceback__)
        return
    node = _node_of(vm, error)
    _set_context(vm, error, anew=raises)
    if frame.code.co_filename.startswith(HOME):
        return  # it stands for a builtin, which has no frame
    place = (frame.code, frame.names, item.offset, item.line)
    pushed(error, place)
    if node is not None and vm.recording:
        heap = vm.heap
        heap.change(f"{heap.constant(pushed)}({node.var}, {heap.constant(place)})", [node], set())


def abandons(vm: Interpreter, frame: Frame, error: BaseException) -> None:
    """Note that `error` leaves `frame`: its stack dies now, and its variables with the traceback."""
    frame.stack.clear()
    kept = [value for value in frame.slots.values() if closes(value)]
    if kept and not frame.code.co_filename.startswith(HOME):
        vm.leave("it matters when a generator is dropped")
        error.__traceback__ = holding(error.__traceback__, kept)


def _node_of(vm: Interpreter, error: BaseException) -> Node | None:
    """Return the node of an exception; one that a native has just raised is made known."""
    if not vm.recording:
        return None
    try:
        vm.heap.reference(error, set())
    except CaptureError:
        return None
    return vm.heap.find(error)


def _set_context(vm: Interpreter, error: BaseException, *, anew: bool) -> None:
    handled = (frame.handled[-1] for frame in reversed(vm.frames) if frame.handled)
    current = next((item for item in handled if item is not None), None)
    if current is None or current is error or (error.__context__ is not None and not anew):
        return
    inner = current
    while inner.__context__ is not None:
        if inner.__context__ is error:
            set_field(vm, inner, "__context__", None)
            break
        inner = inner.__context__
    set_field(vm, error, "__context__", current)


def set_field(vm: Interpreter, error: BaseException, name: str, value: Any) -> None:
    """Assign a field of an exception."""
    setattr(error, name, value)
    if not vm.recording:
        return
    heap, node, uses = vm.heap, _node_of(vm, error), set[str]()
    if node is None:
        return
    node.written |= {name}
    try:
        text = f"{node.var}.{name} = {heap.reference(value, uses)}"
    except CaptureError as reason:
        if node.external:
            vm.stop(str(reason), vm.here())
        node.recordable, node.origin = False, vm.here()
        return
    heap.change(text, [node], uses)
