"""Constant folding of values that read no input, such as masks made of counters and comparisons."""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import numpy as np
import numpy.typing as npt

from ladder.ir.build import node_attributes
from ladder.ir.extents import size_names
from ladder.ir.graph import Node
from ladder.ir.node_extents import extents_of
from ladder.ir.ops import get_operator

MOST_ELEMENTS = 1 << 22
"""Elements of a value up to which it is computed while compiling."""

EXACT = 1 << 53
"""Whole numbers up to which a float64 holds all."""

WHOLE = ("bool", "int8", "int16", "int32", "int64", "uint8")
"""Types of counters, comparisons and masks."""


def constant_value(node_of: Callable[[str], Node], value: str) -> npt.NDArray[np.float64] | None:
    """Return the elements of a value of whole numbers or truth values that reads no input.

    None for others: those that depend on inputs, on open sizes or on rounding, and those that are too large.

    node_of: Value -> the node that computes it.
    """
    known: dict[str, npt.NDArray[np.float64]] = {}
    todo = [value] if _is_exact(node_of(value)) else []
    while todo:
        node = node_of(todo[-1])
        missing = [operand for operand in node.inputs if operand not in known]
        if not missing:
            operands = [known[operand] for operand in node.inputs]
            found = get_operator(node.operator).reference(operands, node_attributes(node))
            if np.any(np.abs(found) > EXACT):
                return None
            known[todo.pop()] = found
        elif all(_is_exact(node_of(operand)) for operand in missing):
            todo += missing
        else:
            return None
    return known.get(value)


def _is_exact(node: Node) -> bool:
    """Tell whether float64 holds what a node computes, and there is little of it."""
    shape, ttype = node.tile.shape, node.tile.ttype
    if node.operator in ("input", "call") or size_names(extents_of(node)):
        return False
    whole = ttype.name in WHOLE or node.operator in (
        "constant",
        "broadcast",
        "reshape",
    )  # these round nothing
    return whole and prod(map(int, shape)) <= MOST_ELEMENTS
