"""Rows of ATen's operators that write, or combine with what is there, rows and elements by number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ladder.frontend.aten_gathers import NUMBERS, joined_numbers
from ladder.frontend.importer import Importer, Row
from ladder.ir import shapes
from ladder.ir.extents import product

COMBINED = ("float32", "float64", "float16", "bfloat16", "int32", "int64")
"""Types that GPUs combine in memory."""

REDUCED = {"sum": "add", "amax": "max", "amin": "min"}
"""Reductions of torch's scatters -> how rows are combined."""


def rows_put(
    im: Importer, out: str, x: str, indices: Sequence[Any], rows: str, accumulate: bool = False
) -> Any:
    """One vector of numbers along one axis; of sums any numbers of axes that follow each other."""
    places = [axis for axis, numbers in enumerate(indices) if numbers is not None]
    if not places or any(im.ttype(indices[axis]) not in NUMBERS for axis in places):
        return None
    if accumulate:
        return _sums_put(im, x, [indices[axis] for axis in places], places, rows)
    (axis,), shape = places[:1], im.shape(x)
    ids = indices[axis]
    if len(places) > 1 or len(im.shape(ids)) != 1:
        return None
    there = im.expand(rows, (*shape[:axis], *im.shape(ids), *shape[axis + 1 :]))
    return im.g.add("put", x, ids, there, axis=axis, from_end=True)


def rows_copied(im: Importer, out: str, x: str, axis: int, ids: str, rows: str) -> Any:
    """As `rows_put`, of numbers that are not negative."""
    if len(im.shape(ids)) != 1 or not im.shape(x):
        return None
    return im.g.add("put", x, ids, rows, axis=axis % len(im.shape(x)))


def _combines(im: Importer, x: str, ids: Sequence[str]) -> bool:
    """Tell whether kernels may combine: on GPUs, and floats only where their order is free."""
    free = "float" not in im.ttype(x) or not torch.are_deterministic_algorithms_enabled()
    known = all(isinstance(e, int) and e for value in (x, *ids) for e in im.shape(value))
    numbered = all(im.ttype(value) in NUMBERS for value in ids)
    return not im.on_cpu and free and known and numbered and bool(im.shape(x)) and im.ttype(x) in COMBINED


def _sums_put(im: Importer, x: str, ids: Sequence[str], places: Sequence[int], rows: str) -> Any:
    """Return what rows are added to by numbers of neighbouring axes, which count as one axis."""
    first, last, shape = places[0], places[-1], im.shape(x)
    if not _combines(im, x, ids) or [*places] != [*range(first, last + 1)]:
        return None
    extents = [int(extent) for extent in shape[first : last + 1]]
    common = shapes.broadcast_shapes([im.shape(value) for value in ids])
    count = product(common)
    rows = im.expand(rows, (*shape[:first], *common, *shape[last + 1 :]))
    rows = im.reshape(rows, (*shape[:first], count, *shape[last + 1 :]))
    whole = im.reshape(x, (*shape[:first], product(extents), *shape[last + 1 :]))
    wide = [im.reshape(im.expand(value, common), (count,)) for value in ids]
    if len(wide) > 1:
        wide = [joined_numbers(im, [im.cast(value, "int64") for value in wide], extents)]
    found = im.g.add("put", whole, wide[0], rows, axis=first, from_end=len(ids) == 1, combine="add")
    return im.reshape(found, shape)


def _rows_added(im: Importer, out: str, x: str, axis: int, ids: str, rows: str, *, alpha: float = 1) -> Any:
    if not _combines(im, x, [ids]) or len(im.shape(ids)) != 1:
        return None
    scaled = rows if alpha == 1 else im.arithmetic("mul", [rows, alpha], out)
    return im.g.add("put", x, ids, scaled, axis=axis % len(im.shape(x)), combine="add")


def _elements_combined(
    im: Importer, out: str, x: str, axis: int, ids: str, rows: str, kind: str = "sum", *,
    include_self: bool = True,
) -> Any:  # fmt: skip
    """Combine an element of each row with the one of its number; numbers alike for whole rows move these.

    Without what is there (``include_self``), elements of numbers that come are combined from the start.
    """
    shape, axis = im.shape(x), axis % max(1, len(im.shape(x)))
    mean = kind == "mean" and out in ("float32", "float64")
    if not (kind in REDUCED or mean) or not _by_element(im, x, axis, ids) or not _combines(im, x, [ids]):
        return None
    for at, extent in enumerate(im.shape(ids)):
        rows = rows if im.shape(rows)[at] == extent else im.take_axis(rows, at, 0, extent)
    combine = "add" if mean else REDUCED[kind]
    base = x if include_self else im.expand(im.number(_neutral(combine, out), out), shape)
    found = _element_put(im, base, axis, ids, rows, combine)
    if mean:
        ones = im.expand(im.number(1, out), im.shape(ids))
        start = im.expand(im.number(int(include_self), out), shape)
        count = _element_put(im, start, axis, ids, ones, "add")
        found = im.g.add("div", found, im.g.add("maximum", count, im.number(1, out)))
    return found if include_self else im.g.add("select", _comes(im, shape, axis, ids), found, x)


def _element_put(im: Importer, base: str, axis: int, ids: str, rows: str, combine: str) -> str:
    """Return a base whose elements are combined with those of their numbers along an axis."""
    vector = _numbers_of_rows(im, ids, axis)
    if vector is None:
        return im.g.add("put", base, ids, rows, axis=axis, along=True, combine=combine)
    return im.g.add("put", base, vector, rows, axis=axis, combine=combine)


def _neutral(combine: str, ttype: str) -> float:
    """Return what gives anything that it is combined with."""
    if combine == "add":
        return 0
    least, most = (-math.inf, math.inf) if "float" in ttype else (np.iinfo(ttype).min, np.iinfo(ttype).max)
    return least if combine == "max" else most


def _by_element(im: Importer, x: str, axis: int, ids: str) -> bool:
    """Tell whether each row along an axis has numbers of its own."""
    shape, own = im.shape(x), im.shape(ids)
    alike = (*own[:axis], *own[axis + 1 :]) == (*shape[:axis], *shape[axis + 1 :])
    return bool(shape) and len(own) == len(shape) and alike


def _comes(im: Importer, shape: Sequence[Any], axis: int, ids: str) -> str:
    """Return whether elements have a number: they are marked in 32 bits, in whatever order."""
    none, one = (im.number(value, "int32") for value in (0, 1))
    if vector := _numbers_of_rows(im, ids, axis):
        marks, ones = (im.expand(n, s) for n, s in ((none, (shape[axis],)), (one, im.shape(vector))))
        marks = im.g.add("put", marks, vector, ones, axis=0, combine="max")
        marks = im.reshape(marks, [extent if at == axis else 1 for at, extent in enumerate(shape)])
    else:
        marks, ones = im.expand(none, shape), im.expand(one, im.shape(ids))
        marks = im.g.add("put", marks, ids, ones, axis=axis, along=True, combine="max")
    return im.g.add("equal", marks, one)


def _number_put(im: Importer, out: str, x: str, axis: int, ids: str, value: Any) -> Any:
    """Write a number by number: on GPUs elements that have one are marked, and chosen by what reads them."""
    shape, axis = im.shape(x), axis % max(1, len(im.shape(x)))
    known = all(isinstance(e, int) and e for e in (*shape, *im.shape(ids)))
    if im.on_cpu or not known or im.ttype(ids) not in NUMBERS or not _by_element(im, x, axis, ids):
        return None
    return im.g.add("select", _comes(im, shape, axis, ids), im.number(value, out), x)


def _numbers_of_rows(im: Importer, ids: str, axis: int) -> str | None:
    """Return the vector of which numbers are copies along all other axes; None if they are none."""
    shape = im.shape(ids)
    if len(shape) == 1:
        return ids
    node = im.g.node(ids)
    if node.operator != "broadcast":
        return None
    (before,) = node.inputs
    own = (*((1,) * (len(shape) - len(im.shape(before)))), *im.shape(before))
    alone = all(extent == 1 for at, extent in enumerate(own) if at != axis)
    return im.reshape(before, (shape[axis],)) if alone and own[axis] == shape[axis] else None


SCATTERS: dict[str, Row] = {
    "index_put.default": rows_put,
    "index_copy.default": rows_copied,
    "index_add.default": _rows_added,
    "scatter.value": _number_put,
    "scatter_add.default": _elements_combined,
    "scatter_reduce.two": _elements_combined,
}
"""Name and overload -> row."""
