"""Rows of ATen's operators that move elements along axes: turned around, rolled, repeated at borders."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from ladder.frontend.importer import Importer, Row
from tile_types.tile import Extent


def _reversed(im: Importer, x: str, axis: int) -> str:
    """Return x with the elements along an axis, of known extent, from the last to the first."""
    shape = im.shape(x)
    names = [f"i{at}" for at in range(len(shape))]
    places = [f"-{name}+{int(shape[axis]) - 1}" if at == axis else name for at, name in enumerate(names)]
    sizes = ((names[axis], shape[axis]),)
    return im.g.add("map", x, spec=f"{' '.join(places)} -> {' '.join(names)}", sizes=sizes)


def _flipped(im: Importer, out: str, x: str, axes: Sequence[int]) -> Any:
    shape = im.shape(x)
    known = all(isinstance(shape[axis], int) and shape[axis] for axis in axes)
    return reduce(lambda value, axis: _reversed(im, value, axis % len(shape)), axes, x) if known else None


def _joined(im: Importer, axis: int, *parts: str) -> str:
    kept = [part for part in parts if im.shape(part)[axis] != 0]
    return kept[0] if len(kept) == 1 else im.g.add("concat", *kept, axis=axis)


def _rolled(im: Importer, out: str, x: str, shifts: Sequence[Any], axes: Sequence[int] = ()) -> Any:
    """Return x with what leaves it at the end of an axis at its beginning."""
    shape = im.shape(x)
    extents = [shape[axis] for axis in axes]
    if not axes or not all(isinstance(n, int) and n for n in (*extents, *(s or 1 for s in shifts))):
        return None
    for shift, axis, extent in zip(shifts, axes, extents, strict=True):
        last = shift % int(extent)
        parts = (int(extent) - last, last), (0, int(extent) - last)
        x = _joined(im, axis % len(shape), *(im.take_axis(x, axis, *part) for part in parts))
    return x


def _mirrored(im: Importer, x: str, axis: int, width: int, *, first: bool) -> str:
    """Return the elements beside the first or last of an axis, turned around."""
    begin = 1 if first else int(im.shape(x)[axis]) - 1 - width
    return _reversed(im, im.take_axis(x, axis, begin, width), axis)


def _edge(im: Importer, x: str, axis: int, width: int, *, first: bool) -> str:
    """Return the first or last element of an axis several times."""
    one = im.take_axis(x, axis, 0 if first else int(im.shape(x)[axis]) - 1, 1)
    shape: list[Extent] = [width if at == axis else n for at, n in enumerate(im.shape(x))]
    return im.expand(one, shape)


def _bordered(border: Any) -> Row:
    """Return the row of a pad: widths before and after each axis, from the last axis on."""

    def row(im: Importer, out: str, x: str, widths: Sequence[Any]) -> Any:
        rank = len(im.shape(x))
        axes = range(rank - 1, rank - 1 - len(widths) // 2, -1)
        extents = [im.shape(x)[axis] for axis in axes]
        if not all(isinstance(n, int) for n in (*extents, *widths)) or min(widths) < 0 or 0 in extents:
            return None
        for axis, before, after in zip(axes, widths[::2], widths[1::2], strict=True):
            ends = [
                border(im, x, axis, n, first=first) if n else ""
                for n, first in ((before, True), (after, False))
            ]
            x = _joined(im, axis, *(part for part in (ends[0], x, ends[1]) if part))
        return x

    return row


MOVES: dict[str, Row] = {
    "flip.default": _flipped,
    "roll.default": _rolled,
    **{f"reflection_pad{axes}d.default": _bordered(_mirrored) for axes in (1, 2, 3)},
    **{f"replication_pad{axes}d.default": _bordered(_edge) for axes in (1, 2, 3)},
}
"""Name and overload -> row."""
