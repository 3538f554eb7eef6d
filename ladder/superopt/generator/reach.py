"""Reachability of results: the backward closure of all steps, to prune partial graphs.

A graph is complete if each of its values is used. The values that steps can make at all, whatever the graph,
are few, because pruning keeps few expressions; of those, only the ones from which steps lead to a value
like the result can be part of a complete graph, and a graph of n more steps only has ones at most n steps
from it. Both are facts about values, not about graphs, so nothing is lost.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from ladder.superopt.generator.structure import GraphStep

V = TypeVar("V")

MOST_VALUES = 600
MOST_STEPS = 150_000
"""A closure that exceeds these is given up: every value may be used then."""

FAR = 1 << 30


def distances(
    start: Sequence[V],
    steps_with: Callable[[Sequence[V], int], Iterable[GraphStep]],
    result: Callable[[GraphStep, tuple[V, ...]], V | None],
    is_goal: Callable[[V], bool],
    is_late: Callable[[], bool],
) -> dict[V, int] | None:
    """Return the fewest steps from each value to a goal; values that reach none are left out.

    start: The operands of a block graph.
    steps_with: ``(values, top)``: the steps whose newest operand is number ``top``.
    result: ``(step, operands)``: the value that it gives, if it may.
    is_late: Whether the time is up.
    Returns dict or None: None if there are too many values to say, or there is no time.
    """
    values = list(dict.fromkeys(start))
    known = {value: number for number, value in enumerate(values)}
    makers: dict[int, list[int]] = {}
    tried = 0
    top = 0
    while top < len(values):
        for step in steps_with(values, top):
            tried += 1
            found = result(step, tuple(values[i] for i in step.operands))
            if found is None:
                continue
            if found not in known:
                known[found] = len(values)
                values.append(found)
            makers.setdefault(known[found], []).extend(step.operands)
        if len(values) > MOST_VALUES or tried > MOST_STEPS or is_late():
            return None
        top += 1
    return {values[i]: far for i, far in _backwards(values, makers, is_goal).items()}


def _backwards(
    values: Sequence[V], makers: dict[int, list[int]], is_goal: Callable[[V], bool]
) -> dict[int, int]:
    """Search from the goals to what they are made of."""
    far = {number: 0 for number, value in enumerate(values) if is_goal(value)}
    queue = deque(far)
    while queue:
        number = queue.popleft()
        for operand in makers.get(number, ()):
            if operand not in far:
                far[operand] = far[number] + 1
                queue.append(operand)
    return far
