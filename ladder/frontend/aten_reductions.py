"""Reductions of ATen as tile graph rows: sums, means, extremes, variances; see `aten_rows`."""

from __future__ import annotations

import math
from functools import reduce
from typing import Any

import numpy as np

from ladder.frontend.importer import WIDE, Importer, Row, wide_of
from ladder.ir.extents import product
from ladder.partition.rows import most_scanned
from tile_types.errors import ShapeError


def _summed(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False, **_: Any) -> Any:
    wide = "float32" if out in ("float16", "bfloat16") else out
    return im.cast(im.reduce("reduce_sum", im.cast(x, wide), _axes(im, x, axes), keep), out)


def _averaged(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False, **_: Any) -> Any:
    return im.cast(im.mean(im.cast(x, wide_of(out)), _axes(im, x, axes), keep), out)


def _largest(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False) -> Any:
    if out == "bool":  # of nothing the least uint8, which is False
        return im.cast(_largest(im, "uint8", im.cast(x, "uint8"), axes, keep), out)
    return im.reduce("reduce_max", x, _axes(im, x, axes), keep)


def _smallest(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False) -> Any:
    """Negate around the greatest; of integers ``-1 - x``, which all of them have."""
    if out == "bool":
        return im.cast(_smallest(im, "int32", im.cast(x, "int32"), axes, keep), out)

    def turned(value: str) -> str:
        if "int" in out:
            return im.arithmetic("sub", [-1, value], out)
        return im.arithmetic("neg", [value], out)

    return turned(im.reduce("reduce_max", turned(x), _axes(im, x, axes), keep))


MOST_FACTORS = 8
"""Elements of a product that is written out; longer ones are torch's."""


def _multiplied(im: Importer, out: str, x: str, axis: int, keep: bool = False, **_: Any) -> Any:
    shape = im.shape(x)
    extent = shape[axis] if shape else 0
    if not isinstance(extent, int) or not 0 < extent <= MOST_FACTORS or out == "bool":
        return None
    axis %= len(shape)
    parts = [im.take_axis(x, axis, at, 1) for at in range(extent)]
    wide = out if out in WIDE else "int32" if "int" in out else "float32"
    found = im.cast(reduce(lambda a, b: im.apply("mul", [a, b], wide), parts), out)
    return found if keep else im.reshape(found, [*shape[:axis], *shape[axis + 1 :]])


def _place(*, smallest: bool = False) -> Row:
    """Return a row of where an extreme along an axis is, on GPUs: NaN is one, of equal ones the first is."""

    def row(im: Importer, out: str, x: str, axis: int | None = None, keep: bool = False) -> Any:
        known = all(isinstance(extent, int) and extent for extent in im.shape(x))
        if im.on_cpu or not known or not im.shape(x) or im.ttype(x) not in ("float32", "float16", "bfloat16"):
            return None
        if axis is None:
            found = row(im, out, im.reshape(x, [product(im.shape(x))]), 0)
            return im.reshape(found, [1] * len(im.shape(x))) if keep else found
        rank, axis = len(im.shape(x)), axis % len(im.shape(x))
        extent = int(im.shape(x)[axis])
        wide = im.cast(im.stepped(x), "float32")
        wide = im.g.add("neg", wide) if smallest else wide
        most = im.reduce("reduce_max", wide, [axis], True)
        others = im.g.add("negation", im.g.add("equal", wide, wide))
        there = im.g.add("either", im.g.add("equal", wide, most), others)
        before = im.g.add("iota", extent=extent, axis=axis, rank=rank, begin=0, step=-1, type="int32")
        first = im.reduce(
            "reduce_max", im.g.add("select", there, before, im.number(-extent, "int32")), [axis], keep
        )
        return im.cast(im.arithmetic("neg", [first], "int32"), "int64")

    return row


def _values(row: Row, place: Row) -> Row:
    """Return a row of (extremes along an axis, where they are)."""

    def values(im: Importer, out: str, x: str, axis: int, keep: bool = False) -> Any:
        at = place(im, "int64", x, axis, keep) if 1 in im.used else None
        asked = at is None and 1 in im.used
        return None if asked or not im.shape(x) else (row(im, out, x, axis, keep), at)

    return values


def _any(im: Importer, out: str, x: str, axes: Any = None, keep: bool = False) -> Any:
    """Return whether one is true; of other types than bool a call."""
    return _largest(im, out, x, axes, keep) if im.ttype(x) == out == "bool" else None


def _norm(
    im: Importer, out: str, x: str, order: float = 2, axes: Any = None, keep: bool = False, **_: Any
) -> Any:
    """Return the norm of order 2, 1 or infinity; other orders are calls."""
    wide, chosen = wide_of(out), _axes(im, x, axes)
    if order not in (1, 2, math.inf) or not out.startswith(("float", "bfloat")):
        return None
    if all(im.shape(x)[axis] == 1 for axis in chosen):
        order = 1  # the square of one element may be none of the type's numbers
    parts = im.g.add("square" if order == 2 else "abs", im.cast(x, wide))
    found = im.reduce("reduce_max" if order == math.inf else "reduce_sum", parts, chosen, keep)
    return im.cast(im.g.add("sqrt", found) if order == 2 else found, out)


def _axes(im: Importer, x: str, axes: Any) -> list[int]:
    rank = len(im.shape(x))
    chosen = [axes] if isinstance(axes, int) else axes
    return [axis % rank for axis in chosen] if chosen and rank else list(range(rank))


def _moments(*, root: bool = False, both: bool = False) -> Row:
    """Return a row of the variance or its root, or of (that, mean)."""

    def row(
        im: Importer, out: str, x: str, axes: Any = None, *, correction: Any = 1, keepdim: bool = False
    ) -> Any:
        found, mean = _mean_and_variance(im, out, x, axes, correction, keepdim, root)
        if not both:
            return found
        return found, im.g.add("sub", mean, im.g.add("sub", mean, mean))  # NaN beside infinities, as torch's

    return row


def _mean_and_variance(
    im: Importer, out: str, x: str, axes: Any, correction: Any, keepdim: bool, root: bool
) -> Any:
    """Return (variance or its root, mean); on CPUs those of float32's range in float64, as torch."""
    within = "float64" if im.on_cpu and out in ("float32", "bfloat16") else wide_of(out)
    chosen, wide = _axes(im, x, axes), im.cast(x, within)
    mean = im.mean(wide, chosen)
    deviations = im.g.add("square", im.g.add("sub", wide, mean))
    sums = im.reduce("reduce_sum", deviations, chosen, True)
    count = im.count(wide, chosen)
    if isinstance(correction, str):
        raise ShapeError(f"the correction of a variance is an open size: {correction}")
    if correction:
        left = im.apply("sub", [count, float(correction)], within)
        count = im.apply("maximum", [left, 0.0], within)
    variance = im.g.add("div", sums, count)
    results = (im.g.add("sqrt", variance) if root else variance, mean)
    shape = [extent for at, extent in enumerate(im.shape(x)) if at not in chosen]
    return tuple(im.cast(r if keepdim else im.reshape(r, shape), out) for r in results)


PART = 1 << 12
"""Elements of a part of a row that is longer than what a block scans."""

LEAST_COLUMNS = 8
"""Elements behind an axis from which on it is scanned where it is: a block reads so many side by side."""

BEFORE_ALL: dict[str, Any] = {"scan_sum": 0.0, "scan_product": 1.0, "scan_max": None, "scan_logsumexp": None}
"""Scan -> what nothing gives; None: the least number there is."""


COMBINE = {"scan_sum": "add", "scan_max": "maximum", "scan_product": "mul", "scan_logsumexp": "logaddexp"}
"""Scan -> what makes one of two of its values."""


def _scan(operator: str, *, both: bool = False) -> Row:
    """Return a row of a scan along an axis of known extent, on GPUs; ``both``: of (values, positions)."""

    def row(im: Importer, out: str, x: str, axis: int, *, dtype: Any = None) -> Any:
        shape = im.shape(x)
        if im.on_cpu or not shape or not isinstance(shape[axis], int) or not shape[axis] or 1 in im.used:
            return None
        wide = out if out in ("float32", "float64", "int32", "int64") else "float32"
        if not out.startswith(("float", "bfloat", "int32", "int64")):
            return None
        if operator == "scan_logsumexp" and wide != "float32":
            return None
        axis %= len(shape)
        columns = product(shape[axis + 1 :])
        if isinstance(columns, int) and columns >= LEAST_COLUMNS:
            found = im.cast(im.g.add(operator, im.cast(x, wide), axis=axis), out)
            return (found, None) if both else found
        order = [at for at in range(len(shape)) if at != axis]
        turned = im.permute(im.cast(x, wide), [*order, axis])
        found = im.cast(_scanned(im, operator, turned), out)
        back = im.permute(found, [*range(axis), len(shape) - 1, *range(axis, len(shape) - 1)])
        return (back, None) if both else back

    return row


def _least_so_far(im: Importer, out: str, x: str, axis: int) -> Any:
    """Return what is the largest so far of the negated floats, negated."""
    if not out.startswith(("float", "bfloat")):
        return None
    found = _scan("scan_max", both=True)(im, out, im.arithmetic("neg", [x], out), axis)
    return None if found is None else (im.arithmetic("neg", [found[0]], out), None)


def _scanned(im: Importer, operator: str, x: str) -> str:
    """Return the scan along the last axis; where a block does not hold it, of parts, and of their ends."""
    shape = im.shape(x)
    rank, length = len(shape) - 1, int(shape[-1])
    bits = im.tile(x).ttype.elem_bits
    if length <= most_scanned(length, bits):
        return im.g.add(operator, x, axis=rank)
    before = BEFORE_ALL[operator]
    least = -math.inf if "float" in im.ttype(x) else np.iinfo(im.ttype(x)).min
    nothing = least if before is None else before
    parts = -(-length // PART)
    even = (count for count in range(parts, 8 * parts) if length % count == 0)
    parts = next((count for count in even if length // count % (128 // bits) == 0), parts)
    held = -(-length // parts // 4) * 4
    low, high = (0,) * (rank + 1), (*(0,) * rank, parts * held - length)
    x = im.g.add("pad", x, low=low, high=high, value=nothing) if any(high) else x
    x = im.reshape(x, [*shape[:-1], parts, held])
    if operator in ("scan_product", "scan_logsumexp"):
        ends = im.take_axis(im.g.add(operator, x, axis=rank + 1), rank + 1, held - 1, 1)
    else:  # read again: less than storing all twice
        ends = im.reduce(operator.replace("scan", "reduce"), x, [rank + 1], True)
    joined = _scanned(im, operator, im.reshape(ends, [*shape[:-1], parts]))
    earlier = im.g.add("slice", joined, begin=low, shape=(*shape[:-1], parts - 1))
    earlier = im.g.add("pad", earlier, low=(*low[:-1], 1), high=low, value=nothing)
    found = im.g.add(
        COMBINE[operator], im.g.add(operator, x, axis=rank + 1), im.reshape(earlier, [*shape[:-1], parts, 1])
    )
    found = im.reshape(found, [*shape[:-1], parts * held])
    return im.g.add("slice", found, begin=low, shape=shape) if any(high) else found


REDUCTIONS: dict[str, Row] = {
    "cumsum.default": _scan("scan_sum"),
    "cumprod.default": _scan("scan_product"),
    "cummax.default": _scan("scan_max", both=True),
    "cummin.default": _least_so_far,
    "logcumsumexp.default": _scan("scan_logsumexp"),
    "sum.default": _summed,
    "sum.dim_IntList": _summed,
    "mean.default": _averaged,
    "mean.dim": _averaged,
    "amax.default": _largest,
    "prod.dim_int": _multiplied,
    "amin.default": _smallest,
    "max.default": _largest,
    "min.default": _smallest,
    "max.dim": _values(_largest, _place()),
    "min.dim": _values(_smallest, _place(smallest=True)),
    "argmax.default": _place(),
    "argmin.default": _place(smallest=True),
    **dict.fromkeys(("any.default", "any.dim", "any.dims"), _any),
    "linalg_vector_norm.default": _norm,
    "var.correction": _moments(),
    "std.correction": _moments(root=True),
    "var_mean.correction": _moments(both=True),
    "std_mean.correction": _moments(root=True, both=True),
}
"""Name and overload -> row."""
