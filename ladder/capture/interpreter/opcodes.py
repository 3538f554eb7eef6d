"""The table of instructions, and what taking one up again does to the stack of its frame."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.bytecode import VERSION, Instruction
from ladder.capture.python.frames import NULL, Absent, Frame
from ladder.capture.python.words import words

STOP = Absent()
"""What an exhausted iterator gives."""

RETURN = Absent()
YIELD = Absent()
Handler = Callable[[Interpreter, Frame, Instruction], Any]
HANDLERS: dict[str, Handler] = {}


def handles(*names: str) -> Callable[[Handler], Handler]:
    """Register a handler for the instructions `names`."""

    def register(handler: Handler) -> Handler:
        for name in names:
            HANDLERS[name] = handler
        return handler

    return register


def popn(frame: Frame, count: int) -> list[Any]:
    """Pop `count` values, the deepest first."""
    if not count:
        return []
    taken = frame.stack[-count:]
    del frame.stack[-count:]
    return taken


def pushes(compute: Callable[..., Any], taken: int = 0) -> Handler:
    """Return the handler that pops values and pushes ``compute(vm, frame, instruction, *values)``."""

    def run(vm: Interpreter, f: Frame, i: Instruction) -> None:
        f.stack.append(compute(vm, f, i, *popn(f, taken)))

    return run


def pops(act: Callable[..., Any], taken: int) -> Handler:
    """Return the handler that pops values and calls ``act(vm, frame, instruction, *values)``."""

    def run(vm: Interpreter, f: Frame, i: Instruction) -> None:
        act(vm, f, i, *popn(f, taken))

    return run


STOP_ITERATION_ERROR, UNARY_POSITIVE, LIST_TO_TUPLE = 3, 5, 6
INTRINSICS = frozenset({STOP_ITERATION_ERROR, UNARY_POSITIVE, LIST_TO_TUPLE})
"""The intrinsics that are interpreted; the others print, make type parameters or import names."""


def after_call(frame: Frame, value: Any) -> None:
    """Push an attribute that is about to be called."""
    frame.stack.extend((NULL, value) if VERSION < (3, 13) else (value, NULL))


_STATEMENTS = frozenset(
    words("STORE_ATTR DELETE_ATTR STORE_SUBSCR STORE_SLICE DELETE_SUBSCR LIST_APPEND SET_ADD MAP_ADD")
)


def push_result(frame: Frame, value: Any) -> None:
    """Take up the instruction of `frame` that was waiting for `value`."""
    item = frame.program.instructions[frame.index - 1]
    if item.op in _STATEMENTS:
        return
    method = item.op == "LOAD_METHOD" or (item.op == "LOAD_SUPER_ATTR" and item.arg & 1)
    if method or (VERSION >= (3, 12) and item.op == "LOAD_ATTR" and item.arg & 1):
        after_call(frame, value)
    else:
        frame.stack.append(value)


def after_next(frame: Frame, item: Instruction, value: Any) -> None:
    """Push what an iterator gave, or leave the loop."""
    if value is not STOP:
        frame.stack.append(value)
        return
    frame.stack.pop()
    frame.index = item.value
    if VERSION >= (3, 12):
        frame.index += 1 if VERSION < (3, 13) else 2


def after_delegation(f: Frame, i: Instruction, value: Any) -> None:
    """Go on after ``yield from``, which gives `value`; `i` is its SEND."""
    if VERSION < (3, 12):
        f.stack[-1] = value
    else:
        f.stack.append(value)
    f.index = i.value
