"""Rows of ATen's operators that write, or combine with what is there, rows and elements by number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ladder.frontend.aten_gathers import NUMBERS
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
        wide = [_joined_numbers(im, [im.cast(value, "int64") for value in wide], extents)]
    found = im.g.add("put", whole, wide[0], rows, axis=first, from_end=len(ids) == 1, combine="add")
    return im.reshape(found, shape)


def _joined_numbers(im: Importer, ids: Sequence[str], extents: Sequence[int]) -> str:
    """Return the numbers of elements of axes that count as one; -1 where one of the numbers is of none."""
    total, within = im.number(0, "int64"), None
    for value, extent in zip(ids, extents, strict=True):
        size, zero = im.number(extent, "int64"), im.number(0, "int64")
        place = im.g.add("select", im.g.add("less", value, zero), im.g.add("add", value, size), value)
        not_below = im.g.add("less_equal", zero, place)
        fits = im.g.add("minimum", *(im.cast(c, "int32") for c in (not_below, im.g.add("less", place, size))))
        within = fits if within is None else im.g.add("minimum", within, fits)
        total = im.g.add("add", im.g.add("mul", total, size), place)
    assert within is not None  # there are numbers
    none = im.g.add("equal", within, im.number(0, "int32"))
    return im.g.add("select", none, im.number(-1, "int64"), total)


def _rows_added(im: Importer, out: str, x: str, axis: int, ids: str, rows: str, *, alpha: float = 1) -> Any:
    if not _combines(im, x, [ids]) or len(im.shape(ids)) != 1:
        return None
    scaled = rows if alpha == 1 else im.arithmetic("mul", [rows, alpha], out)
    return im.g.add("put", x, ids, scaled, axis=axis % len(im.shape(x)), combine="add")


def _elements_combined(
    im: Importer, out: str, x: str, axis: int, ids: str, rows: str, kind: str = "sum", *,
    include_self: bool = True,
) -> Any:  # fmt: skip
    """Combine an element of each row with the one of its number; numbers alike for whole rows move these."""
    if kind not in REDUCED or not include_self or not _combines(im, x, [ids]):
        return None
    shape, axis = im.shape(x), axis % len(im.shape(x))
    if len(im.shape(ids)) != len(shape):
        return None
    for at, extent in enumerate(im.shape(ids)):
        rows = rows if im.shape(rows)[at] == extent else im.take_axis(rows, at, 0, extent)
        if at != axis and extent != shape[at]:
            return None
    vector = _numbers_of_rows(im, ids, axis)
    if vector is None:
        return im.g.add("put", x, ids, rows, axis=axis, along=True, combine=REDUCED[kind])
    return im.g.add("put", x, vector, rows, axis=axis, combine=REDUCED[kind])


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
    "scatter_add.default": _elements_combined,
    "scatter_reduce.two": _elements_combined,
}
"""Name and overload -> row."""
