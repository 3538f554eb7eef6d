"""From float32 sums to the output: scales of rows and tokens, bias, unary operators, rounding."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.ir.ops import get_operator
from ladder.lower import builder as b
from ladder.lower.cpu.arguments import Arguments
from ladder.lower.cpu.layout import LANES, ROWS

Expr = Any


def store_rows(
    gemm: Gemm, args: Arguments, totals: Any, token: Expr, row: Expr, first: Expr, count: int, pitch: int
) -> None:
    """Emit the output of one token.

    Parameters
    ----------
    gemm, args
        The problem and its tensors.
    totals
        float32 sums, ``[count][pitch][16]``.
    token, row
        The token's position in ``totals`` and in the output.
    first, count
        First row block of the tile, and how many.
    pitch
        Tokens between row blocks of ``totals``.
    """
    for index in range(count):
        start = b.bind((first + index) * ROWS)
        base = (index * pitch + token) * LANES

        def one(lane: Expr, start: Expr = start, base: Expr = base) -> None:
            column = start + lane
            b.store(args.y, finish(gemm, args, totals[base + lane], row, column), row, column)

        def whole() -> None:
            with b.vector(LANES) as lane:
                one(lane)

        def partial(start: Expr = start) -> None:
            with b.loop(args.n - start) as lane:
                one(lane)

        b.either(start + ROWS <= args.n, whole, partial)


def finish(gemm: Gemm, args: Arguments, value: Expr, row: Expr, column: Expr) -> Expr:
    """Return one element of the output."""
    value = value * args.row_scale[column]
    if args.token_scale is not None:
        value = value * args.token_scale[row]
    if args.bias is not None:
        value = value + T.Cast("float32", args.bias[column])
    for name in gemm.epilogue:
        lower = get_operator(name).lower
        assert lower is not None  # every unary operator has one
        value = lower(value)
    return value if gemm.output == "float32" else T.Cast(gemm.output, value)
