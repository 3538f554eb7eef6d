"""Pad of ONNX as tile graph rows: constants, mirrored and repeated borders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ladder.frontend.borders import Border, bordered, reflected, repeated, wrapped
from ladder.frontend.importer import attribute
from ladder.frontend.onnx_call import Call

BORDERS: Mapping[bytes, Border] = {b"reflect": reflected, b"edge": repeated, b"wrap": wrapped}
"""Mode of Pad -> what it puts around a tensor."""


def padded(call: Call) -> Any:
    """Pad by known amounts; None if torch has to."""
    rank = len(call.shape(0))
    pads = call.ints(1, "pads") or []
    axes = [axis % rank for axis in call.ints(3) or range(rank)]
    mode = call.given.get("mode", b"constant")
    amounts = list(zip(axes, pads, pads[len(axes) :], strict=False))
    inside = None if call.out.startswith("fp8") else _cut(call, amounts)
    if inside is None or mode not in (b"constant", *BORDERS):
        return None
    amounts = [(axis, max(before, 0), max(after, 0)) for axis, before, after in amounts]
    if mode in BORDERS:
        return bordered(call.im, inside, BORDERS[mode], amounts)
    low, high = [0] * rank, [0] * rank
    for axis, before, after in amounts:
        low[axis], high[axis] = before, after
    number = attribute(call.given.get("value") or call.number(2) or 0, call.ttype(0))
    return call.im.g.add("pad", inside, low=tuple(low), high=tuple(high), value=number)


def _cut(call: Call, amounts: Sequence[tuple[int, int, int]]) -> str | None:
    """Return the operand without what amounts below 0 take away; None if that is not known to be there."""
    value = call.tensor(0)
    for axis, before, after in amounts:
        extent, first, last = call.im.shape(value)[axis], max(-before, 0), max(-after, 0)
        if not first and not last:
            continue
        if not isinstance(extent, int) or first + last > extent:
            return None
        value = call.im.take_axis(value, axis, first, extent - first - last)
    return value
