"""Branches on values of tensors: both sides in one record, where both are known and change nothing.

At a branch a segment ends at first, and what follows it on either side is a record of its own. Once
there is one for each side that changes nothing outside (or one for the only side ever taken), the next
run from where the segment began goes through *both* sides in one segment: the other side too can be
interpreted then without being seen, since its record says so, and its guard holds. The guard is that
of both sides, the graph gets a conditional node (`conditionals.choose`), and the mock does what the side
that was taken does. What comes up there that the records did not say leaves the branch a graph break.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.fx

from ladder.capture.heap.mock import Clones, live_steps, refuse_unmade
from ladder.capture.heap.nodes import CaptureError, MockStep, Node
from ladder.capture.interpreter.emit import graph_results
from ladder.capture.interpreter.endings import Ending, GraphBreak, Leaving, return_ending
from ladder.capture.interpreter.evaluate import apply, drive
from ladder.capture.interpreter.graph_arguments import argument, operator_node
from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.interpreter.segments import frame_pairs
from ladder.capture.python.frames import NULL, Frame
from ladder.capture.records import MOST_NESTED
from ladder.capture.trace.conditionals import Side, folded
from ladder.capture.trace.trace import Apart, Value
from ladder.capture.values.kinds import is_a
from ladder.capture.values.settings import is_now, restore_settings
from ladder.capture.values.tensors import autocast_state, restore_state, torch_state
from ladder.interrupts import pass_on


class Joined(Leaving):
    """Raised through the frames before a branch: the program has run to its end on both sides."""

    def __init__(self, result: Any, ending: Ending) -> None:
        super().__init__()
        self.result = result
        self.ending = ending


class Abandoned(Leaving):
    """Raised where a side of a branch is not what its record says."""


class _Kept(NamedTuple):
    """The interpreter's state before a side of a branch, to be compared with that after it."""

    nodes: dict[int, Node]
    steps: list[MockStep]
    trace: Apart
    frames: list[Any]
    state: tuple[Any, ...]


class Fork(NamedTuple):
    """A branch: the end of the segment there, the values of the frames, and how to make them once more."""

    graph_break: GraphBreak
    values: list[Any]
    clones: Clones | None


def fork(vm: Interpreter, graph_break: GraphBreak, function: Any, args: Any, kwargs: Any, found: Any) -> None:
    """Go on with both sides of a branch if that can be recorded; return if it cannot.

    graph_break: The end of the segment at the branch.
    function, args, kwargs: The call that reads the value: `bool` of a tensor, or an operator that gives a
        bool.
    found: What it has given, `NULL` if it has not been made.
    Raises Joined if it could: the program has run to its end.
    Raises Abandoned if it could not, inside a side of another branch.
    """
    asks = function is bool and len(args) == 1 and is_a(args[0], torch.Tensor)
    if vm.store.joins and not vm.modes and (asks or type(found) is bool):
        graph_break.point.forks = True
        try:
            _try_fork(vm, graph_break, function, args, kwargs, found)
        except Abandoned:
            graph_break.point.attempts += 1
            if vm.aside:
                raise
            vm.give_up()
            graph_break.point.paused = True  # the next run breaks here, and learns what was missing
            if vm.point is not None:
                vm.point.take_back()
    if vm.aside:
        raise Abandoned("the graph breaks on a side of a branch")


def _try_fork(
    vm: Interpreter, graph_break: GraphBreak, function: Any, args: Any, kwargs: Any, found: Any
) -> None:
    point, paused = graph_break.point, graph_break.point.paused
    point.paused = False
    values = [value for frame, layout in frame_pairs(graph_break) for value in layout.values(frame)]
    plain = [*map(vm.unlifted, values)]
    known = point.sides(tuple(plain))
    changed = [record.changes() for record in known.values()]
    clones = Clones(vm.heap, [*steps_before(vm), *vm.heap.steps], graph_break.uses)
    if paused or not point.may_join(known) or len(vm.aside) >= MOST_NESTED:
        return
    if not all(numbers is not None and clones.owns(values, numbers) for numbers in changed):
        return
    if len(known) == 1 and (vm.trace.changes_tensors or vm.trace.random):
        return  # a run on the side that is not known must leave no trace
    actual = bool(args[0]) if found is NULL else found
    if actual not in known:
        if not vm.supposed:
            return
        actual = not actual  # what comes of it is not used
    try:
        condition = _condition(vm, function, args, kwargs)
    except CaptureError:
        return
    fork = Fork(graph_break, values, clones if any(changed) else None)
    raise _joined(vm, fork, sorted(known), condition, actual)


def _condition(vm: Interpreter, function: Any, args: Any, kwargs: Any) -> torch.fx.Node:
    inputs: list[Value] = []
    given, named = argument(vm, args, inputs), argument(vm, kwargs, inputs)
    if any(value.dynamic for value in inputs):
        raise CaptureError("a condition whose shape depends on values")
    name = function.__name__
    if name in _TRUTHS_OF_ONE:
        one: torch.fx.Node = given[0]
        return one
    if name not in _COMPARED:
        return operator_node(vm, function, given, named)
    if len({value.obj.shape for value in inputs}) > 1:
        raise CaptureError("tensors of unlike shapes are compared")
    return operator_node(vm, torch.all, (operator_node(vm, _COMPARED[name], given, named),), {})


_TRUTHS_OF_ONE = frozenset({"bool", "__bool__", "is_nonzero", "item"})
"""Calls that give the truth of a tensor of one element."""

_COMPARED = {"equal": torch.eq, "allclose": torch.isclose}
"""Operator that gives a bool -> the one whose results are all true then: that reads no values."""


def steps_before(vm: Interpreter) -> list[MockStep]:
    """Return the steps before the sides of branches that this is inside."""
    return [step for kept in vm.aside for step in kept.steps]


def _joined(vm: Interpreter, fork: Fork, known: list[bool], condition: torch.fx.Node, actual: bool) -> Joined:
    sides: dict[bool, Side | None] = {True: None, False: None}
    ends: dict[bool, Joined] = {}
    for holds in known:
        before, vm.supposed = vm.supposed, vm.supposed or holds is not actual
        sides[holds], ends[holds] = _side(vm, fork, holds)
        vm.supposed = before
    loops = bool(getattr(vm.store.backend, "loops", False))
    nodes = folded(vm.trace.graph, condition, sides, vm.trace.modules, loops=loops)
    holds_name, *names = [vm.trace.add(Value(vm.heap.guard.fresh_name(), None, node)).var for node in nodes]
    depth = max(end.ending.depth for end in ends.values()) + len(known) - 1
    ending = Ending([], {holds_name, *names}, depth, returns=True)
    for holds, end in ends.items():
        inner = end.ending
        given = [f"{var} = {name}" for var, name in zip(inner.returned, names, strict=False)]
        ending.lines.append(f"if {holds_name} is {holds}:")
        ending.lines += [f"    {line}" for line in (*given, *inner.lines)]
        ending.uses |= inner.uses
        ending.branches |= inner.branches
    if len(known) == 1:
        ending.branches.add(fork.graph_break.point)
    return Joined(ends[actual].result, ending)


# one side ---------------------------------------------------------------------------------
def _side(vm: Interpreter, fork: Fork, holds: bool) -> tuple[Side, Joined]:
    """Run what follows on one side; return its part of the graph, and its end."""
    point = fork.graph_break.point
    kept = _set_apart(vm)
    try:
        end = _driven(vm, _frames(fork), point.after, holds)
        if _state(vm) != kept.state or any(step.keep for step in vm.heap.steps):
            raise Abandoned("a side of a branch changes more than its record says")
        return _cut(vm, kept, end)
    except Abandoned:
        restore_state(*kept.state[:2])
        restore_settings({**vm.trace.settings, **dict(kept.state[-1])}.items())
        raise
    finally:
        _take_back(vm, kept)


def _frames(fork: Fork) -> list[Frame]:
    values, frames, at = fork.values, [], 0
    if fork.clones is not None:
        try:
            values = fork.clones.values(values, fork.graph_break.roots)
        except CaptureError as error:
            raise Abandoned(str(error)) from None
    for layout in fork.graph_break.point.layouts:
        frames.append(layout.restore(values[at : at + layout.size]))
        at += layout.size
    return frames


def _driven(vm: Interpreter, frames: list[Frame], after: str, holds: bool) -> Joined:
    try:
        apply(frames[-1], after, holds)
        result = drive(vm, frames, [])
        return Joined(result, return_ending(vm.heap, result))
    except Joined as inner:
        return inner
    except CaptureError as error:
        raise Abandoned(str(error)) from None
    except Exception as error:
        pass_on(error)
        raise Abandoned(f"a side of a branch raised {type(error).__name__}") from None


def _cut(vm: Interpreter, kept: _Kept, end: Joined) -> tuple[Side, Joined]:
    """Return what was added to the graph since, and the end with all that its side does."""
    ending = end.ending
    steps, needed = live_steps(vm.heap.steps, ending.uses)
    try:
        refuse_unmade(vm.heap, needed)
    except CaptureError as error:
        raise Abandoned(str(error)) from None
    wanted, rebuilt = graph_results(vm.heap, vm.trace, needed)
    returned = [value.fx for value in wanted if value.fx is not None]
    nodes = vm.trace.added(kept.trace, returned)
    lines = [*rebuilt, *(step.text for step in steps), *ending.lines]
    names = [value.var for value in wanted]
    whole = Ending(lines, needed, depth=ending.depth, returned=names, branches=ending.branches, returns=True)
    return Side(nodes, returned), Joined(end.result, whole)


def _state(vm: Interpreter) -> tuple[Any, ...]:
    trace = vm.trace
    switched = [(setting, is_now(setting)) for setting in trace.settings]
    changes = trace.changes_tensors, trace.random, switched
    return torch.is_grad_enabled(), autocast_state(), torch_state(), *changes


def _set_apart(vm: Interpreter) -> _Kept:
    heap = vm.heap
    kept = _Kept(dict(heap.nodes), heap.steps, vm.trace.set_apart(), vm.frames, _state(vm))
    heap.steps = []
    vm.aside.append(kept)
    return kept


def _take_back(vm: Interpreter, kept: _Kept) -> None:
    """Drop objects made on a side; external objects that it read stay, with their guards."""
    heap = vm.heap
    heap.nodes = {key: node for key, node in heap.nodes.items() if key in kept.nodes or node.external}
    heap.steps = kept.steps
    vm.trace.take_back(kept.trace)
    vm.frames = kept.frames
    vm.aside.pop()
