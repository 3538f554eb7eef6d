"""What has been recorded of one function: records, by the resume points where their segments begin."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.fx

from ladder.capture.heap.nodes import Check
from ladder.capture.python.bytecode import program_of
from ladder.capture.python.frames import user_line
from ladder.capture.python.layout import Layout
from ladder.capture.python.prescan import Unfollowed, reason_not_to_capture
from ladder.capture.trace.assumptions import Assumed, Assumption
from ladder.capture.values.expected import expected_open, numbering_extents, open_extents, shapes_of
from ladder.capture.values.shapes import LEAST_OPEN
from ladder.faults import place_of_fault

log = logging.getLogger("ladder.capture")

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
MAX_RECORDS = 32
"""Most records at one resume point."""
MAX_REPEATED = 128
"""Most records at a resume point that one call reaches repeatedly, as in a loop."""
MAX_POINTS = 2048
MAX_FAILURES = 24
MISSES_BEFORE_LIFTING = 1
MISSES_BEFORE_REWRITTEN = 0
MISSES_BEFORE_EXTENTS = 0
MAX_ATTEMPTS = 20
"""How often the records before one branch are dropped to record both sides together."""
MAX_SURPRISES = 3
"""How often one side of a branch is taken after the other was recorded alone."""
CALLS_BEFORE_RECORDING = 32
"""Calls of a case that needs a record of its own before it is recorded: about what recording costs."""
MAX_PASSED = 1024
"""Cases whose calls are counted."""
OPEN_CALLS_PER_LOOK = 8
"""Calls in a row by a record for open sizes after which those for fixed ones are looked at again."""
DEEPEST = 3
"""Greatest nesting of conditionals with two known sides: the number of paths doubles with each."""
MOST_NESTED = 12
"""Greatest nesting of conditionals, also of those with one known side, such as checks."""


class Signal:
    """A value that a record's function returns instead of a resume point."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name


FAILED = Signal("an operator of the graph raised")


def failure(error: Exception) -> tuple[Exception, str]:
    """Return a graph's error, without its frames, which keep objects alive, and where it was raised."""
    place = place_of_fault(error)
    error.__context__ = error.__cause__ = None
    return error.with_traceback(None), place


@dataclass(eq=False)
class Record:
    """A guard, a graph and a mock; `run` is all three in one function.

    ``run(*roots)`` returns the number of the check that failed, or a pair of what comes next;
    ``check(*roots)`` is the guard alone: 0, or what failed, as `heap.guard_lines` says.
    `pinned`: the ids of the program's objects that it keeps alive.
    `rewritten`: the paths of values that its guard checks and its mock replaces.
    `assumed`: the numbers computed by its graph that it assumes to be those of the recorded run.
    `calls_cached`: whether its guard calls functions behind `functools.cache`.
    `where`: the lines of all frames at its graph break, the innermost last.
    `follows`: the resume points that may come next. `unseen`: whether it ends the program, or at another
    branch, and changes nothing but the roots `changed`. `handed`: as `heap.mock.handed_roots` says.
    `side`: which side of a branch it is, if it begins at one. `depth`, `branches`: as in `Ending`.
    """

    run: Callable[..., Any]
    check: Callable[..., Any]
    checks: list[Check]
    source: str
    graph: torch.fx.GraphModule | None
    operators: int
    point: ResumePoint
    pinned: frozenset[int] = frozenset()
    rewritten: tuple[str, ...] = ()
    split: str = ""
    where: tuple[str, ...] = ()
    follows: tuple[ResumePoint, ...] = ()
    unseen: bool = False
    changed: frozenset[int] = frozenset()
    handed: tuple[int | None, ...] = ()
    assumed: Assumed | None = None
    calls_cached: bool = False
    side: bool | None = None
    depth: int = 0
    branches: frozenset[ResumePoint] = frozenset()

    def rewrites(self, path: str) -> bool:
        """Say whether its mock replaces the value at `path`, or an object that contains it."""
        return any(path == each or path.startswith((f"{each}[", f"{each}.")) for each in self.rewritten)

    def assumes(self, here: Any) -> bool:
        """Say whether it assumes the value of the number that was read at an instruction."""
        return self.assumed is not None and any(item.here == here for item in self.assumed.numbers)

    @property
    def is_open(self) -> bool:
        """Whether its graph has open sizes."""
        return self.graph is not None and "open" in self.graph.meta

    def changes(self, met: dict[Record, set[int] | None] | None = None) -> set[int] | None:
        """Return the indices of the roots that a run from here to the end changes; None if unknown."""
        met = {} if met is None else met
        if not self.unseen or len(met) >= MAX_RECORDS:
            return None
        if self not in met:  # what is known of records: loops come back to them
            met[self] = set()
            later = [each.changes(met) for point in self.follows[:1] for each in point.known()]
            numbers = {number for found in later for number in found or () if number < len(self.handed)}
            found = {*self.changed, *(self.handed[number] for number in numbers)}
            known = None not in later and None not in found
            met[self] = {number for number in found if number is not None and number >= 0} if known else None
        return met[self]

    def serves(self, values: tuple[Any, ...]) -> bool:
        """Say whether this record of one side of a branch holds for other `values` at the branch."""
        return bool(self.check(*values, self.side) == 0)


class ResumePoint:
    """A point of the program where a segment begins: the entry, or what follows a graph break."""

    def __init__(self, store: Store, layouts: tuple[Layout, ...], after: str, names: list[str]) -> None:
        self.store = store
        self.layouts = layouts
        self.after = after
        self.names = names
        self.records: list[Record] = []
        self.spare: list[Record] = []
        self.parked: list[Record] = []
        self.runs: list[Callable[..., Any]] = []
        self.lifted: set[str] = set()
        self.expects = False
        self.passed: Counter[tuple[Any, ...]] = Counter()
        self.settled: dict[tuple[Any, ...], set[str]] = {}
        self.misses: dict[str, int] = {}
        self.poisoned: set[tuple[Any, int]] = set()
        self.failures: list[str] = []
        self.surprises_at: Counter[Any] = Counter()
        self.surprising: set[Any] = set()
        self.mixed = False
        """Whether there are records for open sizes, and for fixed ones."""
        self.in_turn = 0
        """Calls in a row by a record for open sizes."""
        self.dead = False
        self.forks = False
        self.attempts = self.surprises = 0
        self.paused = False

    def place(self) -> str:
        """Return the line of the program where segments begin here."""
        if not self.layouts:
            return "entry"
        frames = [
            (layout.code, program_of(layout.code).instructions[layout.index - 1]) for layout in self.layouts
        ]
        return user_line([f"{code.co_filename}:{item.line} {code.co_name}" for code, item in frames])

    def add(self, record: Record, beside: dict[bool, Record]) -> None:
        """Keep `record`; the newest is tried first. `beside`: the sides of a branch known before."""
        self.keep_only([record, *self.records])
        self.parked = []
        if record.side is not None and self.may_join({**beside, record.side: record}):
            self.attempts += 1
            self.store.drop_before(self)

    def known(self) -> list[Record]:
        """Return all records from here, also those that no call reaches any more: they describe branches."""
        return [*self.records, *self.spare]

    def take_back(self) -> None:
        """Use the records again that were dropped to record both sides of a branch together."""
        self.keep_only([*self.records, *self.parked])
        self.parked = []

    def keep_only(self, records: Iterable[Record]) -> None:
        """Drop all records but these."""
        self.records = list(records)
        self.runs = [record.run for record in self.records]
        self.mixed = len({record.is_open for record in self.records if record.graph is not None}) > 1

    def note_served(self, run: Callable[..., Any], roots: tuple[Any, ...]) -> None:
        """Move a record of fixed sizes to the front where one serves the calls that come.

        Its plan is faster, but for calls of other sizes its guard is checked for nothing.
        """
        served = next((record for record in self.records if record.run is run), None)
        self.in_turn = self.in_turn + 1 if served is not None and served.is_open else 0
        if served is None or self.in_turn < OPEN_CALLS_PER_LOOK:
            return
        self.in_turn = 0
        fixed = (record for record in self.records if record.graph is not None and not record.is_open)
        best = next((record for record in fixed if record.check(*roots) == 0), served)
        if best is not self.records[0]:
            self.keep_only([best, *(record for record in self.records if record is not best)])

    def meet_side(self, roots: list[Any]) -> bool | None:
        """Return which side of a branch begins here, if one does; drop records of the other side alone."""
        if not self.forks or type(roots[-1]) is not bool:
            return None
        if self.store.knows_one_side(self):
            self.surprises += 1
            self.store.drop_before(self)
        return bool(roots[-1])

    def sides(self, values: tuple[Any, ...]) -> dict[bool, Record]:
        """Return the records of the sides of a branch that serve `values` here."""
        found: dict[bool, Record] = {}
        for record in self.known():
            if record.side is not None and record.side not in found and record.serves(values):
                found[record.side] = record
        return found

    def may_join(self, sides: dict[bool, Record]) -> bool:
        """Say whether the known sides of a branch, one or both, may be recorded in one graph."""
        few = len(sides) == 1 and self.surprises >= MAX_SURPRISES
        unseen = all(record.unseen and record.depth < DEEPEST for record in sides.values())
        return bool(sides) and unseen and not few and self.attempts < MAX_ATTEMPTS

    def note_leave(self, why: str) -> None:
        """Note a recording dropped since the program sees when objects die; the second disables the point."""
        self.dead = why in self.failures
        self.failures.append(why)

    def note_failure(self, why: str, origin: Any) -> None:
        """Note that a recording from here failed; disable the point where no other recording is possible.

        The first is tried again as it is: a library's first call may have set up what it lacked.
        """
        known, again = origin is not None and origin[0] is not None, why in self.failures
        self.failures.append(why)
        if (again and (not known or origin in self.poisoned)) or len(self.failures) > MAX_FAILURES:
            self.dead = True
            self.take_back()
        elif known and again:
            self.poisoned.add(origin)

    def note_surprise(self, assumed: Assumed, met: Assumption) -> None:
        """Note that a number differs from a record's assumption; it is then tried last, or dropped."""
        self.surprises_at[met.here] += 1
        if self.surprises_at[met.here] >= met.most:
            self.surprising.add(met.here)
            self.keep_only(record for record in self.records if not record.assumes(met.here))
        else:
            self.keep_only(sorted(self.records, key=lambda record: record.assumed is assumed))

    def expect(self, roots: tuple[Any, ...]) -> None:
        """Leave the sizes and numbers open, from the first record on, that programs with a cache change."""
        self.lifted |= expected_open(self.names, roots)
        self.expects = bool(self.lifted)

    def alike(self, roots: Sequence[Any]) -> frozenset[int]:
        """Return the open extents of arguments; extents equal to these are open within objects too."""
        lifted = self.lifted - self.unliftable(roots)
        return open_extents(self.names, roots, lifted) if self.expects else frozenset()

    def unliftable(self, roots: Sequence[Any]) -> set[str]:
        """Return the paths that could not be left open in calls whose extents of 1 and 0 are this one's."""
        return self.settled.setdefault(_kind(roots), set())

    def is_passing(self, roots: tuple[Any, ...]) -> bool:
        """Say whether a call of a program with a cache is not recorded yet because its case is rare.

        Its extents of 1 are those of a recorded call, and either sizes differ that cannot be left open, or
        other checks of all records fail too, after the empty and the filled cache have been recorded.
        """
        if not self.expects or _kind(roots) not in self.settled:
            return False
        known = self.unliftable(roots)
        told = [(record, *failed) for record in self.records if (failed := _told(record, roots))]
        if any(paths & known and (not other or other.path in known) for _, paths, other in told):
            case: tuple[Any, ...] = shapes_of(roots)
        elif any(o and o.path and not paths & known and each.rewrites(o.path) for each, paths, o in told):
            return False  # a first call, which set what no later one will find so, is no case of its own
        elif told and len(self.store.records) > 1 and all(other for *_, other in told):
            case = tuple(other.why for *_, other in told if other)
        else:
            return False
        if len(self.passed) >= MAX_PASSED:
            self.passed.clear()
        self.passed[case] += 1
        return self.passed[case] <= CALLS_BEFORE_RECORDING

    def learn(self, roots: tuple[Any, ...]) -> None:
        """Lift scalars whose guards failed repeatedly, and extents whose guards failed once.

        Where the guard of a value that a record replaces failed, all values that it replaces are lifted.
        """
        for record in list(self.records):
            failed = record.check(*roots)
            if failed == 0:
                continue
            numbers, other, extents = failed
            self._note_misses(self._with_numbering(roots, extents), MISSES_BEFORE_EXTENTS, roots)
            # Where something else fails too, the record is of another case: what failed first tells.
            told = [*numbers, other][:1] if other else numbers
            checks = [record.checks[number - 1] for number in told]
            for check in checks:
                if check.holds in record.pinned:
                    self.store.forget(check.holds)
            paths = tuple(check.path for check in checks if check.path is not None)
            if any(map(record.rewrites, paths)):
                self._note_misses((*paths, *record.rewritten), MISSES_BEFORE_REWRITTEN, roots)
            else:
                self._note_misses(paths, MISSES_BEFORE_LIFTING, roots)

    def _with_numbering(self, roots: tuple[Any, ...], extents: tuple[str, ...]) -> tuple[str, ...]:
        """Return the extents to lift: those that differ; if one is of token numbers, all of those."""
        if not self.store.lifts_shapes:
            return ()
        numbering = numbering_extents(self.names, roots)
        return tuple({*extents, *numbering}) if numbering.intersection(extents) else extents

    def _note_misses(self, paths: tuple[str, ...], enough: int, roots: tuple[Any, ...]) -> None:
        unliftable = self.unliftable(roots)
        for path in paths:
            self.misses[path] = self.misses.get(path, 0) + 1
            if self.misses[path] > enough and path not in unliftable:
                self.lifted.add(path)


def _kind(roots: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of arguments with all extents that can be open made equal; 1 and 0 stay."""
    return tuple(tuple(min(extent, LEAST_OPEN) for extent in shape) for shape in shapes_of(roots))


def _told(record: Record, roots: tuple[Any, ...]) -> tuple[set[str | None], Check | None] | None:
    """Return the paths that differ from a record, and the failing check of no number; None if it holds."""
    failed = record.check(*roots)
    if failed == 0:
        return None
    numbers, other, extents = failed
    checks = [record.checks[number - 1] for number in (*numbers, *([other] if other else []))]
    return {*extents, *(check.path for check in checks if check.path)}, checks[-1] if other else None


class Pending(NamedTuple):
    """The resume point that a run reached without a record for it, and the values there."""

    point: ResumePoint
    roots: tuple[Any, ...]


class Store:
    """All that has been recorded of one function.

    entries: The point where the function begins, by how it is called; `sites`: those that follow a graph
        break.
    tells_compiling: Whether a program that asks is told that a compiler traces it.
    begins_again: Whether one that was told so and raises an error is run once more as it is.
    given_up: Why calls run without capture; empty if they do not. `left_out`: code that runs as it is.
    """

    def __init__(self, function: Callable[..., Any], backend: Backend) -> None:
        self.function = function
        self.backend = backend
        self.lifts_shapes = bool(getattr(backend, "dynamic_shapes", False))
        self.joins = bool(getattr(backend, "conditionals", False))
        self.takes_numbers = bool(getattr(backend, "numbers", True))
        self.entries: dict[Any, ResumePoint] = {}
        self.sites: dict[Any, ResumePoint] = {}
        self.tells_compiling = self.begins_again = True
        self.given_up = reason_not_to_capture(function)
        self.calls = {"recorded": 0, "eager": 0}
        self.seconds = 0.0
        self.warned = False
        self.counts_cached_calls = False
        self.left_out: set[Unfollowed] = set()

    def all_points(self) -> tuple[ResumePoint, ...]:
        """Return all resume points, the entries first."""
        return (*self.entries.values(), *self.sites.values())

    def give_up(self, why: str) -> None:
        """Run the function without capture from now on; the first reason is kept."""
        self.given_up = self.given_up or why

    def totals(self) -> tuple[int, int, float]:
        """Return calls recorded, calls that ran eagerly, and seconds of recording and compiling."""
        return self.calls["recorded"], self.calls["eager"], self.seconds

    def spent(self, seconds: float) -> None:
        """Note how long recording and compiling took."""
        self.seconds += seconds

    def is_full(self, point: ResumePoint) -> bool:
        """Say whether there are too many records; the function then runs without capture."""
        held = sum(len(each.records) for each in self.sites.values())
        if len(point.records) >= MAX_REPEATED:
            why = f"more than {MAX_REPEATED} records at one point of it"
        elif max(len(self.sites), held) > MAX_POINTS:
            why = f"more than {MAX_POINTS} points at which its graph breaks, or records of what follows"
        else:
            return False
        self.give_up(why)
        for each in self.all_points():
            each.keep_only(())
            each.spare, each.parked = [], []
        self.sites.clear()
        self.warn(why)
        return True

    def warn(self, why: str) -> None:
        """Log, once, that calls run without capture from now on."""
        if not self.warned:
            name = getattr(self.function, "__qualname__", type(self.function).__qualname__)
            log.warning("%s: %s; calls that no record serves run without capture", name, why)
        self.warned = True

    def point(self, layouts: tuple[Layout, ...], after: str, names: list[str]) -> ResumePoint:
        key = (layouts, after)
        if key not in self.sites:
            self.sites[key] = ResumePoint(self, layouts, after, names)
        return self.sites[key]

    def forget(self, pinned: int) -> None:
        """Drop the records that hold an object which is no longer where it was: it may die now."""
        for point in self.all_points():
            point.keep_only(record for record in point.records if pinned not in record.pinned)
            point.spare = [record for record in point.spare if pinned not in record.pinned]
            point.parked = [record for record in point.parked if pinned not in record.pinned]

    def count_cached_calls(self) -> None:
        """Drop records whose guards call cached functions: the program counts such calls."""
        self.counts_cached_calls = True
        for point in self.all_points():
            point.keep_only(record for record in point.records if not record.calls_cached)

    def drop_before(self, branch: ResumePoint) -> None:
        """Set aside the records that end at a branch, or contain one side of it alone."""
        for point in self.all_points():
            dropped = [record for record in point.records if branch in record.branches]
            if dropped and not point.dead and not self.given_up:
                point.parked = dropped
                point.keep_only(record for record in point.records if branch not in record.branches)
                point.spare = [*dropped, *point.spare][: MAX_RECORDS if point.forks else 0]

    def knows_one_side(self, branch: ResumePoint) -> bool:
        """Say whether a record goes through a branch and contains one side of it alone."""
        points = self.all_points()
        return any(branch in item.branches and not item.split for point in points for item in point.records)

    def prune(self) -> None:
        """Set aside the records that no call can reach any more."""
        reached: set[ResumePoint] = set()
        ahead = list(self.entries.values())
        while ahead:
            point = ahead.pop()
            if point not in reached:
                reached.add(point)
                ahead += [following for record in point.records for following in record.follows]
        for point in self.sites.values():
            if point not in reached and point.records:
                point.spare = point.known()[:MAX_RECORDS]
                point.keep_only(())

    @property
    def records(self) -> list[Record]:
        """All records, those of the entry first."""
        return [record for point in self.all_points() for record in point.records]

    @property
    def graphs(self) -> list[torch.fx.GraphModule]:
        """The operator graphs of all records."""
        return [record.graph for record in self.records if record.graph is not None]

    @property
    def outcome(self) -> str:
        """``whole``, ``split``, ``eager`` (not captured at all) or ``new`` (nothing recorded yet)."""
        entries = self.entries.values()
        if not any(point.records for point in entries):
            if self.given_up or any(point.failures for point in entries):
                return "eager"
            return "split" if any(point.records for point in self.sites.values()) else "new"
        return "split" if any(record.split for record in self.records) else "whole"

    def where_it_ran(self) -> list[str]:
        """Return a line for each graph that says what executes it."""
        return []
