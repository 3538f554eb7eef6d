"""Linear interpolation along one axis or two neighbouring ones, on CPUs: two elements of each, by shares."""

from __future__ import annotations

from typing import Any

from tvm import tirx

from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v


def emit_resampling(axes: int, inner: bool, name: str) -> Any:
    """Emit ``(x, [row_taps, row_shares,] taps, shares, out)``.

    axes: 2 for rows and columns, 1 for columns alone.
    inner: Whether elements are vectors.
    x, out: float32 ``[images, rows, columns, inner]``, the last of extent 1 unless elements are vectors.
    taps: int32 ``[2, new extent]``, elements that a result reads; shares: float32, what of each.
    """
    with b.function(name) as result:
        images, rows, columns = (b.symbol(s) for s in ("images", "rows", "columns"))
        width = b.symbol("inner") if inner else 1
        high, wide = b.symbol("high") if axes == 2 else rows, b.symbol("wide")
        x = b.tensor("x", [images, rows, columns, width], "float32", align=4)
        of_rows = _pair("row_", high) if axes == 2 else None
        taps, shares = _pair("", wide)
        out = b.tensor("out", [images, high, wide, width], "float32", align=4)
        with v.parallel(images * high) as each:
            image, row = b.bind(tirx.floordiv(each, high)), b.bind(tirx.floormod(each, high))
            line = v.heap(columns * width, "float32") if axes == 2 else None
            if line is not None and of_rows is not None:
                row_taps, row_shares = of_rows
                with b.loop(columns) as column, b.loop(width) as at:
                    parts = (
                        x[image, row_taps[side, row], column, at] * row_shares[side, row] for side in (0, 1)
                    )
                    b.store(line, sum(parts, start=next(parts)), column * width + at)
            with b.loop(wide) as column, b.loop(width) as at:
                places = (taps[side, column] for side in (0, 1))
                read = (
                    x[image, row, place, at] if line is None else line[place * width + at] for place in places
                )
                parts = (value * shares[side, column] for side, value in enumerate(read))
                b.store(out, sum(parts, start=next(parts)), image, row, column, at)
    return result.func


def _pair(name: str, extent: Any) -> tuple[Any, Any]:
    """Declare the taps and shares of an axis."""
    taps = b.tensor(f"{name}taps", [2, extent], "int32", align=4)
    return taps, b.tensor(f"{name}shares", [2, extent], "float32", align=4)


def emit_picking(inner: bool, bits: int, name: str) -> Any:
    """Emit ``(x, row_taps, taps, out)``: elements, or vectors, of the nearest row and column.

    x, out: unsigned integers of so many bits, otherwise as above.
    row_taps, taps: int32 ``[new extent]``.
    """
    with b.function(name) as result:
        images, rows, columns = (b.symbol(s) for s in ("images", "rows", "columns"))
        width = b.symbol("inner") if inner else 1
        high, wide, kind = b.symbol("high"), b.symbol("wide"), f"uint{bits}"
        x = b.tensor("x", [images, rows, columns, width], kind, align=bits // 8)
        row_taps = b.tensor("row_taps", [high], "int32", align=4)
        taps = b.tensor("taps", [wide], "int32", align=4)
        out = b.tensor("out", [images, high, wide, width], kind, align=bits // 8)
        with v.parallel(images * high) as each:
            image, row = b.bind(tirx.floordiv(each, high)), b.bind(tirx.floormod(each, high))
            with b.loop(wide) as column, b.loop(width) as at:
                b.store(out, x[image, row_taps[row], taps[column], at], image, row, column, at)
    return result.func
