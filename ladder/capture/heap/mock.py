"""The mock of a segment: the steps that make, for a matched run, what the segment has made and changed."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ladder.capture.heap.heap import Heap
from ladder.capture.heap.nodes import CaptureError, Dynamic, MockStep, Node, Unrecordable
from ladder.capture.values.kinds import is_a
from ladder.capture.values.shapes import DynamicSize, Walk
from ladder.interrupts import pass_on


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


def refuse_unmade(heap: Heap, needed: Iterable[str]) -> None:
    """Raise Unrecordable if one of the variables that are needed stands for what no step can make."""
    for name in heap.unmade.keys() & set(needed):
        kind, origin = heap.unmade[name]
        raise Unrecordable(f"a live {kind} cannot be made again", origin)


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


def changed_roots(heap: Heap, own: Mapping[str, int]) -> frozenset[int] | None:
    """Return the numbers of the roots that a segment changes; None if it changes anything else outside.

    own: As `root_numbers`.
    """
    changed = set[str]().union(*(step.changes & heap.outside for step in heap.steps if step.keep))
    return frozenset(own[var] for var in changed) if changed <= own.keys() else None


def handed_roots(heap: Heap, own: Mapping[str, int], texts: Sequence[str]) -> tuple[int | None, ...]:
    """Return which of its roots each value is that a segment hands on, as its mock knows it.

    -1 for what the segment has made, None for what else it has found outside.
    """
    return tuple(own.get(text, None if text in heap.outside else -1) for text in texts)


def root_numbers(heap: Heap) -> dict[str, int]:
    """Return the numbers of roots by the variables of them and of their attributes."""
    own: dict[str, int] = {}
    for check in heap.guard.checks:
        root = re.fullmatch(r"r(\d+)", check.text)
        inside = re.fullmatch(r"(v\d+)\.__dict__|\w+\((v\d+), '__dict__'\)", check.text)
        if check.binds is not None and root is not None:
            own[check.binds] = int(root[1])
        elif check.binds is not None and inside is not None and (var := inside[1] or inside[2]) in own:
            own[check.binds] = own[var]
    return own


class Clones:
    """Objects of a segment made again by the steps of its mock, for a side of a branch to change.

    The copies take the places of the originals, under the same variables.

    Raises CaptureError from `values`, if something cannot.
    """

    def __init__(self, heap: Heap, steps: Sequence[MockStep], uses: set[str]) -> None:
        self.heap = heap
        live, _ = live_steps(list(steps), uses)
        kept, self.escaped = live_steps([step for step in steps if step.keep or step.var], set())
        self.escaped |= {step.var for step in kept if step.keep and step.var is not None}
        self.steps = [step for step in live if not step.keep and not self._touches_escaped(step)]

    def _touches_escaped(self, step: MockStep) -> bool:
        return step.var in self.escaped or not step.changes.isdisjoint(self.escaped)

    def owns(self, values: Sequence[Any], numbers: Iterable[int]) -> bool:
        """Say whether the segment has made these `values`, and nothing outside refers to them."""
        made = {step.var for step in self.steps}
        nodes = [self.heap.nodes.get(id(values[number])) for number in numbers]
        return all(node is not None and not node.external and node.var in made for node in nodes)

    def values(self, values: Sequence[Any], texts: Sequence[str]) -> list[Any]:
        """Return `values`, which the mock knows as `texts`, with what the segment has made made once more."""
        if any(map(_holds_dynamic, values)):
            raise CaptureError("open scalars inside a tuple")
        by_var = {node.var: node for node in self.heap.nodes.values()}
        space = {**self.heap.guard.space, **{var: node.obj for var, node in by_var.items()}}
        space |= {value.var: value.value for value in values if type(value) is Dynamic}
        try:
            exec("\n".join(step.text for step in self.steps), space)
            made = [eval(text, space) for text in texts]
        except Exception as error:
            pass_on(error)
            raise CaptureError(f"what a segment made cannot be made again: {error!r}") from error
        for step in self.steps:
            if step.var in by_var and id(space[step.var]) not in self.heap.nodes:
                self.heap.add(_like(by_var[step.var], space[step.var]))
        pairs = zip(values, made, strict=True)
        return [old if type(old) is Dynamic else new for old, new in pairs]


def _like(node: Node, value: Any) -> Node:
    made = copy.copy(node)
    made.obj = value
    made.seen, made.written, made.stored = dict(node.seen), set(node.written), set(node.stored)
    made.lifted = dict(node.lifted)
    return made


def _holds_dynamic(value: Any) -> bool:
    if type(value) in (DynamicSize, Walk):
        return True
    return is_a(value, tuple) and any(
        type(item) is Dynamic or _holds_dynamic(item) for item in tuple.__iter__(value)
    )
