"""The mock of a segment: the steps that make, for a matched run, what the segment has made and changed."""

from __future__ import annotations

import re

from ladder.capture.heap import Heap
from ladder.capture.kinds import is_a
from ladder.capture.nodes import Step
from ladder.capture.trace import Trace, Value


def live_steps(steps: list[Step], wanted: set[str]) -> tuple[list[Step], set[str]]:
    """Return the steps whose effect is seen outside or in `wanted`, and all variables they need."""
    needed = set(wanted)
    kept: set[int] = set()
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(steps))):
            step = steps[number]
            if number in kept or not (step.keep or step.var in needed or step.changes & needed):
                continue
            kept.add(number)
            needed |= step.uses
            changed = True
    return [step for number, step in enumerate(steps) if number in kept], needed


def changed_roots(heap: Heap) -> frozenset[int] | None:
    """Return the numbers of the roots that a segment changes; None if it changes anything else outside."""
    own: dict[str, int] = {}
    for check in heap.guard.checks:
        root = re.fullmatch(r"r(\d+)", check.text)
        inside = re.fullmatch(r"(v\d+)\.__dict__|\w+\((v\d+), '__dict__'\)", check.text)
        if check.binds is not None and root is not None:
            own[check.binds] = int(root[1])
        elif check.binds is not None and inside is not None and (var := inside[1] or inside[2]) in own:
            own[check.binds] = own[var]
    changed = set[str]().union(*(step.changes & heap.outside for step in heap.steps if step.keep))
    return frozenset(own[var] for var in changed) if changed <= own.keys() else None


def graph_results(heap: Heap, trace: Trace, needed: set[str]) -> tuple[list[Value], list[str]]:
    """Return the values that the graph must give, and the lines that make containers of them again.

    Graphs give tensors: what is in the tuples and lists of tensors that are needed becomes needed too.
    """
    wanted, lines = [], []
    for value in trace.results:  # what is inside comes after what it is in
        if value.var not in needed:
            continue
        if not is_a(value.obj, tuple | list):
            wanted.append(value)
            continue
        needed |= {heap.node(item).var for item in value.obj if item is not None}
        items = "".join(f"{heap.reference(item, set())}, " for item in value.obj)
        lines.append(f"{value.var} = {heap.constant(type(value.obj))}(({items}))")
    return wanted, lines[::-1]
