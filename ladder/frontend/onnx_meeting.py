"""Operands whose shapes agree only within limits of open sizes, such as a table cut to ``S`` rows.

A table of 512 rows cut to ``S`` rows has ``min(S, 512)`` of them, which broadcast with ``S`` rows only where
``S`` is at most 512. So it is taken to have ``S`` rows, and each call is checked for that limit. Operands of
a concatenation have equal extents along all other axes, however these are written: calls are checked too.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from ladder.frontend.onnx_call import Call, Row, Value
from ladder.ir.extents import canonical, smaller
from tile_types.errors import ShapeError
from tile_types.tile import Extent

BROADCAST = frozenset(
    {
        *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Where", "Expand", "And", "Or", "Xor"),
        *("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"),
    }
)
"""Operators whose operands all broadcast; the second of Expand is what its first broadcasts with."""

_LIMIT = re.compile(r"- (\d+), 0\)")


def by_row(row: Row, call: Call) -> Any:
    """Return what a row gives, of operands as they are or as they can only be."""
    try:
        return row(call)
    except ShapeError:
        again = met(call)
        if again is None:
            raise
        return row(again)


def met(call: Call) -> Call | None:
    """Return a call whose operands have the extents that they can only have; None if none has others.

    The limits that this needs are added to the plan's.
    """
    if call.node.op_type == "Concat":
        return _alike(call)
    if call.node.op_type not in BROADCAST:
        return None
    shapes = [call.shape(at) for at in range(len(call.inputs))]
    targets = (
        [*shapes[:1], tuple(map(canonical, call.extents(1)))] if call.node.op_type == "Expand" else shapes
    )
    inputs, changed = list(call.inputs), False
    for axis, extents in enumerate(zip_longest(*(shape[::-1] for shape in targets), fillvalue=1)):
        for at, extent in enumerate(extents):
            whole = next((other for other in extents if limit_of(extent, other) is not None), None)
            if whole is None or shapes[at] is not targets[at]:
                continue
            inputs[at] = _shown(call, inputs[at], -1 - axis, whole)
            call.piece.limits.append((whole, limit_of(extent, whole) or 0))
            changed = True
    return replace(call, inputs=tuple(inputs)) if changed else None


def _alike(call: Call) -> Call | None:
    """Return a call whose operands have the same extents but along the axis that joins them.

    None if they have, or if two known extents differ.
    """
    shapes = [call.shape(at) for at in range(len(call.inputs))]
    rank = len(shapes[0])
    if any(len(shape) != rank for shape in shapes):
        return None
    inputs, changed = list(call.inputs), False
    for axis in set(range(rank)) - {call.given["axis"] % rank}:
        extents = dict.fromkeys(shape[axis] for shape in shapes)
        extent = min(extents, key=lambda extent: (not isinstance(extent, int), len(str(extent))))
        for at, shape in enumerate(shapes):
            if shape[axis] == extent:
                continue
            if isinstance(shape[axis], int):
                return None
            inputs[at] = _shown(call, inputs[at], axis, extent)
            call.piece.limits += [(shape[axis], extent), (extent, shape[axis])]
            changed = True
    return replace(call, inputs=tuple(inputs)) if changed else None


def limit_of(extent: Extent, whole: Extent) -> int | None:
    """Return the number n > 1 of which and of ``whole`` an extent is the smaller one; None if there is none.

    >>> limit_of("S - max(S - 512, 0)", "S")
    512
    """
    if not isinstance(extent, str) or not isinstance(whole, str) or extent == whole:
        return None
    numbers = (int(number) for number in _LIMIT.findall(extent))
    return next((n for n in numbers if n > 1 and smaller(whole, n) == extent), None)


def _shown(call: Call, value: Value | None, axis: int, extent: Extent) -> str:
    assert value is not None  # it has a shape
    return call.im.take_axis(call.piece.tensor(value), axis, 0, extent)
