"""The mock of a segment: the steps that make, for a matched run, what the segment has made and changed."""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Any

from ladder.capture.heap.heap import Heap
from ladder.capture.heap.nodes import MockStep


def live_steps(steps: list[MockStep], wanted: set[str]) -> tuple[list[MockStep], set[str]]:
    """Return the steps whose effect is seen outside or in `wanted`, and all variables they need."""
    serving: dict[str | None, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        for name in {step.var, *step.changes}:
            serving[name].append(number)
    needed, kept, ahead = set(wanted), set[int](), [n for n, step in enumerate(steps) if step.keep]
    ahead += [number for name in wanted for number in serving.get(name, ())]
    while ahead:
        number = ahead.pop()
        if number not in kept:
            kept.add(number)
            found = steps[number].uses - needed
            needed |= found
            ahead += [serves for name in found for serves in serving.get(name, ())]
    live = [step for number, step in enumerate(steps) if number in kept]
    lasting = without_overwritten(live)
    return (live, needed) if len(lasting) == len(live) else live_steps(lasting, wanted)


def without_overwritten(steps: list[MockStep]) -> list[MockStep]:
    """Leave out what replaces an item of a dictionary that is replaced again, with no other step between."""
    lasting, later = list[MockStep](), set[Any]()
    for step in reversed(steps):
        if step.slot is None:
            later.clear()
        elif step.slot in later:
            continue
        else:
            later.add(step.slot)
        lasting.append(step)
    return lasting[::-1]


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
