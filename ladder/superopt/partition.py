"""Partition of a program into LAX subprograms of one result, which are searched, and the rest.

A LAX subprogram has multilinear operators, divisions, roots, maxima and at most one exponential on a path,
no root after one (Mirage, OSDI'25, §5). Every operation gets a *stage*: that of its operands, or one more if
it would be a second exponential, or a root of an exponential, within the stage, or if an operand comes of
an operation that is not LAX. An operation joins the piece of those that use it if that is one piece, of its
own stage; otherwise a piece ends with it. So every piece has one result, and none depends on itself by way
of others. Each operation that is not LAX is a piece of its own. What depends on inputs and on results of
pieces alone, and is no exponential, moves to the stage of those that use it: a norm stays whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

AFTER_EXPONENTIAL = frozenset({"exp", "root"})
"""LAX classes that no exponential may precede."""

OUTSIDE = "other"
"""The class of what is not LAX."""


@dataclass(frozen=True)
class Operation:
    """A unit of cutting: an operator, or several that stay together.

    operands: Names of values; those that no operation computes are inputs.
    classes: LAX classes of its operators.
    """

    name: str
    operands: tuple[str, ...]
    classes: frozenset[str]

    @property
    def lax(self) -> bool:
        return OUTSIDE not in self.classes


def pieces(operations: Sequence[Operation], outputs: Collection[str]) -> list[list[Operation]]:
    """Return the operations in pieces, each after those whose results it takes; the last one's is its result.

    operations: In order: operands come first.
    outputs: Values that are wanted.
    """
    users: dict[str, list[Operation]] = {}
    for operation in operations:
        for value in operation.operands:
            users.setdefault(value, []).append(operation)
    stages = _delayed(operations, users, outputs, _stages(operations))
    last: dict[str, str] = {}
    for operation in reversed(operations):
        after = users.get(operation.name, [])
        near = {last[user.name] for user in after if stages[user.name] == stages[operation.name]}
        joins = operation.lax and all(stages[user.name] == stages[operation.name] for user in after)
        alone = operation.name in outputs or not joins or len(near) != 1
        last[operation.name] = operation.name if alone else near.pop()
    found: dict[str, list[Operation]] = {operation.name: [] for operation in operations}
    for operation in operations:
        found[last[operation.name]].append(operation)
    return [members for members in found.values() if members]


def _stages(operations: Sequence[Operation]) -> dict[str, tuple[int, bool]]:
    """Return (stage, False) of each operation, (stage, True) of those that are not LAX: they follow it."""
    found: dict[str, tuple[int, bool]] = {}
    raised: dict[str, bool] = {}
    for operation in operations:
        before = [found[value] for value in operation.operands if value in found]
        stage = max((number + outside for number, outside in before), default=0)
        exponential = any(raised[v] for v in operation.operands if found.get(v) == (stage, False))
        if exponential and operation.classes & AFTER_EXPONENTIAL:
            stage, exponential = stage + 1, False
        found[operation.name] = (stage, not operation.lax)
        raised[operation.name] = exponential or "exp" in operation.classes
    return found


def _delayed(
    operations: Sequence[Operation],
    users: Mapping[str, Sequence[Operation]],
    outputs: Collection[str],
    stages: Mapping[str, tuple[int, bool]],
) -> dict[str, tuple[int, bool]]:
    """Return the stages with operations moved to those of their users, where that costs nothing."""
    free: set[str] = set()
    for operation in operations:
        values = [value for value in operation.operands if value in stages]
        ends = {v for v in values if v in outputs or any(stages[u.name] != stages[v] for u in users[v])}
        if operation.lax and "exp" not in operation.classes and free | ends >= set(values):
            free.add(operation.name)
    found = dict(stages)
    for operation in reversed(operations):
        if operation.name in free and operation.name in users:
            found[operation.name] = (min(found[user.name][0] for user in users[operation.name]), False)
    return found
