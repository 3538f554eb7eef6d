"""What cannot be recorded breaks the graph: the segment ends at a native call, the next begins after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ladder.capture.heap.nodes import CaptureError
from ladder.capture.interpreter.branches import fork
from ladder.capture.interpreter.endings import GraphBreak
from ladder.capture.interpreter.frequent import broken_often, leave_out, note_break
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.segments import close_segment, open_segment, prepare_break
from ladder.capture.python.frames import NULL, OURS
from ladder.capture.python.words import words

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


def recorded(
    vm: Interpreter,
    do: Callable[..., Any],
    args: tuple[Any, ...],
    otherwise: tuple[Any, ...],
    after: str = "push",
) -> Any:
    """Return ``do(vm, *args)``; where that cannot be recorded, break the graph at the call `otherwise`.

    The call alone is made where nothing is recorded any more.

    `otherwise` is (function, args) or (function, args, kwargs).
    """
    function, given, *named = otherwise
    if not vm.recording:
        return vm.natively(function, *given, **(named[0] if named else {}))
    try:
        vm.refuse_poisoned()
        return do(vm, *args)
    except CaptureError as error:
        why = str(error)
    # Not in the handler above: what is called now would find our error as the one being handled.
    return opaque(vm, function, given, named[0] if named else {}, after, why)


def call_in_statement(vm: Interpreter, function: Any, args: tuple[Any, ...]) -> None:
    """Call `function` as the last act of an instruction that pushes nothing."""
    vm.call(function, args, {})


def opaque(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: str, why: str
) -> Any:
    """Run a call of unknown effect: the segment ends before it, the next begins after it."""
    if not vm.recording:
        return vm.natively(function, *args, **kwargs)
    args, kwargs = vm.plain_given(args, kwargs)
    called = vm.through(function)
    graph_break = try_break(vm, called, args, kwargs, after, why)
    if graph_break is not None:
        fork(vm, graph_break, function, args, kwargs, NULL)
    function = called
    if graph_break is None or not vm.recording:
        return vm.natively(function, *args, **kwargs)
    note_break(vm)
    closed = close_segment(vm, graph_break)
    if closed and (often := broken_often(vm)) is not None:
        leave_out(vm.store, often)
        vm.give_up()
        closed = False
    try:
        result = vm.natively(function, *args, **kwargs)
    except BaseException as error:
        if closed:
            open_segment(vm, graph_break, error)
        raise
    return open_segment(vm, graph_break, result) if closed else result


def try_break(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: str, why: str
) -> GraphBreak | None:
    """Return the graph_break to end the segment here, or stop recording where it cannot end."""
    if vm.frames and not vm.barriers and not _can_be_taken_up(vm, after):
        vm.barriers = [vm.here()]
    if vm.barriers:
        vm.stop(f"graph break within a native call: {why}", of_program(vm, vm.barriers[0]))
        return None
    try:
        graph_break = prepare_break(vm, function, args, kwargs, after)
        graph_break.why, graph_break.where = why, vm.stack_lines()
    except CaptureError as error:
        vm.fail(error)
        return None
    return graph_break


def of_program(vm: Interpreter, origin: tuple[Any, int]) -> tuple[Any, int]:
    """Return an instruction, or the call in the program where it is one of a polyfill."""
    codes = [frame.code for frame in vm.frames]
    at = codes.index(origin[0]) if origin[0] in codes else -1
    if at < 0 or not origin[0].co_filename.startswith(OURS):
        return origin
    while at and codes[at].co_filename.startswith(OURS):
        at -= 1
    return codes[at], vm.frames[at].index - 1


def _can_be_taken_up(vm: Interpreter, after: str) -> bool:
    """Say whether all frames stand at instructions that `drive` can finish."""
    waiting = [frame.program.instructions[frame.index - 1].op for frame in vm.frames]
    return all(op in RESUMABLE for op in waiting[:-1]) and (after in ("redo", "next") or waiting[-1] in LAST)
