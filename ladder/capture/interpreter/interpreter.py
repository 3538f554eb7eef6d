"""The interpreter: frames of values, a heap model and a trace, and what has been recorded before.

Handlers of instructions and of what they call are functions that take an `Interpreter`. The way back, from
the functions that handlers use to calls of other functions, goes through `call` and `call_function`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ladder.capture.heap.heap import Heap
from ladder.capture.heap.nodes import CaptureError, Dynamic, Text, holds_text
from ladder.capture.python.frames import Frame, Through, place_of, user_line
from ladder.capture.python.tracebacks import trimmed
from ladder.capture.records import Record, ResumePoint, Store
from ladder.capture.trace.trace import Trace
from ladder.capture.values.kinds import mapped, parts
from ladder.capture.values.shapes import DynamicSize, Growing, Shapes, Walk, standing

_HOLDING = frozenset({Dynamic, Text, DynamicSize, Growing, Walk, tuple, slice})
"""Types of what is, or may hold, a dynamic scalar."""
Call = Callable[["Interpreter", Any, tuple[Any, ...], dict[str, Any]], Any]
"""What calls a function with positional and named arguments."""
IMPORT = "an import"
"""Why recording ends where a module is loaded."""


class _Barrier:
    """What marks an interpreter's instruction while a block runs."""

    __slots__ = ("vm",)

    def __init__(self, vm: Interpreter) -> None:
        self.vm = vm

    def __enter__(self) -> None:
        self.vm.barriers.append(self.vm.here())

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self.vm.barriers.pop()
        if error is not None and (shown := trimmed(error.__traceback__)) is not None:
            error.__traceback__ = shown  # frames of ours would keep what the program's have let go of


class Interpreter:
    """One interpreted run.

    heap, trace: What has been read, made, changed and computed since the segment began.
    recording: False where the rest of the run is only carried out: calls are then native.
    point: Where the segment began.
    roots: How many values the segment began with.
    side, beside: Which side of a branch it is, and the records of the sides that are known; `aside`: what is
        kept while a side is recorded, one inside the other; `supposed`: whether that side was not taken.
    frames: The interpreted frames, outermost first.
    beginning: The point where the run began, if that is where the function begins.
    told_compiling: Whether the program has asked if a compiler traces it, and was told so.
    barriers: Instructions that wait for native code to return: no segment can end there.
    left: The id of the exception that has just left a frame; `thrown`: one that is thrown into a generator.
    outer: The exception that is being handled around the call.
    modes: The `TorchFunctionMode`s that the segment has entered: none is pushed while it is recorded.
    """

    def __init__(self, store: Store, call: Call, call_function: Call) -> None:
        self.store = store
        self.recording = False
        self.point: ResumePoint | None = None
        self.roots = 0
        self.side: bool | None = None
        self.beside: dict[bool, Record] = {}
        self.aside: list[Any] = []
        self.supposed = False
        self.frames: list[Frame] = []
        self.barriers: list[Any] = []
        self.modes: list[Any] = []
        self.left = 0
        self.thrown: BaseException | None = None
        self.outer = sys.exc_info()[1]
        self.used_dynamic = False
        self.beginning: ResumePoint | None = None
        self.told_compiling = False
        self._call, self._call_function = call, call_function
        self.heap, self.trace = self._empty(set())

    def begin(self, lifted: set[str]) -> None:
        """Begin with nothing read, made or computed; the guard leaves the paths `lifted` open."""
        self.heap, self.trace = self._empty(lifted)

    def _empty(self, lifted: set[str]) -> tuple[Heap, Trace]:
        shapes = Shapes()
        trace = Trace(shapes)
        heap = Heap(shapes, lifted, numbers=self.store.takes_numbers)
        heap.assume = trace.assume
        return heap, trace

    def release(self) -> None:
        """Drop all references to objects of the heap and tensors of the trace."""
        self.heap.settle_texts()
        self.heap.release()
        self.trace.release()

    # calls ------------------------------------------------------------------------------------
    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `function`: interpret, replay, or break the graph."""
        return self._call(self, function, args, kwargs)

    def call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a Python function: as one operator, replayed, or interpreted."""
        return self._call_function(self, function, args, kwargs)

    # instructions -----------------------------------------------------------------------------
    def here(self) -> tuple[Any, int]:
        """Return the (code, index) of the instruction that runs."""
        frame = self.frames[-1] if self.frames else None
        return (frame.code, frame.index - 1) if frame else (None, 0)

    def refuse_poisoned(self) -> None:
        """Raise if the instruction that runs is one that must be run natively at this point."""
        if self.point is not None and self.point.poisoned and self.here() in self.point.poisoned:
            raise CaptureError("this instruction cannot be recorded")

    def barrier(self) -> _Barrier:
        """Mark, in a ``with``, that what is called returns to native code: no segment can end there."""
        return _Barrier(self)

    def seen(self, value: Any) -> Any:
        """Return `value`, which is looked at: if the segment began with it, it is guarded from now on."""
        if self.recording and id(value) in self.heap.roots:
            self.heap.find(value)
        return value

    # dynamic scalars --------------------------------------------------------------------------
    def plain(self, value: Any) -> Any:
        """Return `value` with every `Dynamic` in it replaced by its value, which is guarded.

        What is asked for so is looked at: a value that the segment began with is guarded from now on.
        """
        if self.recording and id(value) in self.heap.roots:
            self.heap.find(value)
        if type(value) not in _HOLDING:
            return value
        if type(value) is Dynamic:
            if self.recording:
                self.heap.fix(value)
            return value.value
        if type(value) is Text:
            return value if self.recording else str(value)
        dynamic = self.heap.uses_dynamic or self.used_dynamic or type(value) is Growing
        return self._plain_parts(value) if dynamic else value

    def _plain_parts(self, value: Any) -> Any:
        if type(value) is DynamicSize:
            return torch.Size(map(self.plain, value))
        if type(value) is Growing:
            return list(map(self.plain, value.items))
        if type(value) is Walk:
            if self.recording:
                self.heap.touch(value.source, 1)
            if type(value.source) in (list, dict):
                return value.native
            return standing(self.plain(value.source), value.view, value.at)
        if type(value) is tuple and any(map(_holds_dynamic, value)):
            return tuple(map(self.plain, value))
        if type(value) is slice and _holds_dynamic(value):
            return mapped(value, self.plain)
        return value

    def plain_given(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call with `plain` values."""
        return tuple(map(self.plain, args)), {key: self.plain(value) for key, value in kwargs.items()}

    def unlifted(self, value: Any) -> Any:
        """Return `value` with every `Dynamic` in it replaced by its value, which is not guarded."""
        recording, self.recording = self.recording, False
        value = self.plain(value)
        self.recording = recording
        return value

    def held(self, value: Any) -> Any:
        """Return `value` as objects hold it: numbers `unlifted`, each `Text` until the segment ends."""
        if self.recording and type(value) is Text:
            return value
        if self.recording and type(value) is tuple and holds_text(value):
            return tuple(map(self.held, value))
        return self.unlifted(value)

    def through(self, function: Any) -> Through:
        """Return `function`, called from beneath stand-ins for the frames that are interpreted."""
        return Through([place_of(frame) for frame in self.frames], function)

    def natively(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` as CPython would here; what it raises has got its context."""
        try:
            return self._natively(function, *self.plain_given(args, kwargs))
        except BaseException as error:
            self.left = id(error)
            raise

    def _natively(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self.recording and type(function) is not Through:  # it may look at the frames that call it
            function = self.through(function)
        handled = next((frame.handled for frame in reversed(self.frames) if frame.handled), [])
        if not handled or handled[-1] is None:
            return function(*args, **kwargs)
        # Natives may ask which exception is being handled: let it be handled here.
        error, trace, context = handled[-1], handled[-1].__traceback__, handled[-1].__context__
        try:
            raise error
        except BaseException:
            error.__traceback__, error.__context__ = trace, context
            return function(*args, **kwargs)

    def stack_lines(self) -> tuple[str, ...]:
        """Return ``file:line function`` of all interpreted frames, the innermost last."""
        return tuple(f"{file}:{line} {name}" for file, name, line, _ in map(place_of, self.frames))

    def meets_statistics(self) -> CaptureError:
        """Note that the program looks at how often a cached function was called; return what to raise.

        Guards call such functions once more, where a program does not ask.
        """
        self.store.count_cached_calls()
        if self.heap.guard.calls_cached:
            self.stop("the calls of a cached function are counted", self.here())
        return CaptureError("the statistics of a cached function")

    def leave(self, why: str) -> CaptureError:
        """Drop this recording, for which it matters when objects die. Returns what to raise."""
        if self.recording and self.point is not None:
            self.point.note_leave(f"{why}, at {user_line(self.stack_lines())}")
            self.give_up()
        return CaptureError(why)

    def stop(self, why: str, origin: Any = None) -> None:
        """Give up recording for the rest of this run; `origin` is run natively from now on."""
        if not self.recording:
            return
        if self.point is not None:
            self.point.note_failure(f"{why}, at {user_line(self.stack_lines())}", origin)
        self.give_up()

    def meet_import(self) -> None:
        """Give up recording, the first time, before a module is loaded: later calls find it there."""
        first = self.point is not None and not any(why.startswith(IMPORT) for why in self.point.failures)
        if first and not self.aside and self.side is None:
            self.stop(IMPORT)

    @contextmanager
    def stopping(self) -> Iterator[None]:
        """Stop recording where what is noted meanwhile cannot be; the instruction goes on."""
        try:
            yield
        except CaptureError as error:
            self.stop(str(error), self.here())

    def fail(self, error: CaptureError) -> None:
        """Stop recording because of `error`; the instruction at its origin runs natively from now on."""
        self.stop(str(error), getattr(error, "origin", None))

    def give_up(self) -> None:
        """Record no more in this run."""
        self.recording = False
        self.release()
        self.push_modes()
        for frame in self.frames:
            frame.stack[:] = map(self.plain, frame.stack)
            frame.slots.update({name: self.plain(value) for name, value in frame.slots.items()})

    def push_modes(self) -> None:
        """Put `modes` in force: what follows runs natively."""
        for mode in self.modes:
            torch._C._push_on_torch_function_stack(mode)
        self.modes.clear()


def _holds_dynamic(value: Any) -> bool:
    if type(value) in (tuple, DynamicSize):
        return any(map(_holds_dynamic, value))
    if type(value) is slice:
        return any(map(_holds_dynamic, parts(value)))
    return type(value) in (Dynamic, Text)
