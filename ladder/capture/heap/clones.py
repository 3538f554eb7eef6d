"""Objects of a segment made once more, so that a side of a branch may change them without being seen.

What the segment has made so far and nothing outside refers to is made again by the steps of its mock, as
a matched run makes it. The copies take the places of the originals, under the same variables.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import Any

from ladder.capture.heap.heap import Heap
from ladder.capture.heap.mock import live_steps
from ladder.capture.heap.nodes import CaptureError, Dynamic, MockStep, Node
from ladder.capture.values.kinds import is_a
from ladder.capture.values.shapes import DynamicSize, Walk


class Clones:
    """What can be made again of a segment with `steps` so far.

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
