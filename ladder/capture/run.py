"""From a finished segment to a record, and the runs that make segments."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from typing import Any

from ladder.capture.handlers import instructions as handlers
from ladder.capture.handlers import structures as handlers_calls
from ladder.capture.heap.nodes import CaptureError, MockStep
from ladder.capture.interpreter.branches import Joined
from ladder.capture.interpreter.emit import emit
from ladder.capture.interpreter.endings import raise_ending, return_ending
from ladder.capture.interpreter.evaluate import apply, drive
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.segments import Followed, begin_segment
from ladder.capture.operations.calls import MAX_DEPTH, call, call_function
from ladder.capture.python.frames import NULL, closes
from ladder.capture.python.tracebacks import surrounded, trimmed
from ladder.capture.records import ResumePoint, Store
from ladder.capture.values.tensors import modes_are_active
from ladder.forks import renewed
from ladder.runtime.quick_fakes import quick_fakes


class Room:
    """A context in which `frames` more frames fit on the stack, for as many threads as are within."""

    def __init__(self, frames: int) -> None:
        self.frames = frames
        self._lock = renewed(threading.Lock())
        self._within = 0
        self._limit = 0

    def __enter__(self) -> None:
        with self._lock:
            if not self._within:
                self._limit = sys.getrecursionlimit()
                sys.setrecursionlimit(self._limit + self.frames)
            self._within += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._within -= 1
            ours = sys.getrecursionlimit() == self._limit + self.frames  # else the program has set it
            if ours and not self._within:
                sys.setrecursionlimit(self._limit)


ROOM = Room(16 * MAX_DEPTH)
"""What the deepest interpreted calls take: about 16 frames each."""
HANDLED = (handlers, handlers_calls)
"""The modules whose functions are in the table of instructions."""


class _BeginAgain(Exception):
    """The program raised an error, perhaps since `is_compiling` was true for it."""


def complete(vm: Interpreter, result: Any) -> Any:
    """End the last segment: the program returns `result`."""
    if vm.recording and vm.point is not None:
        try:
            vm.point.add(emit(vm, return_ending(vm.heap, result)), vm.beside)
        except CaptureError as error:
            vm.fail(error)
    vm.recording = False
    return vm.unlifted(result)


def complete_joined(vm: Interpreter, joined: Joined) -> Any:
    """End the last segment, which went through both sides of a branch."""
    assert vm.point is not None
    try:
        vm.point.add(emit(vm, joined.ending), vm.beside)
        vm.store.prune()
    except CaptureError as error:
        for point in joined.ending.branches:
            point.attempts += 1
        vm.point.failures.append(str(error))
    vm.recording = False
    return vm.unlifted(joined.result)


def carry_out(vm: Interpreter, run: Any, *args: Any) -> Any:
    """Do ``run(*args)``, the rest of the program, and end the last segment with what comes of it."""
    try:
        with ROOM, quick_fakes():
            return _carried_out(vm, run, *args)
    finally:
        # What only the recording holds must die now.
        vm.release()
        vm.frames, vm.outer = [], None


def _carried_out(vm: Interpreter, run: Any, *args: Any) -> Any:
    try:
        result = run(*args)
    except Joined as joined:
        return complete_joined(vm, joined)
    except Followed as followed:
        return followed.pending
    except Exception as error:
        if vm.told_compiling and vm.store.begins_again and _has_done_nothing(vm):
            raise _BeginAgain from None
        if vm.recording and vm.point is not None:
            try:
                vm.point.add(emit(vm, raise_ending(vm.heap, error)), vm.beside)
            except CaptureError as reason:
                vm.point.failures.append(str(reason))
                vm.push_modes()
        error.__traceback__ = trimmed(error.__traceback__)
        surrounded(error, vm.outer)
        raise
    return complete(vm, result)


def start_run(store: Store, point: ResumePoint, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the whole function, recording."""
    vm = Interpreter(store, call, call_function)
    roots = begin_segment(vm, point, [*args, *kwargs.values()], point.names)
    vm.beginning = point
    vm.heap.pin(store.function)
    given = tuple(roots[: len(args)])
    named = dict(zip(kwargs, roots[len(args) :], strict=True))
    try:
        return carry_out(vm, vm.call, store.function, given, named)
    except _BeginAgain:
        pass
    return _run_untold(store, args, kwargs)


def _has_done_nothing(vm: Interpreter) -> bool:
    """Say whether the run has recorded all since the function began, and changed nothing outside."""
    trace = vm.trace
    changed = trace.changes_tensors or trace.random or trace.switches
    undone = _are_undone([step for step in vm.heap.steps if step.keep])
    return vm.recording and vm.point is vm.beginning and undone and not changed


def _are_undone(steps: Sequence[MockStep]) -> bool:
    """Say whether steps only set attributes, which hold again the constants that they held at first."""
    first: dict[tuple[int, str], tuple[Any, Any]] = {}
    for step in steps:
        if step.replaced is None:
            return False
        value, name, before = step.replaced
        first.setdefault((id(value), name), (value, before))
    return all(
        before is not NULL and vars(value).get(name, NULL) is before
        for (_, name), (value, before) in first.items()
    )


def _run_untold(store: Store, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call the function natively; if it raises nothing now, tell it no more that a compiler traces it."""
    try:
        result = store.function(*args, **kwargs)
    except Exception:
        store.begins_again = False
        raise
    store.tells_compiling = False
    return result


def continue_run(store: Store, point: ResumePoint, roots: list[Any], *, record: bool) -> Any:
    """Run on from a resume point with the values `roots`, which is emptied; record if `record`."""
    vm = Interpreter(store, call, call_function)
    values = roots[:]
    roots.clear()
    # It matters when they are dropped, and modes would see what is read of them.
    record = record and not any(map(closes, values)) and not modes_are_active()
    if record:
        point.learn(tuple(values))
        values = begin_segment(vm, point, values, point.names)
    if record:
        vm.heap.find(values[-1])
    if not point.layouts:
        return carry_out(vm, _raise if point.after == "raise" else _same, values[-1])
    frames, at = [], 0
    for layout in point.layouts:
        frames.append(layout.restore(values[at : at + layout.size]))
        at += layout.size
    errors = [values[at]] if point.after == "raise" else []
    if not errors:
        apply(frames[-1], point.after, values[at])
    values.clear()
    return carry_out(vm, drive, vm, frames, errors)


def _same(value: Any) -> Any:
    return value


def _raise(error: BaseException) -> Any:
    raise error
