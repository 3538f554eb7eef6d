"""Exceptions raised in interpreted frames: context, cause and traceback are set as CPython sets them."""

from __future__ import annotations

import sys
from typing import Any

from ladder.capture.heap.nodes import CaptureError, Node
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.frames import Frame, closes
from ladder.capture.python.tracebacks import HOME, before, holding, pushed, trimmed


def leaves(vm: Interpreter, frame: Frame, error: BaseException) -> None:
    """Note that `error` was raised, or came from a call, where `frame` stands."""
    item = frame.program.instructions[frame.index - 1]
    thrown, vm.thrown = vm.thrown is error, None
    raises = item.op == "RAISE_VARARGS"
    if item.op == "RERAISE" or (raises and not item.arg):
        error.__traceback__ = trimmed(error.__traceback__)
        return
    if error.__context__ is vm.outer:
        error.__context__ = None  # `surrounded` puts it back: no record may hold it
    node = _node_of(vm, error)
    known = thrown or (id(error) == vm.left and error.__traceback__ is not None)  # it has come from a frame
    if raises or not known:
        _set_context(vm, error, anew=raises)
    if frame.code.co_filename.startswith(HOME):
        return  # it stands for a builtin, which has no frame
    place = (frame.code, frame.names, item.offset, item.line)
    pushed(error, place)
    if node is not None and vm.recording:
        heap = vm.heap
        heap.change(f"{heap.constant(pushed)}({node.var}, {heap.constant(place)})", [node], set())


def enters(vm: Interpreter, frame: Frame, error: BaseException) -> None:
    """Note that `error` is thrown into the generator of `frame`: its context is what that itself handles."""
    handled = frame.handled[-1] if frame.handled else None
    if handled is not None:
        _chain(vm, error, handled)
    vm.thrown = error


def abandons(vm: Interpreter, frame: Frame, error: BaseException) -> None:
    """Note that `error` leaves `frame`: its stack dies now, and its variables with the traceback."""
    frame.stack.clear()
    vm.left = id(error)
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


def current_error(vm: Interpreter) -> BaseException | None:
    """Return the exception that is being handled, by the innermost frame that handles any."""
    handled = (frame.handled[-1] for frame in reversed(vm.frames) if frame.handled)
    return next((item for item in handled if item is not None), None)


def handled_error(vm: Interpreter) -> BaseException | None:
    """Return the exception that is being handled, by the program or by what has called it."""
    current = current_error(vm)
    return _outer(vm) if current is None else current


def _outer(vm: Interpreter) -> BaseException | None:
    if vm.recording and vm.outer is None:
        text = f"{vm.heap.constant(sys.exc_info)}()[1] is None"
        vm.heap.guard.check(text, "the caller handles no exception")
    elif vm.recording:
        vm.leave("it matters which exception the caller handles")
    return vm.outer


def context_of(vm: Interpreter, error: BaseException) -> BaseException | None:
    """Return the context of an exception that this run has raised; that of the caller is left out in it."""
    return error.__context__ if error.__traceback__ is None else error.__context__ or _outer(vm)


def is_handled(vm: Interpreter, error: BaseException) -> bool:
    """Say whether a frame of the program is handling an exception."""
    return any(item is error for frame in vm.frames for item in frame.handled)


def _set_context(vm: Interpreter, error: BaseException, *, anew: bool) -> None:
    current = current_error(vm)
    if current is not None and (error.__context__ is None or anew):
        _chain(vm, error, current)


def _chain(vm: Interpreter, error: BaseException, current: BaseException) -> None:
    """Make `current` the context of `error`, and `error` that of none below."""
    if current is error:
        return
    above = before(current, error)
    if above is not None:
        set_field(vm, above, "__context__", None)
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
