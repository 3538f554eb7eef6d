"""Rows of ATen's operators that move elements along axes: turned around, rolled, repeated at borders."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from ladder.frontend.borders import Border, bordered, mirrored, reflected, repeated
from ladder.frontend.importer import Importer, Row
from ladder.ir.extents import quotient, total
from tile_types.tile import Extent


def _flipped(im: Importer, out: str, x: str, axes: Sequence[int]) -> Any:
    shape = im.shape(x)
    axes = axes if shape else ()  # a number may be turned around along axis 0
    extents = [shape[axis] for axis in axes]
    for axis, extent in zip(axes, extents, strict=True):
        if not isinstance(extent, int) or not extent:
            return None
        x = mirrored(im, x, axis, extent - 1, extent)
    return x


def _rolled(im: Importer, out: str, x: str, shifts: Sequence[Any], axes: Sequence[int] = ()) -> Any:
    """Return x with what leaves it at the end of an axis at its beginning."""
    shape = im.shape(x)
    extents = [shape[axis] for axis in axes]
    if not axes or not all(isinstance(n, int) and n for n in (*extents, *(s or 1 for s in shifts))):
        return None
    for shift, axis, extent in zip(shifts, axes, map(int, extents), strict=True):
        if last := shift % extent:
            parts = im.take_axis(x, axis, extent - last, last), im.take_axis(x, axis, 0, extent - last)
            x = im.g.add("concat", *parts, axis=axis % len(shape))
    return x


def _bordered(border: Border) -> Row:
    """Return the row of a pad: widths before and after each axis, from the last axis on."""

    def row(im: Importer, out: str, x: str, widths: Sequence[Any]) -> Any:
        if not all(isinstance(width, int) and width >= 0 for width in widths):
            return None
        axes = range(len(im.shape(x)) - 1, -1, -1)
        return bordered(im, x, border, list(zip(axes, widths[::2], widths[1::2], strict=False)))

    return row


STRETCHED = (1, 2, 4)
"""Factors by which kernels of ours interpolate: their weights are exact; each phase has code of its own."""


def _upsampled(im: Importer, out: str, x: str, sizes: Sequence[Extent], name: str, *options: Any) -> Any:
    """Repeat the elements of an image that grows by whole factors, or interpolate between them on GPUs."""
    kept, scales = len(im.shape(x)) - len(sizes), options[1] if len(options) > 1 else None
    found = [quotient(size, old) for size, old in zip(sizes, im.shape(x)[kept:], strict=True)]
    factors = [factor for factor in found if isinstance(factor, int) and _repeats(factor, name)]
    grows = len(factors) == len(found) and any(factor > 1 for factor in factors)
    if not grows or (scales is not None and list(scales) != factors):
        return None
    if name in ("upsample_bilinear2d", "upsample_linear1d") and options[0] is False:
        known = all(isinstance(extent, int) and extent for extent in im.shape(x))
        ours = known and not im.on_cpu and out in ("float32", "float16", "bfloat16")
        return _interpolated(im, out, x, factors, kept) if ours and {*factors} <= {*STRETCHED} else None
    if "nearest" not in name:
        return None
    return im.repeat_elements(x, [1] * kept + factors)


def _interpolated(im: Importer, out: str, x: str, factors: Sequence[int], first: int) -> str:
    """Return an image that grows by whole factors from axis ``first`` on, its corners half a pixel inside.

    The results of a pixel lie beside each other: each is of that pixel and of one neighbour, of which those
    at the border have none.
    """
    value = im.cast(x, "float32")
    for axis, factor in enumerate(factors, first):
        value = value if factor == 1 else _stretched(im, value, axis, factor)
    return im.cast(value, out)


def _stretched(im: Importer, value: str, axis: int, factor: int) -> str:
    """Interpolate along one axis."""
    shape = im.shape(value)
    count, sides = shape[axis], tuple(int(at == axis) for at in range(len(shape)))
    around = im.g.add("pad", value, low=sides, high=sides, value=0.0)
    position = im.g.add("iota", extent=count, axis=axis, rank=len(shape), type="int64")
    results = []
    for at in range(factor):
        place = (at + 0.5) / factor - 0.5
        if place:
            last = total((count, -1))
            edge = im.apply("equal", [position, 0 if place < 0 else last], "int64")
            there = im.g.add("select", edge, *(im.number(w, "float32") for w in (0.0, abs(place))))
            here = im.apply("sub", [1.0, there], "float32")
            near = im.take_axis(around, axis, 0 if place < 0 else 2, count)
            own, other = (im.apply("mul", pair, "float32") for pair in ((value, here), (near, there)))
            found = im.apply("add", [own, other], "float32")
        results.append(im.reshape(found if place else value, [*shape[: axis + 1], 1, *shape[axis + 1 :]]))
    beside = im.g.add("concat", *results, axis=axis + 1)
    return im.reshape(beside, [*shape[:axis], count * factor, *shape[axis + 1 :]])


def _repeats(factor: int, name: str) -> bool:
    """Whether torch's float32 places of ``factor`` results each are those of one element.

    Where pixels are not measured from their middle, the reciprocal must not be rounded down.
    """
    return factor >= 1 and ("exact" in name or Fraction(float(np.float32(1 / factor))) * factor >= 1)


MOVES: dict[str, Row] = {
    "upsample.default": _upsampled,
    "flip.default": _flipped,
    "roll.default": _rolled,
    **{f"reflection_pad{axes}d.default": _bordered(reflected) for axes in (1, 2, 3)},
    **{f"replication_pad{axes}d.default": _bordered(repeated) for axes in (1, 2, 3)},
}
"""Name and overload -> row."""
