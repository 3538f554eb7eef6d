"""A kernel as instructions: straight runs of closures, branches and loops that may wait inside, and waits.

Statements that never wait are closures that run to their end under a mask of active threads. Only
control flow around waits becomes instructions with a counter, so that a cohort can stop anywhere
and split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ladder.simulate.cohort import Cohort, Cohorts, Frame, Wait
from ladder.simulate.values import Array, Value, is_array

Step = Callable[[Cohort], None]
Read = Callable[[Cohort], Value]


class Instruction(ABC):
    """One instruction; it moves the cohort's counter itself."""

    @abstractmethod
    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        """Execute for a cohort."""


@dataclass
class Run(Instruction):
    """Statements that never wait."""

    steps: Sequence[Step]

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        for step in self.steps:
            step(c)
        c.counter += 1


@dataclass
class Stop(Instruction):
    """A statement at which warps may have to wait; ``make`` returns what for, or None."""

    make: Callable[[Cohort], Wait | None]

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        c.wait = self.make(c)
        if c.wait is None:
            c.counter += 1


@dataclass
class Jump(Instruction):
    """Go to an instruction."""

    target: int = -1

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        c.counter = self.target


@dataclass
class Branch(Instruction):
    """Part threads: those for which the condition holds go on, the others to ``other``."""

    condition: Read
    other: int = -1
    has_other: bool = False

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        value = self.condition(c)
        if not is_array(value):
            c.frames.append(Frame(c.mask))
            c.counter = c.counter + 1 if value else self.other
            return
        yes, no = c.narrowed(value), c.narrowed(value, False)
        for part, chosen, rest in _parts(cohorts, c, yes, no):
            part.frames.append(Frame(part.mask, rest if rest is not None and self.has_other else None))
            part.counter = part.counter + 1 if chosen is yes else self.other
            rows = _rows_within(c, part)
            part.mask = _none_if_whole(chosen[rows])
            frame = part.frames[-1]
            frame.pending = None if frame.pending is None else frame.pending[rows]


def _rows_within(c: Cohort, part: Cohort) -> Array:
    return np.searchsorted(c.warps, part.warps) if part is not c else np.arange(c.count)


def _parts(cohorts: Cohorts, c: Cohort, yes: Array, no: Array) -> list[tuple[Cohort, Array, Array | None]]:
    """Split a cohort into warps that all go one way, all the other way, and both ways after each other."""
    some, none = yes.any(axis=1), no.any(axis=1)
    classes = [(some & ~none, yes, None), (~some, no, None), (some & none, yes, no)]
    wanted = [(np.flatnonzero(rows), chosen, rest) for rows, chosen, rest in classes if rows.any()]
    if len(wanted) == 1:
        return [(c, wanted[0][1], wanted[0][2])]
    # Splitting reads the whole cohort, so all parts are made before any of them changes.
    parts = cohorts.divide(c, [rows for rows, _, _ in wanted])
    return [(part, chosen, rest) for part, (_, chosen, rest) in zip(parts, wanted, strict=True)]


def _none_if_whole(mask: Array) -> Array | None:
    return None if mask.all() else mask


@dataclass
class Join(Instruction):
    """End of a branch: do the other side for threads that owe it, then go on together."""

    other: int = -1

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        frame = c.frames[-1]
        if frame.pending is not None:
            c.mask, frame.pending = frame.pending, None
            c.counter = self.other
            return
        c.frames.pop()
        c.mask = frame.mask
        c.counter += 1


@dataclass
class Enter(Instruction):
    """Begin a loop: remember who runs it, and set the loop variable (slot -1 for none)."""

    slot: int
    start: Read

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        c.frames.append(Frame(c.mask))
        if self.slot >= 0:
            c.slots[self.slot] = self.start(c)
        c.counter += 1


@dataclass
class Test(Instruction):
    """Leave a loop where its condition fails: whole warps split off, single lanes wait in the frame."""

    condition: Read
    exit: int = -1

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        value = self.condition(c)
        if not is_array(value):
            if value:
                c.counter += 1
            else:
                self._leave(c)
            return
        go = c.narrowed(value)
        some = go.any(axis=1)
        if some.all():
            parts = [(c, True)]
        elif not some.any():
            parts = [(c, False)]
        else:
            halves = cohorts.divide(c, [np.flatnonzero(some), np.flatnonzero(~some)])
            parts = list(zip(halves, (True, False), strict=True))
        for part, goes in parts:
            if not goes:
                self._leave(part)
                continue
            part.mask = _none_if_whole(go[_rows_within(c, part)] if part is not c else go)
            part.counter += 1

    def _leave(self, c: Cohort) -> None:
        c.mask = c.frames.pop().mask
        c.counter = self.exit


@dataclass
class Finish(Instruction):
    """The end of the kernel."""

    def execute(self, cohorts: Cohorts, c: Cohort) -> None:
        cohorts.end(c)


Program = list[Instruction]


@dataclass
class Node:
    """A translated statement: a tree that `flatten` turns into instructions where something waits."""

    waits: bool = False

    def step(self) -> Step:
        """Return a closure for a statement that never waits."""
        raise NotImplementedError

    def emit(self, out: Program) -> None:
        out.append(Run([self.step()]))


@dataclass
class Plain(Node):
    """One statement without control flow."""

    action: Step | None = None

    def step(self) -> Step:
        assert self.action is not None
        return self.action


@dataclass
class Waiting(Node):
    """A statement that waits."""

    make: Callable[[Cohort], Wait | None] | None = None

    def emit(self, out: Program) -> None:
        assert self.make is not None
        out.append(Stop(self.make))


@dataclass
class Sequence_(Node):
    """Statements one after the other."""

    nodes: Sequence[Node] = ()

    def step(self) -> Step:
        steps = [node.step() for node in self.nodes]
        if len(steps) == 1:
            return steps[0]

        def run(c: Cohort) -> None:
            for step in steps:
                step(c)

        return run

    def emit(self, out: Program) -> None:
        run: list[Step] = []
        for node in self.nodes:
            if node.waits:
                _close(out, run)
                run = []
                node.emit(out)
            else:
                run.append(node.step())
        _close(out, run)


def _close(out: Program, run: list[Step]) -> None:
    if run:
        out.append(Run(run))


@dataclass
class If(Node):
    """A branch."""

    condition: Read | None = None
    then: Node | None = None
    otherwise: Node | None = None

    def step(self) -> Step:
        assert self.condition is not None
        assert self.then is not None
        condition, then = self.condition, self.then.step()
        otherwise = None if self.otherwise is None else self.otherwise.step()

        def run(c: Cohort) -> None:
            value = condition(c)
            if not is_array(value):
                if value:
                    then(c)
                elif otherwise is not None:
                    otherwise(c)
                return
            saved = c.mask
            for chosen, branch in ((True, then), (False, otherwise)):
                if branch is None:
                    continue
                mask = c.narrowed(value, chosen)
                if mask.any():
                    c.mask = _none_if_whole(mask)
                    branch(c)
                    c.mask = saved

        return run

    def emit(self, out: Program) -> None:
        assert self.condition is not None
        assert self.then is not None
        branch = Branch(self.condition, has_other=self.otherwise is not None)
        out.append(branch)
        _emit(self.then, out)
        leave = Jump()
        out.append(leave)
        branch.other = len(out)
        if self.otherwise is not None:
            _emit(self.otherwise, out)
        leave.target = len(out)
        out.append(Join(branch.other))


def _emit(node: Node, out: Program) -> None:
    if node.waits:
        node.emit(out)
    else:
        out.append(Run([node.step()]))


@dataclass
class Loop(Node):
    """A loop: ``advance`` moves on after each turn; a while loop has no slot."""

    slot: int = -1
    start: Read | None = None
    condition: Read | None = None
    advance: Step | None = None
    body: Node | None = None

    def step(self) -> Step:
        assert self.condition is not None
        assert self.body is not None
        slot, start, condition, advance = self.slot, self.start, self.condition, self.advance
        body = self.body.step()

        def run(c: Cohort) -> None:
            saved = c.mask
            if start is not None:
                c.slots[slot] = start(c)
            while True:
                value = condition(c)
                if is_array(value):
                    mask = c.narrowed(value)
                    if not mask.any():
                        break
                    c.mask = _none_if_whole(mask)
                elif not value:
                    break
                body(c)
                if advance is not None:
                    advance(c)
            c.mask = saved

        return run

    def emit(self, out: Program) -> None:
        assert self.condition is not None
        assert self.body is not None
        out.append(Enter(self.slot, self.start if self.start is not None else _nothing))
        first = len(out)
        test = Test(self.condition)
        out.append(test)
        _emit(self.body, out)
        if self.advance is not None:
            out.append(Run([self.advance]))
        out.append(Jump(first))
        test.exit = len(out)


def _nothing(c: Cohort) -> Any:
    return None


def flatten(node: Node) -> Program:
    """Return the instructions of a whole kernel."""
    out: Program = []
    _emit(node, out)
    out.append(Finish())
    return out
