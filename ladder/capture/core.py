"""What the parts of the machine share: the state of a run, and the ends of segments."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType
from typing import TYPE_CHECKING, Any

import torch

from ladder.capture.frames import NULL, Frame, Through, place_of, user_line
from ladder.capture.heap import Heap
from ladder.capture.kinds import mapped, parts
from ladder.capture.nodes import CaptureError, Dynamic, Node
from ladder.capture.shapes import DynamicSize, Growing, Shapes
from ladder.capture.trace import Trace
from ladder.capture.words import words

if TYPE_CHECKING:
    from ladder.capture.record import Plan
    from ladder.capture.sites import Captured, Site


RESUMABLE = frozenset(
    words(
        "CALL CALL_KW CALL_FUNCTION_EX LOAD_ATTR LOAD_METHOD LOAD_SUPER_ATTR STORE_ATTR DELETE_ATTR BINARY_OP"
        " COMPARE_OP BINARY_SUBSCR BINARY_SLICE STORE_SUBSCR STORE_SLICE DELETE_SUBSCR GET_ITER"
        " GET_YIELD_FROM_ITER BEFORE_WITH WITH_EXCEPT_START"
    )
)
"""Instructions whose last act is a call, and which then only push what it gives, or nothing."""

LAST = RESUMABLE | frozenset(
    words(
        "CONTAINS_OP UNARY_NEGATIVE UNARY_INVERT UNARY_POSITIVE FORMAT_VALUE FORMAT_SIMPLE FORMAT_WITH_SPEC"
        " IMPORT_NAME IMPORT_FROM LIST_APPEND SET_ADD MAP_ADD BUILD_SET BUILD_MAP CONVERT_VALUE"
        " BUILD_CONST_KEY_MAP"
    )
)
"""Instructions that may themselves be one native call."""


class Leaving(BaseException):
    """Raised through interpreted frames, which end there and see nothing of it."""


@dataclass
class Ending:
    """The last lines of a record, and the variables that they use.

    `returned`: the variables that a side of a branch takes from its graph; `depth`: how many conditionals
    are inside one another; `branches`: the sites whose other side, once known, makes the record
    stale; `returns`: the program ends there without an exception.
    """

    lines: list[str]
    uses: set[str]
    depth: int = 0
    returned: list[str] = field(default_factory=list)
    branches: set[Site] = field(default_factory=set)
    returns: bool = False


class Core:
    """The state of one interpreted run.

    ``recording`` is False where the rest of the run is only carried out: calls are then native.
    """

    def __init__(self, captured: Captured) -> None:
        self.captured = captured
        self.recording = False
        shapes = Shapes()
        self.heap, self.trace = Heap(shapes, set()), Trace(shapes)
        self.site: Site | None = None
        self.frames: list[Frame] = []
        self.barriers: list[Any] = []
        self.used_dynamic = False

    # what other parts provide -----------------------------------------------------------------
    @abstractmethod
    def call(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call `function`."""

    @abstractmethod
    def call_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a Python function by interpreting it."""

    @abstractmethod
    def operator(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a tensor operator and add it to the graph."""

    @abstractmethod
    def plan(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: str) -> Plan:
        """Prepare the end of the segment before the call `function`."""

    @abstractmethod
    def close(self, plan: Plan) -> bool:
        """End the segment as planned; say whether that could be done."""

    @abstractmethod
    def open(self, plan: Plan, result: Any) -> Any:
        """Begin the segment that follows a call with `result`."""

    @abstractmethod
    def fork(self, plan: Plan, function: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Go on with both sides of a branch if that can be recorded; return if it cannot."""

    def finish(self, plan: Plan, result: Any) -> Any:
        """End the segment as planned after the call, and begin the next with `result`."""
        return self.open(plan, result) if self.close(plan) else result

    @abstractmethod
    def identify(self, function: Any) -> None:
        """Guard that a function from outside is this one."""

    @abstractmethod
    def part(self, value: Any) -> Any:
        """Return `value`, a read-only part of a constant, after pinning it."""

    @abstractmethod
    def tuple_item(self, container: tuple[Any, ...], key: int) -> Any:
        """Return one item of a tuple."""

    @abstractmethod
    def specials(self) -> dict[Any, Any]:
        """Return the natives that the machine implements itself."""

    @abstractmethod
    def subscript(self, container: Any, key: Any) -> Any:
        """Return ``container[key]``."""

    @abstractmethod
    def known(self, code: CodeType) -> bool:
        """Say whether the interpreter knows all instructions of `code`."""

    @abstractmethod
    def run(self, frame: Frame) -> Any:
        """Run `frame` to its end, or to its next ``yield``."""

    @abstractmethod
    def new(self, value: Any) -> Any:
        """Register a container made by the interpreter."""

    @abstractmethod
    def resume(self, frame: Frame, value: Any, is_error: bool) -> Any:
        """Run a generator's frame to its next ``yield`` or its end."""

    @abstractmethod
    def iterate(self, value: Any) -> Any:
        """Return ``iter(value)``."""

    @abstractmethod
    def perform(self, function: Any, args: Any, kwargs: Any, changes: list[Node]) -> Any:
        """Call a native with admitted arguments and add the step that calls it again."""

    @abstractmethod
    def drained(self, value: Any, most: int | None = None) -> tuple[Any, ...]:
        """Return all that is left of an iterator, or `most` items of it."""

    @abstractmethod
    def container_method(
        self, function: Any, owner: Any, name: str, rest: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a method of a list, dict, set, deque or a subclass that overrides nothing."""

    @abstractmethod
    def replay(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, looking: bool) -> Any:
        """Call a replayable native and note how to call it again."""

    @abstractmethod
    def same(self, left: Any, right: Any) -> bool:
        """Return ``left is right``, guarded."""

    @abstractmethod
    def truth(self, value: Any) -> Any:
        """Return ``bool(value)``, or `NULL` if it must be read by a split."""

    @abstractmethod
    def store_subscript(self, container: Any, key: Any, item: Any) -> None:
        """Do ``container[key] = item``."""

    # instructions -----------------------------------------------------------------------------
    def here(self) -> tuple[Any, int]:
        """Return the (code, index) of the instruction that runs."""
        frame = self.frames[-1] if self.frames else None
        return (frame.code, frame.index - 1) if frame else (None, 0)

    def refuse_poisoned(self) -> None:
        """Raise if the instruction that runs is one that must be run natively at this site."""
        if self.site is not None and self.site.poisoned and self.here() in self.site.poisoned:
            raise CaptureError("this instruction cannot be recorded")

    def recorded(
        self, do: Callable[..., Any], args: tuple[Any, ...], otherwise: tuple[Any, ...], after: str = "push"
    ) -> Any:
        """Return ``do(*args)``; where that cannot be recorded, split at the call `otherwise`.

        `otherwise` is (function, args) or (function, args, kwargs).
        """
        try:
            self.refuse_poisoned()
            return do(*args)
        except CaptureError as error:
            why = str(error)
        # Not in the handler above: what is called now would find our error as the one being handled.
        function, given, *named = otherwise
        return self.opaque(function, given, named[0] if named else {}, after, why)

    @contextmanager
    def barrier(self) -> Iterator[None]:
        """Mark that what is called meanwhile returns to native code: no segment can end there."""
        self.barriers.append(self.here())
        try:
            yield
        finally:
            self.barriers.pop()

    def call_in_statement(self, function: Any, args: tuple[Any, ...]) -> None:
        """Call `function` as the last act of an instruction that pushes nothing."""
        self.call(function, args, {})

    # dynamic scalars --------------------------------------------------------------------------
    def plain(self, value: Any) -> Any:
        """Return `value` with every `Dynamic` in it replaced by its value, which is guarded."""
        if type(value) is Dynamic:
            if self.recording:
                self.heap.guard.fix(value)
            return value.value
        if not (self.heap.uses_dynamic or self.used_dynamic):
            return value
        if type(value) is DynamicSize:
            return torch.Size(map(self.plain, value))
        if type(value) is Growing:
            return list(map(self.plain, value.items))
        if type(value) is tuple and any(map(_holds_dynamic, value)):
            return tuple(map(self.plain, value))
        if type(value) is slice and _holds_dynamic(value):
            return mapped(value, self.plain)
        return value

    def unlifted(self, value: Any) -> Any:
        """Return `value` with every `Dynamic` in it replaced by its value, which is not guarded."""
        recording, self.recording = self.recording, False
        value = self.plain(value)
        self.recording = recording
        return value

    # ends of segments -------------------------------------------------------------------------
    def opaque(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: str, why: str
    ) -> Any:
        """Run a call of unknown effect: the segment ends before it, the next begins after it."""
        if not self.recording:
            return self.natively(function, *args, **kwargs)
        args = tuple(map(self.plain, args))
        kwargs = {key: self.plain(value) for key, value in kwargs.items()}
        called = self.through(function)
        plan = self.try_plan(called, args, kwargs, after, why)
        if plan is not None:
            self.fork(plan, function, args, kwargs, NULL)
        function = called
        if plan is None or not self.recording:
            return self.natively(function, *args, **kwargs)
        closed = self.close(plan)
        try:
            result = self.natively(function, *args, **kwargs)
        except BaseException as error:
            if closed:
                self.open(plan, error)
            raise
        return self.open(plan, result) if closed else result

    def through(self, function: Any) -> Through:
        """Return `function`, called from beneath stand-ins for the frames that are interpreted."""
        return Through([place_of(frame) for frame in self.frames], function)

    def natively(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` as CPython would here."""
        args = tuple(map(self.plain, args))
        kwargs = {key: self.plain(value) for key, value in kwargs.items()}
        handled = next((frame.handled for frame in reversed(self.frames) if frame.handled), [])
        if not handled or handled[-1] is None:
            return function(*args, **kwargs)
        # Natives may ask which exception is being handled: let it be handled here.
        error, trace = handled[-1], handled[-1].__traceback__
        try:
            raise error
        except BaseException:
            error.__traceback__ = trace
            return function(*args, **kwargs)

    def try_plan(
        self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: str, why: str
    ) -> Plan | None:
        """Return the plan to end the segment here, or stop recording where it cannot end."""
        if self.frames and not self.barriers and not self._can_be_taken_up(after):
            self.barriers = [self.here()]
        if self.barriers:
            self.stop(f"split within a native call: {why}", self.barriers[0])
            return None
        try:
            plan = self.plan(function, args, kwargs, after)
            plan.why, plan.where = why, self.stack_lines()
        except CaptureError as error:
            self.stop(str(error), getattr(error, "origin", None))
            return None
        return plan

    def stack_lines(self) -> tuple[str, ...]:
        """Return ``file:line function`` of all interpreted frames, the innermost last."""
        return tuple(f"{file}:{line} {name}" for file, name, line, _ in map(place_of, self.frames))

    def _can_be_taken_up(self, after: str) -> bool:
        """Say whether all frames stand at instructions that `drive` can finish."""
        waiting = [frame.program.instructions[frame.index - 1].op for frame in self.frames]
        return all(op in RESUMABLE for op in waiting[:-1]) and (
            after in ("redo", "next") or waiting[-1] in LAST
        )

    def meets_statistics(self) -> CaptureError:
        """Note that the program looks at how often a cached function was called; return what to raise.

        Guards call such functions once more, where a program does not ask.
        """
        self.captured.count_cached_calls()
        if self.heap.guard.calls_cached:
            self.stop("the calls of a cached function are counted", self.here())
        return CaptureError("the statistics of a cached function")

    def leave(self, why: str) -> CaptureError:
        """Drop this recording, for which it matters when objects die. Returns what to raise."""
        if self.recording and self.site is not None:
            self.site.note_leave(f"{why}, at {user_line(self.stack_lines())}")
            self.give_up()
        return CaptureError(why)

    def stop(self, why: str, origin: Any = None) -> None:
        """Give up recording for the rest of this run; `origin` is run natively from now on."""
        if not self.recording:
            return
        if self.site is not None:
            self.site.note_failure(f"{why}, at {user_line(self.stack_lines())}", origin)
        self.give_up()

    def give_up(self) -> None:
        """Record no more in this run."""
        self.recording = False
        self.heap.release()
        self.trace.release()
        for frame in self.frames:
            frame.stack[:] = map(self.plain, frame.stack)
            frame.slots.update({name: self.plain(value) for name, value in frame.slots.items()})


def _holds_dynamic(value: Any) -> bool:
    if type(value) in (tuple, DynamicSize):
        return any(map(_holds_dynamic, value))
    if type(value) is slice:
        return any(map(_holds_dynamic, parts(value)))
    return type(value) is Dynamic
