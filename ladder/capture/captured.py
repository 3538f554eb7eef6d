"""A function under capture: each call finds a record, or makes one."""

from __future__ import annotations

import copy
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple, Self, TypeVar

import torch
import torch.fx
import torch.utils.checkpoint

from ladder.capture.containers import plain, with_methods_of
from ladder.capture.explain import explain
from ladder.capture.methods import attribute_of, calls_captured, parts_of
from ladder.capture.records import (
    FAILED,
    MAX_FAILURES,
    MAX_RECORDS,
    Backend,
    Pending,
    Record,
    ResumePoint,
    Store,
)
from ladder.capture.run import continue_run, start_run
from ladder.capture.values.tensors import are_transformed, modes_are_active
from ladder.faults import tolerated
from ladder.forks import renewed
from tile_types.errors import (
    AliasingError,
    DeviceError,
    MissingToolError,
    ValueRangeError,
    require_callable,
)


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


REFUSALS = (
    AliasingError,
    DeviceError,
    MissingToolError,
    ValueRangeError,
    torch.OutOfMemoryError,
    MemoryError,
)
"""What plans raise for arguments that they do not take, or where they cannot run: no faults of Ladder."""

ENDS = (torch.utils.checkpoint._StopRecomputationError,)
"""What torch itself raises inside a call to end it there: running on would do what is not wanted any more."""


class Attempt(NamedTuple):
    """A call that no record serves to its end: where it began, where it stands, and with what.

    The list `roots` is emptied when the program runs on, so that objects die where the program drops them.
    """

    entry: ResumePoint | None
    here: ResumePoint
    roots: list[Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


RECORDING = renewed(threading.RLock())
"""Held while a thread records and compiles; calls of others that no record serves run without capture then.

torch's tracers replace ``nn.Module.__call__`` for the whole process: a record of that time would serve no
later call.
"""


def is_traced() -> bool:
    """Tell whether a tracer of torch, an fx one in any thread, notes what operators and modules do.

    While one of fx runs, a function of its module stands for ``nn.Module.__call__`` in the whole process.
    """
    called = getattr(torch.nn.Module.__call__, "__globals__", None)
    return called is vars(torch.fx._symbolic_trace) or torch._C._get_tracing_state() is not None


Called = TypeVar("Called", bound=Callable[..., Any])


WHOLE = (
    "ladder.compile captures this function itself; where torch must see all of it, as with fullgraph=True or "
    "torch.export, give it the function that was compiled: its attribute `function`"
)
"""What torch.compile says where it may not leave out a call."""


def beside_torch_compile(function: Called) -> Called:
    """Let torch.compile around a function, as in transformers' ``generate``, leave it and what it calls.

    `torch.compiler.disable` does so too, but imports the whole of ``torch._dynamo``: 3 s.
    """
    frames = torch._C._dynamo.eval_frame
    skipped = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
    frames.set_code_exec_strategy(function.__code__, skipped)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = WHOLE  # type: ignore[attr-defined]
    return function


class Captured(Store):
    """A function that capture watches; call it as the function itself.

    function: A Python function, method, `torch.nn.Module` or other callable.
    backend: ``backend(graph_module, example_inputs)`` returns what runs a graph; by default the graph runs
        operator by operator, as it would have without capture. Where it has a true attribute
        ``dynamic_shapes``, extents that keep changing are left open: what runs the graph then gets tensors of
        other shapes than the examples, and extents as integers; ``graph_module.meta["open"]`` holds the
        examples with symbols for what is open. Where its attribute ``numbers`` is false, other numbers that
        keep changing are given only as such symbols too. Where it has a true attribute ``loops``, iterations
        that match come as one node that calls `trace.loops.repeat`; where ``conditionals``, branches come as
        nodes that call `trace.conditionals.choose`.
    """

    def __new__(cls, function: Callable[..., Any], *options: Any, **named: Any) -> Self:
        """Return what stands for a function; for a module that is a container, a container."""
        is_module = issubclass(type(function), torch.nn.Module)
        return super().__new__(with_methods_of(cls, type(function)) if is_module else cls)

    def __init__(self, function: Callable[..., Any], backend: Backend | None = None) -> None:
        require_callable(run_as_is if backend is None else backend, "backend must be a function")
        super().__init__(function, run_as_is if backend is None else backend)
        self.inside: dict[torch.nn.Module, Captured] = {}
        """What captures calls of a module by its own methods, and of modules inside, captured apart."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of a module that is captured: `isinstance` holds where others take it for a part."""
        function = self.__dict__.get("function")
        return type(function) if issubclass(type(function), torch.nn.Module) else type(self)

    def __repr__(self) -> str:
        """Return what is captured as text."""
        return f"{type(self).__qualname__}({self.function!r})"

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of a module; in its methods, such as ``generate``, its calls are captured."""
        return attribute_of(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; one that only the module has is set there."""
        own = self.__dict__
        there = "inside" in own and name not in own and isinstance(self.function, torch.nn.Module)
        if there and hasattr(self.function, name):
            setattr(self.function, name, value)
        else:
            object.__setattr__(self, name, value)

    def __get__(self, value: Any, owner: type | None = None) -> Any:
        """Return what an attribute of a class gives: of a function, a method."""
        if value is None or not isinstance(self.function, types.FunctionType):
            return self
        return types.MethodType(self, value)

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what copies and pickles are made of: they have records of their own."""
        return plain(type(self)), (self.function, self.backend)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy that calls a copy of the function, which bound methods and modules have."""
        make, arguments = self.__reduce__()
        return make(*copy.deepcopy(arguments, memo))

    def beside(self, function: Callable[..., Any]) -> Captured:
        """Return another function under capture, whose graphs the same backend runs."""
        return Captured(function, self.backend)

    @property
    def within(self) -> Captured | None:
        """What captures calls of a module by its own methods, if any has run."""
        return next((each for module, each in self.inside.items() if module is self.function), None)

    @property
    def records(self) -> list[Record]:
        """All records, those of the entry first."""
        return [*super().records, *(record for each in self.inside.values() for record in each.records)]

    def totals(self) -> tuple[int, int, float]:
        """Return what `Store.totals` does, calls of a module by its own methods included."""
        counts = [super().totals(), *(each.totals() for each in self.inside.values())]
        recorded, eager, seconds = zip(*counts, strict=True)
        return sum(recorded), sum(eager), sum(seconds)

    @property
    def outcome(self) -> str:
        """``whole``, ``split``, ``eager`` (not captured at all) or ``new`` (nothing recorded yet)."""
        found = {super().outcome, *(each.outcome for each in self.inside.values())}
        if "eager" in found and self.records:
            return "split"
        return next(each for each in ("eager", "split", "whole", "new") if each in found)

    @beside_torch_compile
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Call the function: by a record that matches, else recording one."""
        point = self.entries.get((len(args), *kwargs)) if kwargs else self.entries.get(len(args))
        if point is None:
            point = self._enter(args, kwargs)
        roots: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        here = point
        while True:
            for run in here.runs:
                found = run(*roots)
                if found.__class__ is tuple:
                    break
            else:
                attempt = Attempt(point, here, [*roots], args, kwargs)
                roots = value = found = done = ()
                done = self._miss(attempt)
                if done.__class__ is not Pending:
                    return done
                here, roots = done
                continue
            if here.mixed:
                here.note_served(run, roots)
            following, value = found
            if following is None:
                return value
            if following.__class__ is ResumePoint:
                here, roots = following, value
            else:
                attempt = Attempt(point, here, [*roots], args, kwargs)
                roots = found = done = ()
                return self._interrupted(attempt, *value)

    def open(self, paths: set[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave extents open from the first call with such arguments on, given by their paths."""
        point = self._enter(args, kwargs)
        point.lifted |= paths

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ResumePoint:
        key = (len(args), *kwargs) if kwargs else len(args)
        if key not in self.entries:
            names = [f"args[{index}]" for index in range(len(args))] + list(kwargs)
            point = self.entries[key] = ResumePoint(self, (), "", names)
            if self.lifts_shapes:
                point.expect((*args, *kwargs.values()))
        return self.entries[key]

    def _miss(self, attempt: Attempt) -> Any:
        """Run on, recording if that may help later calls."""
        here = attempt.here
        if transformed := here is attempt.entry and are_transformed():
            self.warn("torch.func or forward-mode differentiation transforms a call")
        left_alone = transformed or modes_are_active() or is_traced()
        unfit = here.dead or bool(self.given_up)
        record = not left_alone and not unfit and RECORDING.acquire(blocking=False)
        try:
            if record and len(here.records) >= MAX_RECORDS:
                here.dead = True
                self.warn(f"more than {MAX_RECORDS} ways to go on from {here.names[-1:]}")
            begun = time.perf_counter()
            try:
                with calls_captured(self, parts_of(self.function) if unfit and not left_alone else ()):
                    return self._run_on(attempt, record=bool(record) and not here.dead)
            finally:
                self.spent((time.perf_counter() - begun) * bool(record))
        finally:
            if record:
                RECORDING.release()

    def _interrupted(self, attempt: Attempt, error: Exception, place: str) -> Any:
        """Carry on, not recording, where a graph raised: a fault, where the program raises nothing alike."""
        if isinstance(error, ENDS):
            raise error
        failures = attempt.here.failures
        failures[:] = [*failures[-MAX_FAILURES:], FAILED.name]
        with noting_raised(error) as places:
            done = self._run_on(attempt, record=False)
        refused = isinstance(error, REFUSALS)
        if getattr(self.backend, "is_ours", False) and not refused and not places:
            tolerated(error, "a call runs without its plan", place)
        return done

    def _run_on(self, attempt: Attempt, *, record: bool) -> Any:
        entry, here, roots, args, kwargs = attempt
        if here is not entry:
            if here.dead:
                why = f"a continuation cannot be recorded: {here.failures[-1:]}"
                self.give_up(why)
                for point in self.all_points():
                    point.take_back()
            return continue_run(self, here, roots, record=record)
        if not record or here.is_passing(tuple(roots)):
            self.calls["eager"] += 1
            return self.function(*args, **kwargs)
        here.learn(tuple(roots))
        self.calls["recorded"] += 1
        return start_run(self, here, args, kwargs)

    def explain(self, *, guards: bool = False) -> str:
        """Return what was captured, where its graph broke and why; with ``guards`` what each guard checks."""
        used = (each for each in self.inside.values() if each.outcome != "new")
        return "\n".join(explain(each, guards=guards) for each in (self, *used))


def run_as_is(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Run a graph operator by operator."""
    forward: Callable[..., Any] = module.forward
    return forward


run_as_is.dynamic_shapes = True  # type: ignore[attr-defined]
run_as_is.loops = True  # type: ignore[attr-defined]
run_as_is.conditionals = True  # type: ignore[attr-defined]
