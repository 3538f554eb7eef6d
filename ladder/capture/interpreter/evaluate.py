"""The loop: one handler for each instruction; frames, generators, and frames that are taken up again.

Handlers pop their operands *before* they act and push the result after, so that a segment can end, and a
later run can resume, in the middle of any instruction.
"""

from __future__ import annotations

import types
from typing import Any

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.endings import Leaving
from ladder.capture.interpreter.exceptions import abandons, enters, leaves
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.opcodes import (
    HANDLERS,
    INTRINSICS,
    RETURN,
    YIELD,
    after_delegation,
    after_next,
    push_result,
)
from ladder.capture.python.bytecode import program_of
from ladder.capture.python.frames import NO_OVERRIDE, Frame
from ladder.capture.python.tracebacks import kept
from ladder.capture.values.kinds import is_a
from ladder.interrupts import asynchronous

FROM_YIELD_FROM = 2
"""What RESUME says where a generator stands in ``yield from``."""


def is_known(code: types.CodeType) -> bool:
    """Say whether every instruction of `code` has a handler."""
    program = program_of(code)
    return program.operations <= HANDLERS.keys() and program.intrinsics <= INTRINSICS


def run(vm: Interpreter, frame: Frame, errors: list[BaseException] | None = None) -> Any:
    """Run `frame` until it returns, yields or raises; what is in the list `errors` is raised where it stands.

    The list is emptied: an exception dies where the program has handled it.
    """
    vm.frames.append(frame)
    frame.yielded = False
    try:
        if errors:
            _unwind(vm, frame, errors.pop())
        return _loop(vm, frame)
    finally:
        vm.frames.pop()


def _loop(vm: Interpreter, frame: Frame) -> Any:
    instructions = frame.program.instructions
    while True:
        instruction = instructions[frame.index]
        frame.index += 1
        before = list(frame.stack) if vm.recording else None
        try:
            signal = HANDLERS[instruction.op](vm, frame, instruction)
        except CaptureError as error:
            # No handler has an answer to it: the instruction is made again without recording.
            if before is None:
                raise
            vm.stop(str(error), vm.here())
            frame.stack, frame.index = [*map(vm.plain, before)], frame.index - 1
            continue
        except Leaving:
            raise
        except BaseException as error:
            if vm.recording and asynchronous(error):
                vm.give_up()  # it need not come up there again
            before = None  # what is taken from the stack dies now
            _unwind(vm, frame, error)
            continue
        if signal is RETURN:
            value = frame.stack.pop()
            return value if frame.override is NO_OVERRIDE else _initialised(vm, frame, value)
        if signal is YIELD:
            frame.yielded = True
            return frame.stack.pop()


def _initialised(vm: Interpreter, frame: Frame, value: Any) -> Any:
    """Return what an ``__init__`` has initialised, which gives nothing itself."""
    if value is not None:
        raise TypeError(f"__init__() should return None, not '{type(vm.plain(value)).__name__}'")
    return frame.override


def _unwind(vm: Interpreter, frame: Frame, error: BaseException) -> None:
    """Go to the handler of `error` in `frame`, or raise it."""
    index = frame.index - 1
    handler = frame.program.handler_of(index)
    leaves(vm, frame, error)
    if handler is None:
        abandons(vm, frame, error)
        kept(error)
    vm.left = 0
    del frame.stack[handler.depth :]
    if handler.lasti:
        frame.stack.append(index)
    frame.stack.append(error)
    frame.index = handler.target


def resume(vm: Interpreter, frame: Frame, value: Any, is_error: bool) -> Any:
    """MockStep a generator's frame."""
    with vm.barrier():
        if is_error:
            return _throw(vm, frame, value)
        if frame.index:
            frame.stack.append(value)
        return run(vm, frame)


def _throw(vm: Interpreter, frame: Frame, error: BaseException) -> Any:
    """Raise `error` where a generator is suspended, first in the generator that it delegates to."""
    ahead = frame.program.instructions[frame.index : frame.index + 2]
    delegates = [item.op for item in ahead] == ["NOP", "JUMP"] and ahead[0].value == FROM_YIELD_FROM
    name = "close" if is_a(error, GeneratorExit) else "throw"
    tell = getattr(frame.stack[-1], name, None) if delegates else None
    stop = None
    try:
        if name == "throw" and tell is not None:
            given = tell(error)
            frame.yielded = True
            return given
        tell and tell()
    except BaseException as raised:
        if name == "throw" and is_a(raised, StopIteration):
            stop = raised
        else:
            error = raised
    if stop is not None:
        after_delegation(frame, frame.program.instructions[ahead[1].value], stop.value)
        return run(vm, frame)
    enters(vm, frame, error)
    return run(vm, frame, [error])


def drive(vm: Interpreter, frames: list[Frame], errors: list[BaseException]) -> Any:
    """Run restored `frames`, outermost first, to the end; one in `errors` is raised in the innermost.

    Both lists are emptied: objects die where the program drops them.
    """
    *vm.frames, inner = frames
    frames.clear()
    while True:
        try:
            value = run(vm, inner, errors)
        except Leaving:
            raise
        except BaseException as raised:
            if not vm.frames:
                raise
            errors.append(raised)
        if not vm.frames:
            return value
        inner = vm.frames.pop()
        if not errors:
            push_result(inner, value)


def apply(frame: Frame, after: str, result: Any) -> None:
    """Take up `frame` where a graph break left it."""
    if after == "next":
        after_next(frame, frame.program.instructions[frame.index - 1], result)
    elif after == "redo":
        frame.stack.append(result)
    else:
        push_result(frame, result)
