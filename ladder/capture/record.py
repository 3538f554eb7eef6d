"""From a finished segment to a record, and the runs that make segments."""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ladder.capture.branches import Branches, Joined
from ladder.capture.core import Leaving
from ladder.capture.emit import emit, raise_ending, return_ending, split_ending
from ladder.capture.errors import trimmed
from ladder.capture.frames import NO_OVERRIDE, Frame, Through
from ladder.capture.heap import Heap
from ladder.capture.kinds import by_identity, is_a
from ladder.capture.liveness import live_names
from ladder.capture.nodes import CaptureError
from ladder.capture.shapes import Shapes
from ladder.capture.sites import Captured, Layout, Pending, Record, Site
from ladder.capture.tensors import modes_are_active
from ladder.capture.trace import Trace


class Plan:
    """The end of a segment: a call that is made natively, and the site that follows it."""

    def __init__(
        self, site: Site, failure: Site, call: str, roots: list[str], uses: set[str], places: list[Any]
    ) -> None:
        self.site = site
        self.failure = failure
        self.call = call
        self.roots = roots
        self.uses = uses
        self.places = places
        self.why = ""
        self.where: tuple[str, ...] = ()


class Followed(Leaving):
    """Raised through the frames before a split: records serve what follows from `site` on."""

    def __init__(self, site: Site, roots: tuple[Any, ...]) -> None:
        super().__init__()
        self.pending = Pending(site, roots)


class Recorder(Branches):
    """A machine that begins, plans and finishes segments."""

    def begin(self, site: Site, roots: list[Any], names: list[str]) -> list[Any]:
        """Begin a segment at `site`; return `roots`, with lifted scalars made dynamic."""
        self.site = site
        self.anew(site.lifted - site.unliftable)
        self.root_count = len(roots)
        self.heap.guard.meet_state()
        self.recording = not modes_are_active()
        self.side = site.meet_side(roots)
        self.beside = site.sides(tuple(roots[:-1])) if self.side is not None else {}
        if not site.layouts:
            self.heap.arguments.update(map(id, roots))
        return [
            self.heap.add_root(f"r{at}", value, name)
            for at, (value, name) in enumerate(zip(roots, names, strict=True))
        ]

    def plan(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], after: str) -> Plan:
        """Prepare the end of the segment before a call."""
        heap = self.heap
        uses: set[str] = set()
        layouts, roots, names = [], [], []
        for depth, frame in enumerate(self.frames):
            layout = layout_of(frame, after if depth == len(self.frames) - 1 else "push")
            layouts.append(layout)
            values = layout.values(frame)
            roots += [heap.reference(value, uses) for value in values]
            labels = ["function", *layout.names, *(f"stack[{n}]" for n in range(len(values)))]
            names += [f"{frame.code.co_name}.{label}" for label in labels[: len(values)]]
        inner = function.call if is_a(function, Through) else function
        callee = heap.reference(inner, uses)
        texts = [heap.reference(item, uses) for item in args]
        texts += [f"{key}={heap.reference(item, uses)}" for key, item in kwargs.items()]
        if is_a(function, Through) and function.outers:
            wrapped = Through([], None)
            wrapped.outers = function.outers
            stand_ins = heap.constant(wrapped.beneath)
            call = f"{stand_ins}({', '.join([callee, *texts])})"
        else:
            call = f"{callee}({', '.join(texts)})"
        site = self.captured.site(tuple(layouts), after, [*names, "result"])
        failure = self.captured.site(tuple(layouts), "raise", [*names, "error"])
        return Plan(site, failure, call, roots, uses, list(self.frames))

    def close(self, plan: Plan) -> bool:
        """End the segment as planned, before the call: nothing of ours runs in the state it leaves."""
        assert self.site is not None
        try:
            self.site.add(emit(self, split_ending(self.heap, plan), plan), self.beside)
        except CaptureError as error:
            self.stop(str(error), getattr(error, "origin", None))
            return False
        self.recording = False
        self.used_dynamic |= self.heap.uses_dynamic
        self.anew(set())
        return True

    def anew(self, lifted: set[str]) -> None:
        """Begin with nothing read, made or computed."""
        shapes = Shapes()
        self.heap = Heap(shapes, lifted, numbers=self.captured.takes_numbers)
        self.trace = Trace(shapes)

    def open(self, plan: Plan, result: Any) -> Any:
        """Begin the segment that follows the call, which gave or raised `result`.

        Raises
        ------
        Followed
            Where that has been recorded before: the program has run to its end.
        """
        site = plan.failure if is_a(result, BaseException) else plan.site
        values = [value for frame, layout in self.pairs(plan) for value in layout.values(frame)]
        values = [self.unlifted(value) for value in values]
        if site is plan.site and self._is_recorded(site, (*values, result)):
            raise Followed(site, (*values, result))
        if self.captured.is_full(site):
            self.stop("too many records")
            return result
        found = self.begin(site, [*values, result], site.names)
        self.heap.find(result)
        self._put_back(plan, found)
        return found[-1]

    def _is_recorded(self, site: Site, roots: tuple[Any, ...]) -> bool:
        """Say whether a record serves what follows, with no exception being handled meanwhile."""
        handles = any(frame.handled for frame in self.frames)
        return not handles and any(record.check(*roots) == 0 for record in site.records)

    def _put_back(self, plan: Plan, values: list[Any]) -> None:
        at = 0
        for frame, layout in self.pairs(plan):
            taken = values[at : at + layout.size]
            at += layout.size
            # Names that are not live are dropped: they might still hold what no record can make.
            frame.slots = dict(zip(layout.names, taken[1:], strict=False))
            frame.stack[: layout.depth] = taken[1 + len(layout.names) : 1 + len(layout.names) + layout.depth]

    def complete(self, result: Any) -> Any:
        """End the last segment: the program returns `result`."""
        if self.recording and self.site is not None:
            try:
                self.site.add(emit(self, return_ending(self.heap, result)), self.beside)
            except CaptureError as error:
                self.stop(str(error), getattr(error, "origin", None))
        self.recording = False
        return self.plain_deep(result)

    def complete_joined(self, joined: Joined) -> Any:
        """End the last segment, which went through both sides of a branch."""
        assert self.site is not None
        try:
            self.site.add(emit(self, joined.ending), self.beside)
            self.captured.prune()
        except CaptureError as error:
            for site in joined.ending.branches:
                site.attempts += 1
            self.site.failures.append(str(error))
        self.recording = False
        return self.plain_deep(joined.result)

    def carry_out(self, run: Any, *args: Any) -> Any:
        """Do ``run(*args)``, the rest of the program, and end the last segment with what comes of it."""
        try:
            return self._carried_out(run, *args)
        finally:
            # What only the recording holds must die now.
            self.heap.release()
            self.trace.release()
            self.frames = []

    def _carried_out(self, run: Any, *args: Any) -> Any:
        try:
            result = run(*args)
        except Joined as joined:
            return self.complete_joined(joined)
        except Followed as followed:
            return followed.pending
        except Exception as error:
            if self.recording and self.site is not None:
                try:
                    self.site.add(emit(self, raise_ending(self.heap, error)), self.beside)
                except CaptureError as reason:
                    self.site.failures.append(str(reason))
            error.__traceback__ = trimmed(error.__traceback__)
            raise
        return self.complete(result)

    def plain_deep(self, value: Any) -> Any:
        """Return what the caller gets: no dynamic scalars."""
        return self.unlifted(value)


def layout_of(frame: Frame, after: str) -> Layout:
    """Return how `frame` is taken up again after a split."""
    index = frame.index - 1 if after == "redo" else frame.index
    live = live_names(frame.program, frame.index - 1 if after in ("redo", "next") else frame.index)
    handler = frame.program.handler_of(frame.index - 1)
    if handler is not None:  # the call may raise
        live |= live_names(frame.program, handler.target)
    names = tuple(name for name in frame.slots if name in live)
    override = frame.override is not NO_OVERRIDE
    depth, handled = len(frame.stack), len(frame.handled)
    return Layout(frame.code, index, names, depth, override, handled, id(frame.names))


def start_run(captured: Captured, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the whole function, recording."""
    machine = Recorder(captured)
    roots = machine.begin(site, [*args, *kwargs.values()], site.names)
    machine.heap.pin(captured.function)
    given = tuple(roots[: len(args)])
    named = dict(zip(kwargs, roots[len(args) :], strict=True))
    return machine.carry_out(machine.call, captured.function, given, named)


def continue_run(captured: Captured, site: Site, roots: tuple[Any, ...], *, record: bool) -> Any:
    """Run on from a split, recording if `record`."""
    machine = Recorder(captured)
    values = list(roots)
    if record:
        site.learn(roots)
        values = machine.begin(site, values, site.names)
    if record:
        machine.heap.find(values[-1])
    if not site.layouts:
        return machine.carry_out(_raise if site.after == "raise" else _same, values[-1])
    frames, at = [], 0
    for layout in site.layouts:
        frames.append(layout.restore(values[at : at + layout.size]))
        at += layout.size
    error = values[at] if site.after == "raise" else None
    return machine.carry_out(machine.drive, frames, site.after, values[at], error)


def _same(value: Any) -> Any:
    return value


def _raise(error: BaseException) -> Any:
    raise error


__all__ = ["Plan", "Record", "Recorder", "by_identity", "continue_run", "start_run", "torch"]
