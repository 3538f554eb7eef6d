"""ATen's rows of numbers at equal distances, and identity matrices.

Of floats, kernels for GPUs compute what torch's do: in the type itself, a product and a sum rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ladder.frontend.importer import Importer
from ladder.ir.extents import floordiv, product, total
from tile_types.tile import Extent

FLOATS = ("float32", "float64")
"""Types in which torch counts; it counts halves in others, and rounds each step of them."""


def counted(im: Importer, out: str, start: Any, end: Any = None, step: Any = 1, **_: Any) -> Any:
    """Return numbers from one on, up to another; None where torch counts."""
    start, end = (0, start) if end is None else (start, end)
    start, end, step = (int(value) if isinstance(value, bool) else value for value in (start, end, step))
    if step == 0:
        return None
    if not all(isinstance(value, int | str) for value in (start, end)) or not isinstance(step, int):
        return _counted_floats(im, out, start, end, step)
    low, high = (start, end) if step > 0 else (end, start)
    span = total([high, product([-1, low]), abs(step) - 1])
    found = im.g.add("iota", extent=floordiv(span, abs(step)), begin=start, step=step, type="int64")
    return im.cast(found, out)


def _counted_floats(im: Importer, out: str, *numbers: Any) -> Any:
    if not _are_floats(im, out, numbers):
        return None
    start, end, step = map(float, numbers)
    count = math.ceil((end - start) / step)
    if count <= 0:
        return None
    return _line(im, out, _places(im, out, count), step, start)


def spaced(im: Importer, out: str, start: Any, end: Any, count: Any, **_: Any) -> Any:
    """Return numbers between two, each half counted from its end, as torch does."""
    if not _are_floats(im, out, (start, end)) or not isinstance(count, int) or count < 2:
        return None
    kind = np.dtype(out).type
    with np.errstate(all="ignore"):
        step = float((kind(end) - kind(start)) / kind(count - 1))
    if not math.isfinite(step):
        return None
    places = _places(im, out, count)
    from_end = im.g.add("sub", im.number(float(count - 1), out), places)
    first = im.g.add("less", places, im.number(float(count // 2), out))
    low, high = _line(im, out, places, step, start), _line(im, out, from_end, -step, end)
    return im.g.add("select", first, low, high)


def _are_floats(im: Importer, out: str, numbers: Sequence[Any]) -> bool:
    """Tell whether known numbers, far from the ends of the range, are counted as kernels for GPUs do."""
    known = all(isinstance(value, int | float) and abs(value) < 2.0**100 for value in numbers)
    return known and out in FLOATS and not im.on_cpu


def _places(im: Importer, out: str, count: int) -> str:
    return im.cast(im.g.add("iota", extent=count, begin=0, step=1, type="int64"), out)


def _line(im: Importer, out: str, places: str, step: float, start: float) -> str:
    return im.g.add("fused", places, im.number(step, out), im.number(float(start), out))


def identity(im: Importer, out: str, rows: Extent, columns: Extent | None = None, **_: Any) -> Any:
    """Return a matrix that is one on its diagonal and zero beside it."""
    extents = (rows, rows if columns is None else columns)
    row, column = (
        im.g.add("iota", extent=extent, axis=axis, rank=2, type="int64")
        for axis, extent in enumerate(extents)
    )
    return im.cast(im.apply("equal", [row, column], "int64"), out)
