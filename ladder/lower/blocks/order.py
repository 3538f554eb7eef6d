"""Order of values that pass through shared memory: one barrier per level of dependence.

A warp must wait for the others of its group between writing such a value and reading it. With each value
computed at its *depth*, the number of such values on the longest path to it, one barrier serves all values
of a depth, and no order has fewer: the values on a longest path need one barrier each.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def depths(operands: Mapping[str, Sequence[str]], shared: Collection[str]) -> dict[str, int]:
    """Return the depth of every value.

    operands: Value -> the values it is computed of, in an order in which operands come first.
    shared: Values that pass through shared memory.
    """
    found: dict[str, int] = {}
    for value, inputs in operands.items():
        found[value] = max((found[name] + (name in shared) for name in inputs if name in found), default=0)
    return found


def levels(operands: Mapping[str, Sequence[str]], shared: Collection[str]) -> list[list[str]]:
    """Return the shared values by depth: a barrier follows each list."""
    depth = depths(operands, shared)
    count = 1 + max((depth[name] for name in shared if name in depth), default=-1)
    return [[name for name in operands if name in shared and depth[name] == level] for level in range(count)]
