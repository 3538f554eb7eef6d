"""Gathers and scatters by computed indices on CPUs, along one axis or several leading ones.

Negative indices count from the end. One outside of the axis is reported, and reads or writes an element
inside of it.
"""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script import tirx as T
from tvm.tirx.script.builder import ir as I

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v

BYTES = {"float32": 4, "int32": 4, "int64": 8, "uint8": 1, "int8": 1}
"""Type of elements -> their bytes."""


def emit_gather(kind: str, number: str, name: str) -> Any:
    """Emit ``(x, ids, out, outside)``: ``out[o, m, i] = x[o, ids[o, m, i], i]``.

    x: ``[outer, N, inner]`` of type ``kind``.
    ids, out: ``[outer, M, inner]``, of type ``number`` and ``kind``.
    outside: int32 ``[1]``: 1 if a number lies outside of the axis, else 0.
    """
    with b.function(name) as result:
        (outer, inner, extent, count), x, ids = _given(kind, number)
        out = b.tensor("out", [outer, count, inner], kind, align=BYTES[kind])
        outside = b.tensor("outside", [1], "int32", align=4)
        b.store(outside, T.int32(0), 0)
        with v.parallel(outer) as o, b.loop(count) as m, b.loop(inner) as i:
            place = _place(ids[o, m, i], extent, outside)
            b.store(out, x[o, place, i], o, m, i)
    return result.func


def emit_scatter(kind: str, number: str, name: str) -> Any:
    """Emit ``(x, ids, new, out, outside)``: ``out = x``, then ``out[o, ids[o, m, i], i] = new[o, m, i]``.

    x, out: ``[outer, N, inner]`` of type ``kind``.
    ids, new: ``[outer, M, inner]``, of type ``number`` and ``kind``; of equal numbers the last one counts.
    outside: int32 ``[1]``: 1 if a number lies outside of the axis, else 0.
    """
    with b.function(name) as result:
        (outer, inner, extent, count), x, ids = _given(kind, number)
        new = b.tensor("new", [outer, count, inner], kind, align=BYTES[kind])
        out = b.tensor("out", [outer, extent, inner], kind, align=BYTES[kind])
        outside = b.tensor("outside", [1], "int32", align=4)
        b.store(outside, T.int32(0), 0)
        with v.parallel(outer) as o:
            with b.loop(extent) as n, b.loop(inner) as i:
                b.store(out, x[o, n, i], o, n, i)
            with b.loop(count) as m, b.loop(inner) as i:
                place = _place(ids[o, m, i], extent, outside)
                b.store(out, new[o, m, i], o, place, i)
    return result.func


def emit_scatter_rows(kind: str, number: str, depth: int, name: str) -> Any:
    """Emit ``(extents..., x, ids, new, out, outside)``: ``out = x``, then ``out[*ids[m]] = new[m]``.

    extents: Of the first ``depth`` axes of x.
    x, out: ``[rows, width]`` of type ``kind``, these axes as one.
    ids: ``[M, depth]`` of type ``number``; of equal rows the last one counts.
    new: ``[M, width]``.
    outside: int32 ``[1]``: 1 if a number lies outside of its axis, else 0.
    """
    with b.function(name) as result:
        extents = [I.arg(f"extent_{at}", I.int32()) for at in range(depth)]
        rows, width, count = (b.symbol(s) for s in ("rows", "width", "M"))
        x = b.tensor("x", [rows, width], kind, align=BYTES[kind])
        ids = b.tensor("ids", [count, depth], number, align=BYTES[number])
        new = b.tensor("new", [count, width], kind, align=BYTES[kind])
        out = b.tensor("out", [rows, width], kind, align=BYTES[kind])
        outside = b.tensor("outside", [1], "int32", align=4)
        b.store(outside, T.int32(0), 0)
        with b.loop(rows) as row, b.loop(width) as i:
            b.store(out, x[row, i], row, i)
        with b.loop(count) as m:
            place: Expr = T.int32(0)
            for at, extent in enumerate(extents):
                place = place * extent + _place(ids[m, at], extent, outside)
            place = b.bind(place)
            with b.loop(width) as i:
                b.store(out, new[m, i], place, i)
    return result.func


def _given(kind: str, number: str) -> tuple[list[Expr], Any, Any]:
    """Declare the sizes, x and the numbers; see `emit_gather`."""
    sizes = outer, inner, extent, count = [b.symbol(s) for s in ("outer", "inner", "N", "M")]
    x = b.tensor("x", [outer, extent, inner], kind, align=BYTES[kind])
    return sizes, x, b.tensor("ids", [outer, count, inner], number, align=BYTES[number])


def _place(number: Expr, extent: Expr, outside: Any) -> Expr:
    """Return the place that a number names, and tell if there is none."""
    given, end = b.bind(T.Cast("int64", number)), b.bind(T.Cast("int64", extent))
    place = b.bind(given + tirx.Select(given < 0, end, T.int64(0)))
    with b.when(tirx.any(place < 0, place >= end)):
        b.store(outside, T.int32(1), 0)
    return T.Cast("int32", tirx.max(tirx.min(place, end - 1), T.int64(0)))
