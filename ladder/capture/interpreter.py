"""The bytecode interpreter: real values on a stack of our own, one handler for each instruction.

It computes what CPython computes; every access to the heap goes through the machine's operations,
which record. Handlers pop their operands *before* they act and push the result after, so that a
segment can end, and a later run can resume, in the middle of any instruction.
"""

from __future__ import annotations

import types
from typing import Any, cast

from ladder.capture.bytecode import Instruction, Program, program_of
from ladder.capture.core import Leaving
from ladder.capture.errors import leaves
from ladder.capture.frames import NO_OVERRIDE, NULL, Frame
from ladder.capture.handlers import HANDLERS, RETURN, YIELD, after_next, push_result
from ladder.capture.handlers_calls import INTRINSICS, after_delegation
from ladder.capture.kinds import is_a
from ladder.capture.nodes import CaptureError
from ladder.capture.operations import Operations

FROM_YIELD_FROM = 2
"""What RESUME says where a generator stands in ``yield from``."""


class Interpreter(Operations):
    """`run`, `resume` and `drive`."""

    def known(self, code: types.CodeType) -> bool:
        """Say whether every instruction of `code` has a handler."""
        program = program_of(code)
        return program.operations <= HANDLERS.keys() and program.intrinsics <= INTRINSICS

    def run(self, frame: Frame, error: BaseException | None = None) -> Any:
        """Run `frame` until it returns, yields or raises; `error` is raised where it stands."""
        self.frames.append(frame)
        frame.yielded = False
        try:
            if error is not None:
                self._unwind(frame, error)
            return self._loop(frame)
        finally:
            self.frames.pop()

    def _loop(self, frame: Frame) -> Any:
        instructions = frame.program.instructions
        while True:
            instruction = instructions[frame.index]
            frame.index += 1
            before = list(frame.stack) if self.recording else None
            try:
                signal = HANDLERS[instruction.op](cast(Any, self), frame, instruction)
            except CaptureError as error:
                # No handler has an answer to it: the instruction is made again without recording.
                if before is None:
                    raise
                self.stop(str(error), self.here())
                frame.stack, frame.index = [*map(self.plain, before)], frame.index - 1
                continue
            except Leaving:
                raise
            except BaseException as error:
                self._unwind(frame, error)
                continue
            if signal is RETURN:
                value = frame.stack.pop()
                return value if frame.override is NO_OVERRIDE else frame.override
            if signal is YIELD:
                frame.yielded = True
                return frame.stack.pop()

    def _unwind(self, frame: Frame, error: BaseException) -> None:
        """Go to the handler of `error` in `frame`, or raise it."""
        index = frame.index - 1
        handler = frame.program.handler_of(index)
        leaves(self, frame, error)
        if handler is None:
            raise error
        del frame.stack[handler.depth :]
        if handler.lasti:
            frame.stack.append(index)
        frame.stack.append(error)
        frame.index = handler.target

    def resume(self, frame: Frame, value: Any, is_error: bool) -> Any:
        """Step a generator's frame."""
        with self.barrier():
            if is_error:
                return self._throw(frame, value)
            if frame.index:
                frame.stack.append(value)
            return self.run(frame)

    def _throw(self, frame: Frame, error: BaseException) -> Any:
        """Raise `error` where a generator stands: what it delegates to is told first."""
        ahead = frame.program.instructions[frame.index : frame.index + 2]
        delegates = [item.op for item in ahead] == ["NOP", "JUMP"] and ahead[0].value == FROM_YIELD_FROM
        if not delegates:
            return self.run(frame, error)
        target = frame.stack[-1]
        name = "close" if is_a(error, GeneratorExit) else "throw"
        tell = getattr(target, name, None)
        try:
            if tell is None or name == "close":
                tell and tell()
                raise error
            given = tell(error)
        except StopIteration as stop:
            after_delegation(frame, frame.program.instructions[ahead[1].value], stop.value)
            return self.run(frame)
        except BaseException as raised:
            found = raised
        else:
            frame.yielded = True
            return given
        return self.run(frame, found)

    def drive(self, frames: list[Frame], after: str, result: Any, error: BaseException | None) -> Any:
        """Run restored `frames`, outermost first, to the end of the outermost."""
        self.frames = list(frames[:-1])
        inner = frames[-1]
        if error is None:
            self.apply(inner, after, result)
        while True:
            try:
                value = self.run(inner, error)
                error = None
            except Leaving:
                raise
            except BaseException as raised:
                if not self.frames:
                    raise
                error = raised
            if not self.frames:
                return value
            inner = self.frames.pop()
            if error is None:
                push_result(inner, value)

    def apply(self, frame: Frame, after: str, result: Any) -> None:
        """Take up `frame` where a split left it."""
        if after == "next":
            after_next(frame, frame.program.instructions[frame.index - 1], result)
        elif after == "redo":
            frame.stack.append(result)
        else:
            push_result(frame, result)


__all__ = ["NULL", "Instruction", "Interpreter", "Program"]
