"""Means of the cells of regions on CPUs: weighted sums of rows, then of columns, of vectors of channels."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b
from ladder.lower.cpu import vectors as v


def emit_regions(name: str) -> Any:
    """Emit ``(x, images, row_shares, row_ends, column_shares, column_ends, out)``.

    x: float32 ``[N, rows, columns, channels]``; images: int32 ``[regions]``, which of these a region is of.
    row_shares, column_shares: float32 ``[regions, cells, rows or columns]``, what cells take.
    row_ends, column_ends: int32 ``[regions, cells + 1, 2]``, the first element of each cell and the one
        behind its last; behind the cells those of the region.
    out: float32 ``[regions, cells, cells, channels]``.
    """
    with b.function(name) as result:
        batch, rows, columns, channels = (b.symbol(s) for s in ("batch", "rows", "columns", "channels"))
        regions, high, wide = (b.symbol(s) for s in ("regions", "high", "wide"))
        high_ends, wide_ends = b.symbol("high_ends"), b.symbol("wide_ends")
        x = b.tensor("x", [batch, rows, columns, channels], "float32", align=4)
        images = b.tensor("images", [regions], "int32", align=4)
        row_shares = b.tensor("row_shares", [regions, high, rows], "float32", align=4)
        row_ends = b.tensor("row_ends", [regions, high_ends, 2], "int32", align=4)
        column_shares = b.tensor("column_shares", [regions, wide, columns], "float32", align=4)
        column_ends = b.tensor("column_ends", [regions, wide_ends, 2], "int32", align=4)
        out = b.tensor("out", [regions, high, wide, channels], "float32", align=4)
        with v.parallel(regions) as each:
            line = v.heap(columns * channels, "float32")
            with b.loop(high) as i:
                first, last = column_ends[each, wide, 0], column_ends[each, wide, 1]
                with b.loop(last * channels, first * channels) as at:
                    b.store(line, T.float32(0), at)
                with (
                    b.loop(row_ends[each, i, 1], row_ends[each, i, 0]) as row,
                    b.loop(last, first) as column,
                    b.loop(channels) as c,
                ):
                    share = row_shares[each, i, row]
                    whole = line[column * channels + c] + share * x[images[each], row, column, c]
                    b.store(line, whole, column * channels + c)
                with b.loop(wide) as j:
                    with b.loop(channels) as c:
                        b.store(out, T.float32(0), each, i, j, c)
                    with (
                        b.loop(column_ends[each, j, 1], column_ends[each, j, 0]) as column,
                        b.loop(channels) as c,
                    ):
                        share = column_shares[each, j, column]
                        whole = out[each, i, j, c] + share * line[column * channels + c]
                        b.store(out, whole, each, i, j, c)
    return result.func
