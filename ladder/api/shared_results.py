"""Results of a plan that share memory in the program and not in the plan: they are put into one memory.

Plans compute parts of one tensor apart from each other, such as what ``unbind`` gives; in the program
whoever writes into one part writes into what others show of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from ladder.capture.values.aliasing import Aliasing, Strides, flat


class Group(NamedTuple):
    """Results of one memory, by number; `same`: result -> the one before it that is the same object."""

    members: tuple[int, ...]
    same: dict[int, int]


def groups_apart(expected: Aliasing, found: Aliasing) -> list[Group]:
    """Return the groups of results that lie in one memory of their own in the program and not as found."""
    start, count = len(expected.memory) - len(expected.strides), len(expected.memory)
    members: dict[int, list[int]] = {}
    for at in range(start, count):
        if expected.memory[at] >= start and expected.strides[at - start] is not None:
            members.setdefault(expected.memory[at], []).append(at)
    made = []
    for group in members.values():
        apart = len({found.memory[at] for at in group}) > 1
        others = any(found.objects[at] != found.objects[expected.objects[at]] for at in group)
        lies = [each for at in group if (each := expected.strides[at - start]) is not None]
        if (apart or others) and not any(each.changed for each in lies):
            same = {at - start: expected.objects[at] - start for at in group if expected.objects[at] != at}
            made.append(Group(tuple(at - start for at in group), same))
    return made


def put_together(values: list[Any], group: Group, strides: Sequence[Strides | None]) -> None:
    """Let the results of a group be views of one memory, which lie in it as `strides` say."""
    lies = {at: each for at in group.members if (each := strides[at]) is not None}
    sizes = {at: values[at].element_size() for at in lies}
    first = group.members[0]
    alike = len({values[at].dtype for at in lies}) == 1
    kind = values[first].dtype if alike else torch.uint8
    reach = max(each.reach * (1 if alike else sizes[at]) for at, each in lies.items())
    whole = torch.empty(reach, dtype=kind, device=values[first].device)
    for at, each in lies.items():
        if at in group.same:
            values[at] = values[group.same[at]]
            continue
        memory = whole if alike else whole.view(values[at].dtype)
        place = memory.as_strided(values[at].shape, each.steps, each.offset)
        once = tuple(slice(0, 1 if axis in each.repeated else None) for axis in range(place.dim()))
        place[once].copy_(values[at][once])
        values[at] = place


def in_place_of(results: Any, values: Sequence[Any]) -> Any:
    """Return nested results with other leaves."""
    leaves = iter(values)

    def put(value: Any) -> Any:
        return type(value)(map(put, value)) if isinstance(value, tuple | list) else next(leaves)

    return put(results)


def together(results: Any, groups: Sequence[Group], strides: Sequence[Strides | None]) -> Any:
    """Return results with those of each group in one memory."""
    values = flat(results)
    for group in groups:
        put_together(values, group, strides)
    return in_place_of(results, values)
