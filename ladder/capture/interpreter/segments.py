"""Segments: where they begin, how they end at a graph break, and what follows."""

from __future__ import annotations

from typing import Any

import torch

from ladder.capture.heap.mock import refuse_unmade
from ladder.capture.heap.nodes import CaptureError, MockStep
from ladder.capture.interpreter.emit import emit
from ladder.capture.interpreter.endings import GraphBreak, Leaving, break_ending
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.frames import NO_OVERRIDE, Frame, Through, closes
from ladder.capture.python.layout import Layout
from ladder.capture.python.liveness import live_names
from ladder.capture.records import Pending, ResumePoint
from ladder.capture.values.kinds import is_a
from ladder.capture.values.tensors import modes_are_active


class Followed(Leaving):
    """Raised through the frames before a graph break: records serve what follows from `point` on."""

    def __init__(self, point: ResumePoint, roots: tuple[Any, ...]) -> None:
        super().__init__()
        self.pending = Pending(point, roots)


def finish(vm: Interpreter, graph_break: GraphBreak, result: Any) -> Any:
    """End the segment as planned after the call, and begin the next with `result`."""
    return open_segment(vm, graph_break, result) if close_segment(vm, graph_break) else result


def frame_pairs(graph_break: GraphBreak) -> list[tuple[Frame, Layout]]:
    """Return the frames at the end of a segment with their layouts."""
    return list(zip(graph_break.places, graph_break.point.layouts, strict=True))


def begin_segment(vm: Interpreter, point: ResumePoint, roots: list[Any], names: list[str]) -> list[Any]:
    """Begin a segment at `point`; return `roots`, with lifted scalars made dynamic."""
    vm.point = point
    closed = point.unliftable(roots)
    vm.begin(point.lifted - closed)
    vm.heap.alike, vm.heap.closed = point.alike(roots), closed
    vm.roots = len(roots)
    vm.heap.guard.meet_state()
    vm.recording = not modes_are_active()
    vm.side = point.meet_side(roots)
    vm.beside = point.sides(tuple(roots[:-1])) if vm.side is not None else {}
    if not point.layouts:
        vm.heap.arguments.update(map(id, roots))
    return [
        vm.heap.add_root(f"r{at}", value, name)
        for at, (value, name) in enumerate(zip(roots, names, strict=True))
    ]


def prepare_break(
    vm: Interpreter, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: str
) -> GraphBreak:
    """Prepare the end of the segment before a call."""
    heap = vm.heap
    uses: set[str] = set()
    layouts, roots, names = [], [], []
    for depth, frame in enumerate(vm.frames):
        layout = layout_of(frame, after if depth == len(vm.frames) - 1 else "push")
        layouts.append(layout)
        values = layout.values(frame)
        roots += [heap.reference(value, uses) for value in values]
        labels = ["function", *layout.names, *(f"stack[{n}]" for n in range(len(values)))]
        names += [f"{frame.code.co_name}.{label}" for label in labels[: len(values)]]
    inner = function.call if is_a(function, Through) else function
    callee = heap.reference(inner, uses)
    if is_a(function, Through) and function.outers:
        wrapped = Through([], None)
        wrapped.outers = function.outers
        call = heap.call_text(heap.constant(wrapped.beneath), (inner, *args), kwargs, uses)
    else:
        call = heap.call_text(callee, args, kwargs, uses)
    refuse_unmade(heap, uses)
    point = vm.store.point(tuple(layouts), after, [*names, "result"])
    failure = vm.store.point(tuple(layouts), "raise", [*names, "error"])
    return GraphBreak(point, failure, call, roots, uses, list(vm.frames))


def close_segment(vm: Interpreter, graph_break: GraphBreak) -> bool:
    """End the segment as planned, before the call: nothing of ours runs in the state it leaves."""
    assert vm.point is not None
    _push_again(vm)
    try:
        vm.point.add(emit(vm, break_ending(vm.heap, graph_break), graph_break), vm.beside)
    except CaptureError as error:
        vm.fail(error)
        return False
    vm.recording = False
    vm.push_modes()
    vm.used_dynamic |= vm.heap.uses_dynamic
    vm.heap.settle_texts()
    vm.begin(set())
    return True


def _push_again(vm: Interpreter) -> None:
    """Add the steps that put the modes of the segment in force at its end."""
    for mode in vm.modes:
        uses: set[str] = set()
        push = vm.heap.constant(torch._C._push_on_torch_function_stack)
        vm.heap.steps.append(MockStep(f"{push}({vm.heap.reference(mode, uses)})", None, uses, set(), True))


def open_segment(vm: Interpreter, graph_break: GraphBreak, result: Any) -> Any:
    """Begin the segment that follows the call, which gave or raised `result`.

    Raises Followed where that has been recorded before: the program has run to its end.
    """
    point = graph_break.failure if is_a(result, BaseException) else graph_break.point
    values = [value for frame, layout in frame_pairs(graph_break) for value in layout.values(frame)]
    values = [vm.unlifted(value) for value in values]
    if modes_are_active():  # they would see what is read of tensors here
        vm.give_up()
        return result
    if point is graph_break.point and _is_recorded(vm, point, (*values, result)):
        raise Followed(point, (*values, result))
    if any(map(closes, (*values, result))):  # it matters when they are dropped
        vm.give_up()
        return result
    if vm.store.is_full(point):
        vm.stop("too many records")
        return result
    point.learn((*values, result))
    found = begin_segment(vm, point, [*values, result], point.names)
    vm.heap.find(result)
    _put_back(graph_break, found)
    return found[-1]


def _is_recorded(vm: Interpreter, point: ResumePoint, roots: tuple[Any, ...]) -> bool:
    """Say whether a record serves what follows, with no exception being handled meanwhile."""
    handles = any(frame.handled for frame in vm.frames)
    return not handles and any(record.check(*roots) == 0 for record in point.records)


def _put_back(graph_break: GraphBreak, values: list[Any]) -> None:
    at = 0
    for frame, layout in frame_pairs(graph_break):
        taken = values[at : at + layout.size]
        at += layout.size
        # Names that are not live are dropped: they might still hold what no record can make.
        frame.slots = dict(zip(layout.names, taken[1:], strict=False))
        frame.stack[: layout.depth] = taken[1 + len(layout.names) : 1 + len(layout.names) + layout.depth]


def layout_of(frame: Frame, after: str) -> Layout:
    """Return how `frame` is resumed after a graph break."""
    index = frame.index - 1 if after == "redo" else frame.index
    live = live_names(frame.program, frame.index - 1 if after in ("redo", "next") else frame.index)
    handler = frame.program.handler_of(frame.index - 1)
    if handler is not None:  # the call may raise
        live |= live_names(frame.program, handler.target)
    names = tuple(name for name, value in frame.slots.items() if name in live or closes(value))
    override = frame.override is not NO_OVERRIDE
    depth, handled = len(frame.stack), len(frame.handled)
    return Layout(frame.code, index, names, depth, override, handled, id(frame.names))
