"""Rows of ATen's operators that read elements by number, and windows along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ladder.frontend.importer import Importer, Row
from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Node
from ladder.ir.shapes import broadcast_shapes

NUMBERS = ("int64", "int32")
"""Types of numbers; what is of truth values, or of bytes, is a mask."""


def _embedded(im: Importer, out: str, table: str, ids: str, *_: Any) -> Any:
    """Return rows of a table; one alone is a view of it."""
    if product(im.shape(ids)) == 1 or not _gathers(im, table, ids):
        return im.g.add("take", table, ids)
    return im.g.add("gather", table, ids, axis=0)


def _indexed(im: Importer, out: str, x: str, indices: Sequence[Any]) -> Any:
    """Of truth values a library call. Negative numbers count from the end."""
    places = [axis for axis, numbers in enumerate(indices) if numbers is not None]
    if len(places) != 1:
        spread = _spread_out(im, x, indices) if 1 < len(places) == len(indices) else None
        return spread or _of_places(im, x, [indices[axis] for axis in places], places)
    (axis,) = places
    if _gathers(im, x, indices[axis]):
        return im.g.add("gather", x, indices[axis], axis=axis, from_end=True)
    if axis or len(im.shape(x)) != 2 or not _counts_up(im, indices[0]):
        return None
    return im.g.add("take", x, indices[0])


def _of_places(im: Importer, x: str, ids: Sequence[str], places: Sequence[int]) -> str | None:
    """Return elements by numbers along several axes, which count as one; the first, if they lie apart."""
    shape = im.shape(x)
    known = all(isinstance(extent, int) for value in (x, *ids) for extent in im.shape(value))
    if not known or not all(_gathers(im, x, value) for value in ids):
        return None
    first = places[0] if [*places] == [*range(places[0], places[-1] + 1)] else 0
    others = [axis for axis in range(len(shape)) if axis not in places]
    front, behind = others[:first], others[first:]
    extents = [int(shape[axis]) for axis in places]
    joined = [*(shape[axis] for axis in front), product(extents), *(shape[axis] for axis in behind)]
    x = im.reshape(im.permute(x, [*front, *places, *behind]), joined)
    common = broadcast_shapes([im.shape(value) for value in ids])
    wide = [im.expand(im.cast(value, "int64"), common) for value in ids]
    return im.g.add("gather", x, joined_numbers(im, wide, extents), axis=first)


def joined_numbers(im: Importer, ids: Sequence[str], extents: Sequence[int]) -> str:
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


def _spread_out(im: Importer, x: str, indices: Sequence[str]) -> Any:
    """Return a tensor with its axes apart: ``x[arange(n)[:, None], arange(m)]`` reads all in order."""
    extents, rank = im.shape(x), max(len(im.shape(ids)) for ids in indices)
    result: list[Any] = [1] * rank
    before = -1
    for extent, ids in zip(extents, indices, strict=False):
        shape = im.shape(ids)
        at = [rank - len(shape) + axis for axis, own in enumerate(shape) if own != 1]
        whole = _counts_all(im, ids, extent) and all(own in (1, extent) for own in shape)
        if not whole or len(at) > 1 or (at and at[0] <= before):
            return None
        for before in at:
            result[before] = extent
    return im.g.add("reshape", x, shape=(*result, *extents[len(indices) :]))


def _counts_all(im: Importer, ids: str, extent: Any) -> bool:
    """Tell whether numbers are those of an ``arange`` from 0 to an extent, in any shape."""
    node = _reshaped(im, ids)
    if node.operator == "add":  # of an offset that is none
        value = im.g.node(node.inputs[1])
        none = value.operator == "constant" and node_attributes(value)["value"] == 0
        return none and _counts_all(im, node.inputs[0], extent)
    if node.operator != "iota" or im.ttype(ids) not in NUMBERS:
        return False
    given = node_attributes(node)
    return (given["begin"], given["step"], given["extent"]) == (0, 1, extent)


def _reshaped(im: Importer, ids: str) -> Node:
    """Return what computes numbers, in whatever shape."""
    node = im.g.node(ids)
    while node.operator in ("reshape", "expand", "cast"):
        node = im.g.node(node.inputs[0])
    return node


def _gathers(im: Importer, x: str, ids: str) -> bool:
    """Tell whether kernels of chains may gather: those for GPUs, where there is something to gather."""
    return not im.on_cpu and im.ttype(ids) in NUMBERS and 0 not in (*im.shape(x), *im.shape(ids))


def _counts_up(im: Importer, ids: str) -> bool:
    """Tell whether numbers are those of an ``arange``, the first not negative, in any shape."""
    node = _reshaped(im, ids)
    if node.operator != "iota" or im.ttype(ids) not in NUMBERS:
        return False
    begin, step = (node_attributes(node)[name] for name in ("begin", "step"))
    return step > 0 and (begin.isidentifier() if isinstance(begin, str) else begin >= 0)


def _selected(im: Importer, out: str, x: str, axis: int, ids: str) -> Any:
    """Return slices by number, of which there is a vector; a number alone stays a call."""
    if len(im.shape(ids)) != 1 or not im.shape(x) or not _gathers(im, x, ids):
        return None
    return im.g.add("gather", x, ids, axis=axis % len(im.shape(x)))


def _gathered(im: Importer, out: str, x: str, axis: int, ids: str, **_: Any) -> Any:
    """Return an element of each row by number; rows that have none are left out."""
    if not im.shape(x) or len(im.shape(ids)) != len(im.shape(x)) or not _gathers(im, x, ids):
        return None
    axis %= len(im.shape(x))
    for other, extent in enumerate(im.shape(ids)):
        if other != axis and extent != im.shape(x)[other]:
            x = im.take_axis(x, other, 0, extent)
    return im.g.add("gather", x, ids, axis=axis, along=True)


def _diagonal(im: Importer, out: str, x: str, offset: int = 0, first: int = 0, second: int = 1) -> Any:
    """Return a diagonal of two axes as the last one."""
    shape = im.shape(x)
    first, second = (axis % len(shape) for axis in (first, second))
    rows, columns = shape[first], shape[second]
    if not isinstance(rows, int) or not isinstance(columns, int):
        return None
    below, right = max(0, -offset), max(0, offset)
    count = min(rows - below, columns - right)
    if count <= 0:
        return None
    starts = {first: below, second: right}
    names = [f"a{at}" for at in range(len(shape)) if at not in starts]
    places = [f"d+{starts[at]}" if at in starts else f"a{at}" for at in range(len(shape))]
    spec = f"{' '.join(places)} -> {' '.join([*names, 'd'])}"
    return im.g.add("map", x, spec=spec, sizes=(("d", count),), pad=False)


def _unfolded(im: Importer, out: str, x: str, axis: int, size: int, step: int) -> Any:
    """Return windows along one axis; their elements are the last axis."""
    shape = im.shape(x)
    axis %= max(1, len(shape))
    length = shape[axis] if shape else 0
    if not all(isinstance(extent, int) and extent > 0 for extent in (length, size)):
        return None
    count = (int(length) - size) // step + 1
    names = [f"a{at}" for at in range(len(shape))]
    places = [f"{step}*{name}+r" if at == axis else name for at, name in enumerate(names)]
    spec = f"{' '.join(places)} -> {' '.join(names)} r"
    return im.g.add("map", x, spec=spec, sizes=((names[axis], count), ("r", size)), pad=False)


def _crossed(im: Importer, out: str, a: str, b: str, *, dim: int = -1) -> Any:
    """Return the cross product of vectors of three numbers along an axis."""
    if out not in ("float32", "float16", "bfloat16", "float64"):
        return None
    rank = len(im.shape(a))
    a, b = (im.expand(x, im.stated) for x in (a, b))
    axis, parts = dim % rank, []
    for at in range(3):
        first, second = (at + 1) % 3, (at + 2) % 3
        one, other, third, fourth = (
            im.take_axis(x, axis, place, 1) for x, place in ((a, first), (b, second), (a, second), (b, first))
        )
        products = [im.arithmetic("mul", pair, out) for pair in ((one, other), (third, fourth))]
        parts.append(im.arithmetic("sub", products, out))
    return im.g.add("concat", *parts, axis=axis)


GATHERS: dict[str, Row] = {
    "embedding.default": _embedded,
    "index.Tensor": _indexed,
    "index_select.default": _selected,
    "gather.default": _gathered,
    "unfold.default": _unfolded,
    "diagonal.default": _diagonal,
    "linalg_cross.default": _crossed,
}
"""Name and overload -> row."""
