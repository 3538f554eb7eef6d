"""Flips along axes, padding by a tensor's own elements (reflected, repeated), and ONNX's Pad by these."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ladder.frontend.importer import Importer, attribute
from ladder.frontend.onnx_call import Call
from ladder.ir.extents import total
from tile_types.tile import Tile

Ends = tuple[list[str], list[str]]
"""What is joined before and behind a value."""

Border = Callable[[Importer, str, int, int, int], "Ends | None"]
"""``(importer, value, axis, before, after) -> what lies before and behind it``; None if not in reach."""


def mirrored(im: Importer, value: str, axis: int, first: int, count: int, step: int = 1) -> str:
    """Return elements of an axis from one on towards the beginning."""
    shape = im.shape(value)
    axis %= len(shape)
    if not count:
        return im.take_axis(value, axis, 0, 0)
    names = [f"a{at}" for at in range(len(shape))]
    places = [f"{first}-{step}*{name}" if at == axis else name for at, name in enumerate(names)]
    spec = f"{' '.join(places)} -> {' '.join(names)}"
    return im.g.add("map", value, spec=spec, sizes=((names[axis], count),), pad=False)


def bordered(im: Importer, value: str, border: Border, amounts: Sequence[tuple[int, int, int]]) -> str | None:
    """Pad axes by elements of their own; None if those are not in reach."""
    for axis, before, after in amounts:
        if not before and not after:
            continue
        ends = border(im, value, axis, before, after)
        if ends is None:
            return None
        value = im.g.add("concat", *ends[0], value, *ends[1], axis=axis)
    return value


def reflected(im: Importer, value: str, axis: int, before: int, after: int) -> Ends | None:
    """Return what lies next to the ends of an axis, mirrored."""
    extent = im.shape(value)[axis]
    if not isinstance(extent, int) or max(before, after) >= extent:
        return None

    def part(first: int, count: int) -> list[str]:
        if count == 1:  # joined along further axes in the same kernel
            return [im.take_axis(value, axis, first, 1)]
        return [mirrored(im, value, axis, first, count)] if count else []

    return part(before, before), part(extent - 2, after)


def repeated(im: Importer, value: str, axis: int, before: int, after: int) -> Ends | None:
    """Return the first and the last element of an axis, as often as it is padded."""
    shape = im.shape(value)
    extent = shape[axis]
    if not isinstance(extent, int) or not extent:
        return None

    def end(place: int, count: int) -> list[str]:
        wide = [count if at == axis else size for at, size in enumerate(shape)]
        return [im.expand(im.take_axis(value, axis, place, 1), wide)] if count else []

    return end(0, before), end(extent - 1, after)


def wrapped(im: Importer, value: str, axis: int, before: int, after: int) -> Ends | None:
    """Return what lies next to the other end of an axis."""
    extent = im.shape(value)[axis]
    if not isinstance(extent, int) or max(before, after) > extent:
        return None
    left = [im.take_axis(value, axis, extent - before, before)] if before else []
    return left, [im.take_axis(value, axis, 0, after)] if after else []


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
        found = bordered(call.im, inside, BORDERS[mode], amounts)
        return _by_torch(call, inside, mode, amounts) if found is None else found
    low, high = [0] * rank, [0] * rank
    for axis, before, after in amounts:
        low[axis], high[axis] = before, after
    number = attribute(call.given.get("value") or call.number(2) or 0, call.ttype(0))
    return call.im.g.add("pad", inside, low=tuple(low), high=tuple(high), value=number)


def _by_torch(call: Call, inside: str, mode: bytes, amounts: Sequence[tuple[int, int, int]]) -> str:
    """Let torch pad, by amounts that no call reads again: those of versions before 11 are attributes."""
    shape, pads = list(call.im.shape(inside)), [0] * (2 * len(call.shape(0)))
    for axis, before, after in amounts:
        pads[axis], pads[axis + len(shape)] = before, after
        shape[axis] = total((shape[axis], before, after))
    attributes = (("mode", mode.decode()), ("pads", tuple(pads)))
    keywords = (("attributes", attributes), ("domain", ""), ("version", 2))
    tile = Tile(call.im.tile(inside).ttype, tuple(shape))
    return call.im.call("onnx.Pad", (("%", 0),), keywords, [inside], [tile]).values[0]


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
