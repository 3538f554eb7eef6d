"""Sites, where segments begin, and the calls that find a record or make one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.fx

from ladder.capture.frames import NO_OVERRIDE, Frame
from ladder.capture.segment import Check, Segment
from ladder.capture.tensors import modes_are_active

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
MAX_RECORDS = 32
MAX_FAILURES = 12
MISSES_BEFORE_LIFTING = 1


class Signal:
    """What a record's function gives in place of a site."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


FAILED = Signal("an operator of the graph raised")


@dataclass(frozen=True)
class Layout:
    """How the values at a site make up one frame."""

    code: CodeType
    index: int
    names: tuple[str, ...]
    depth: int
    override: bool
    handled: int
    namespace: int

    def values(self, frame: Frame) -> list[Any]:
        """Return the values of `frame`, in the order that `restore` takes."""
        override = [frame.override] if self.override else []
        return [
            frame.function,
            *(frame.slots[name] for name in self.names),
            *frame.stack[: self.depth],
            *override,
            *frame.handled,
        ]

    @property
    def size(self) -> int:
        """How many values make up the frame."""
        return 1 + len(self.names) + self.depth + self.override + self.handled

    def restore(self, values: list[Any]) -> Frame:
        """Make the frame again."""
        frame = Frame(values[0], dict(zip(self.names, values[1:], strict=False)))
        frame.index = self.index
        at = 1 + len(self.names)
        frame.stack = list(values[at : at + self.depth])
        at += self.depth
        frame.override = values[at] if self.override else NO_OVERRIDE
        frame.handled = list(values[at + self.override :])
        return frame


@dataclass(eq=False)
class Record:
    """A guard, a graph and a mock; `run` is all three in one function.

    ``run(*roots)`` returns the number of the check that failed, or a pair of what comes next;
    ``check(*roots)`` is the guard alone. `pinned`: the ids of the objects of the program that it holds.
    """

    run: Callable[..., Any]
    check: Callable[..., Any]
    checks: list[Check]
    source: str
    graph: torch.fx.GraphModule | None
    operators: int
    split: str
    site: Site
    pinned: frozenset[int]


class Site:
    """A point of the program where a segment begins: the entry, or what follows a split."""

    def __init__(self, captured: Captured, layouts: tuple[Layout, ...], after: str, names: list[str]) -> None:
        self.captured = captured
        self.layouts = layouts
        self.after = after
        self.names = names
        self.records: list[Record] = []
        self.runs: list[Callable[..., Any]] = []
        self.lifted: set[str] = set()
        self.unliftable: set[str] = set()
        self.misses: dict[str, int] = {}
        self.poisoned: set[tuple[Any, int]] = set()
        self.failures: list[str] = []
        self.dead = False

    def add(self, record: Record) -> None:
        """Keep `record`; the newest is tried first."""
        self.records.insert(0, record)
        self.runs.insert(0, record.run)

    def note_failure(self, why: str, origin: Any) -> None:
        """Note that a recording from here failed; give up where nothing can be done otherwise."""
        self.failures.append(why)
        if (
            origin is None
            or origin[0] is None
            or origin in self.poisoned
            or len(self.failures) > MAX_FAILURES
        ):
            self.dead = True
        else:
            self.poisoned.add(origin)

    def learn(self, roots: tuple[Any, ...]) -> None:
        """Lift the scalars and extents whose guards have missed repeatedly."""
        for record in list(self.records):
            failed = record.check(*roots)
            if type(failed) is int and failed > 0:
                check = record.checks[failed - 1]
                if check.holds in record.pinned:
                    self.captured.forget(check.holds)
                failed = (check.path,) if check.path is not None else ()
            elif type(failed) is tuple and not self.captured.lifts_shapes:
                failed = ()
            for path in failed if type(failed) is tuple else ():
                self.misses[path] = self.misses.get(path, 0) + 1
                if self.misses[path] > MISSES_BEFORE_LIFTING and path not in self.unliftable:
                    self.lifted.add(path)


class Attempt(NamedTuple):
    """A call that no record serves to its end: where it began, where it stands, and with what."""

    entry: Site
    here: Site
    roots: tuple[Any, ...]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class Captured:
    """A function that capture watches; call it as the function itself.

    Parameters
    ----------
    function
        A Python function, method, `torch.nn.Module` or other callable.
    backend
        ``backend(graph_module, example_inputs)`` returns what runs a graph; by default the graph
        runs operator by operator, as it would have without capture. Where it has a true attribute
        ``dynamic_shapes``, extents that keep changing are left open: what runs the graph then gets
        tensors of other shapes than the examples, and extents as integers; ``graph_module.meta["open"]``
        holds the examples with symbols for what is open. Where its attribute ``numbers`` is false, other
        numbers that keep changing are given only as such symbols too. Where it has a true attribute
        ``loops``, iterations that match come as one node that calls `ladder.capture.loops.repeat`.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend | None = None) -> None:
        self.function = function
        self.backend: Backend = backend or run_as_is
        self.lifts_shapes = bool(getattr(self.backend, "dynamic_shapes", False))
        self.takes_numbers = bool(getattr(self.backend, "numbers", True))
        self.entries: dict[Any, Site] = {}
        self.sites: dict[Any, Site] = {}
        self.given_up = ""
        self.calls = {"recorded": 0, "eager": 0}
        self._lock = threading.RLock()
        from ladder.capture.prescan import reason_not_to_capture

        self.given_up = reason_not_to_capture(function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function: by a record that matches, else recording one."""
        site = self.entries.get((len(args), *kwargs)) if kwargs else self.entries.get(len(args))
        if site is None:
            site = self._enter(args, kwargs)
        roots: tuple[Any, ...] = (*args, *kwargs.values()) if kwargs else args
        here = site
        while True:
            for run in here.runs:
                found = run(*roots)
                if found.__class__ is tuple:
                    break
            else:
                return self._miss(Attempt(site, here, roots, args, kwargs))
            following, value = found
            if following is None:
                return value
            if following.__class__ is Site:
                here, roots = following, value
            else:
                return self._interrupted(Attempt(site, here, roots, args, kwargs))

    def open(self, paths: set[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Leave extents open from the first call with such arguments on, given by their paths."""
        site = self._enter(args, kwargs)
        site.lifted |= paths

    def _enter(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Site:
        key = (len(args), *kwargs) if kwargs else len(args)
        names = [f"args[{index}]" for index in range(len(args))] + list(kwargs)
        return self.entries.setdefault(key, Site(self, (), "", names))

    def _miss(self, attempt: Attempt) -> Any:
        """Run on, recording if that may help later calls."""
        here = attempt.here
        record = not (here.dead or self.given_up or modes_are_active()) and self._lock.acquire(blocking=False)
        try:
            if record and len(here.records) >= MAX_RECORDS:
                here.dead = True
            return self._run_on(attempt, record=bool(record) and not here.dead)
        finally:
            if record:
                self._lock.release()

    def _interrupted(self, attempt: Attempt) -> Any:
        """Carry on, without recording, where an operator of a graph raised."""
        failures = attempt.here.failures
        failures[:] = [*failures[-MAX_FAILURES:], FAILED.name]
        return self._run_on(attempt, record=False)

    def _run_on(self, attempt: Attempt, *, record: bool) -> Any:
        from ladder.capture.record import continue_run, start_run

        entry, here, roots, args, kwargs = attempt
        if here is not entry:
            if here.dead:
                why = f"a continuation cannot be recorded: {here.failures[-1:]}"
                self.given_up = self.given_up or why
            return continue_run(self, here, roots, record=record)
        if not record:
            self.calls["eager"] += 1
            return self.function(*args, **kwargs)
        here.learn(roots)
        self.calls["recorded"] += 1
        return start_run(self, here, args, kwargs)

    def site(self, layouts: tuple[Layout, ...], after: str, names: list[str]) -> Site:
        """Return the site of frames with `layouts`."""
        key = (layouts, after)
        if key not in self.sites:
            self.sites[key] = Site(self, layouts, after, names)
        return self.sites[key]

    def forget(self, pinned: int) -> None:
        """Drop the records that hold an object which is no longer where it was: it may die now."""
        for site in (*self.entries.values(), *self.sites.values()):
            site.records = [record for record in site.records if pinned not in record.pinned]
            site.runs = [record.run for record in site.records]

    # what was captured ------------------------------------------------------------------------
    @property
    def records(self) -> list[Record]:
        """All records, those of the entry first."""
        return [record for site in (*self.entries.values(), *self.sites.values()) for record in site.records]

    @property
    def graphs(self) -> list[torch.fx.GraphModule]:
        """The operator graphs of all records."""
        return [record.graph for record in self.records if record.graph is not None]

    @property
    def outcome(self) -> str:
        """``whole``, ``split``, ``eager`` (not captured at all) or ``new`` (not called yet)."""
        entries = [record for site in self.entries.values() for record in site.records]
        if not entries:
            return "eager" if self.given_up or any(site.failures for site in self.entries.values()) else "new"
        return "split" if any(record.split for record in self.records) else "whole"

    def explain(self) -> str:
        """Return what was captured, what each guard checks, what was split, and why."""
        from ladder.capture.explain import explain

        return explain(self)


def run_as_is(module: torch.fx.GraphModule, examples: list[Any]) -> Callable[..., Any]:
    """Run a graph operator by operator."""
    forward: Callable[..., Any] = module.forward
    return forward


run_as_is.dynamic_shapes = True  # type: ignore[attr-defined]
run_as_is.loops = True  # type: ignore[attr-defined]


__all__ = ["FAILED", "Captured", "FunctionType", "Layout", "Record", "Segment", "Site"]
