"""The guard of a finished segment, as lines of code."""

from __future__ import annotations

import re
from itertools import repeat
from operator import is_

import torch

from ladder.capture.heap.heap import Heap
from ladder.capture.heap.nodes import CaptureError, Check, Node
from ladder.capture.values.shapes import Differing
from ladder.capture.values.tensors import (
    Metadata,
    autocast_state,
    bulk_check,
    is_plain_tensor,
    signature,
    torch_state,
)
from ladder.interrupts import pass_on
from ladder.runtime import snapshot

MAX_CHECKS = 100_000
"""Conditions of one guard."""
Open = tuple[Node, frozenset[int] | None]
"""A tensor, and which of its extents are left open; None if its strides are not."""


def tensor_lines(heap: Heap) -> tuple[list[str], list[str], frozenset[int]]:
    """Return bulk checks of the metadata of tensors; what they cannot check is checked one by one.

    The second form returns the paths of the extents that differ, as `guard_lines` says. At last the ids of
    the tensors that are checked in bulk, which also tells that no two of them are one object.
    """
    bulk: list[Open] = []
    entry = heap.guard.state, heap.guard.autocast
    usable = (torch_state(), autocast_state()) == entry
    for node, before, rows, left_open in heap.metadata:
        if usable and signature(node.obj) == before and is_plain_tensor(node.obj):
            bulk.append((node, left_open))
        else:
            _check_each(heap, rows)
    bulk.sort(key=lambda pair: pair[0].pinned)
    asked = _asking(heap, bulk)
    if asked is None:
        chosen = {id(node) for node, _ in bulk}
        for node, _, rows, _ in heap.metadata:
            _check_each(heap, rows if id(node) in chosen else [])
        return [], [], frozenset()
    heap.guard.check("True", f"metadata of {len(bulk)} tensors")
    apart = frozenset(id(node.obj) for node, _ in bulk)
    return [line for line, _ in asked], [learning for _, learning in asked], apart


def _check_each(heap: Heap, rows: list[tuple[str, str]]) -> None:
    for text, why in rows:
        heap.guard.check(text, why)


def _asking(heap: Heap, tensors: list[Open]) -> list[tuple[str, str]] | None:
    """Return the line, if there are tensors, that asks them for their metadata, in both forms.

    tensors: Those that stay come last.
    Returns None where torch cannot check them together.
    """
    given = [node for node, _ in tensors if not node.pinned]
    stay = tuple(node.obj for node, _ in tensors if node.pinned)
    parts = [tensors]
    if max(len(given), len(stay)) >= snapshot.LEAST_FOR_NATIVE:
        parts = [tensors[-1:], tensors[: len(given)], tensors[len(given) :]]
    checks = [bulk_check([node.obj for node, _ in part], [left for _, left in part]) for part in parts]
    if any(part and check is None for part, check in zip(parts, checks, strict=True)):
        return None
    names = "".join(f"{node.var}, " for node in given)
    if len(parts) == 1:
        text = f"{heap.constant(checks[0])}({names}*{heap.constant(stay)})"
    else:
        text = f"{heap.constant(Metadata(checks, stay).hold)}({names})"
    number = len(heap.guard.checks) + 1
    differs = Differing([heap.guard.paths.get(node.var, "") for node in given], [node.obj for node in given])
    learning = f"missed, 0, {heap.constant(differs)}({names})"
    return [(f"if not {text}: return {number}", f"if not {text}: return {learning}")] if tensors else []


def check_distinct(heap: Heap, *, writes: bool, apart: frozenset[int]) -> None:
    """Guard that objects which were different are where one of their type is changed.

    `writes`: tensors are changed. `apart`: the ids of objects that are known to be different.
    """
    groups: dict[type, list[Node]] = {}
    for node in heap.nodes.values():
        if node.external:
            groups.setdefault(type(node.obj), []).append(node)
    for kind, nodes in groups.items():
        changed = [node for node in nodes if node.mutated]
        told = kind in heap.distinct or (issubclass(kind, torch.Tensor) and writes)
        if len(nodes) == 1 or not (changed or told) or apart.issuperset(id(node.obj) for node in nodes):
            continue
        stay = all(node.var in heap.guard.space for node in changed)
        if told or not stay or len(changed) > MOST_SINGLY_COMPARED:
            _check_group(heap, kind, nodes)
        else:
            _check_others(heap, kind, nodes, changed)


MOST_SINGLY_COMPARED = 4
"""Most changed objects that are compared one by one with others of their type; of more, sets of ids are."""


def _check_others(heap: Heap, kind: type, nodes: list[Node], changed: list[Node]) -> None:
    """Guard that none of the objects that may be others in a later call is one that stays and is changed."""
    names = "".join(f"{node.var}, " for node in nodes if node.var not in heap.guard.space)
    for node in changed if names else ():
        same = f"map({heap.constant(is_)}, ({names}), {heap.constant(repeat)}({node.var}))"
        heap.guard.check(f"not any({same})", f"{kind.__name__}s are distinct")


def _check_group(heap: Heap, kind: type, nodes: list[Node]) -> None:
    """Guard that objects of one type are distinct; those that stay are known to be."""
    stay = frozenset(id(node.obj) for node in nodes if node.var in heap.guard.space)
    names = sorted({f"id({node.var})" for node in nodes if node.var not in heap.guard.space})
    if names:
        found, others = f"{{{', '.join(names)}}}", heap.constant(stay)
        text = f"len({found} - {others}) == {len(names)}" if stay else f"len({found}) == {len(names)}"
        heap.guard.check(text, f"{kind.__name__}s are distinct")


def guard_lines(heap: Heap, asking: list[str], learning: list[str]) -> tuple[list[str], list[str]]:
    """Return the guard: each line binds a variable or returns the number of the check that fails.

    The second form, which is run after a miss, returns 0 or a triple: the numbers of the checks that ask a
    number to be what it was and fail, the number of another check that fails, paths of extents that differ.
    """
    lines, learned = ["try:"], ["missed = []", "try:"]
    for number, check in enumerate(heap.guard.checks, 1):
        if check.binds is not None:
            lines.append(f"    {check.binds} = {check.text}")
            learned.append(lines[-1])
        elif check.text != "True":
            lines.append(f"    if not ({check.text}): return {number}")
            goes_on = check.number and not heap.guard.calls_cached  # the program may count such calls
            noted = f"missed.append({number})" if goes_on else f"return missed, {number}, ()"
            learned.append(f"    if not ({check.text}): {noted}")
    restless = (id(node.obj) for node in heap.nodes.values() if node.mutated)
    facts = heap.guard.table.finish(len(heap.guard.checks) + 1, restless)
    if len(heap.guard.checks) + len(facts) > MAX_CHECKS:
        raise CaptureError(f"a guard of more than {MAX_CHECKS} conditions")
    table = heap.guard.table.lines(heap.constant)
    heap.guard.checks += [Check("True", None, fact.path, fact.path, id(fact.value)) for fact in facts]
    heap.guard.check("True", "objects that stay")
    told = [re.sub(r"return (\w+)$", r"return missed, \1, ()", line) for line in table]
    caught = ["except Exception as error:", f"    {heap.constant(pass_on)}(error)"]
    lines += [*(f"    {line}" for line in (*asking, *table)), *caught, "    return -1"]
    learned += [*(f"    {line}" for line in (*learning, *told)), *caught]
    return lines, [*learned, "    return missed, 0, ()", "return (missed, 0, ()) if missed else 0"]
