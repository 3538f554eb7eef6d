"""Functions in which the graph breaks again and again with little between: they run as they are.

A loop that reads values in each iteration would leave a record, or two, of each iteration and each size,
and their guards take longer than what their graphs save.
"""

from __future__ import annotations

from ladder.capture.interpreter.interpreter import Interpreter
from ladder.capture.python.prescan import Unfollowed, activation_of
from ladder.capture.records import Store

MOST_BREAKS = 4
"""At one instruction of one activation of a function, ..."""

FEWEST_OPERATORS = 16
"""... where fewer than these lie between two on average: a plan of them takes more time than it saves."""


def note_break(vm: Interpreter) -> None:
    """Note in all frames that the graph breaks here."""
    for frame in vm.frames:
        if not frame.breaks:  # later its first argument may be gone
            frame.activation = activation_of(frame.code, frame.slots)
        frame.breaks[frame.index] += 1
        frame.operators += vm.trace.operators - frame.before
        frame.before = 0


def broken_often(vm: Interpreter) -> Unfollowed | None:
    """Return the innermost function that is to run as it is from now on, if there is one."""
    for frame in reversed(vm.frames[1:]):
        few = frame.operators < FEWEST_OPERATORS * frame.breaks.total()
        if few and max(frame.breaks.values(), default=0) > MOST_BREAKS:
            return frame.activation
    return None


def leave_out(store: Store, what: Unfollowed) -> None:
    """Run some code as it is from now on, and drop the records that begin or end in it."""
    store.left_out.add(what)
    within = {point for point in store.sites.values() if what[0] in {layout.code for layout in point.layouts}}
    for point in store.all_points():
        kept = () if point in within else point.records
        point.keep_only(record for record in kept if within.isdisjoint(record.follows))
