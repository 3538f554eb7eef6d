"""The order in which the blocks of a grid visit the tiles of the output."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import builder as b

Expr = Any


def raster(block: Expr, rows: Expr, columns: Expr, width: int) -> tuple[Expr, Expr]:
    """Return which of ``rows`` (along N) and ``columns`` (along M) of tiles a block computes.

    Blocks walk bands of ``width`` rows, all columns of a band before the next one, so that neighbours share
    operands in L2.
    """
    # The operands are positive, so truncating division spares the code for signs.
    band = b.keep(columns * width)
    first = b.keep(T.truncdiv(block, band) * width)
    place = b.keep(T.truncmod(block, band))
    own = b.keep(T.min(rows - first, width))
    return first + T.truncmod(place, own), T.truncdiv(place, own)
