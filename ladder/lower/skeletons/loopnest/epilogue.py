"""From float32 sums to the output: the operators of the program's store, rounding, guards at the edges."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.ir.ops import get_operator
from ladder.ir.program import Store, TileProgram
from ladder.lower import builder as b
from ladder.lower.skeletons.loopnest.arguments import OperandTensors
from schedules.cpu_layout import LANES, ROWS

Expr = Any


def store_rows(
    program: TileProgram, store: Store, args: OperandTensors, totals: Any, local: Expr, row: Expr, tile: Expr
) -> None:
    """Emit the output of one row of a tile.

    program, store, args: The program, its statement, its tensors.
    totals: float32 sums, ``[row blocks][rows][16]``.
    local, row: The row's position in ``totals`` and in the output.
    tile: Which columns, in tiles.
    """
    source = program.operand(store.source)
    pitch, count = source.fixed("m"), source.fixed("n") // ROWS
    for index in range(count):
        start = b.bind((tile * count + index) * ROWS)
        base = (index * pitch + local) * LANES

        def one(lane: Expr, start: Expr = start, base: Expr = base) -> None:
            column = start + lane
            value = finish(program, store, args, totals[base + lane], row, column)
            b.store(args[store.target], value, row, column)

        def whole() -> None:
            with b.vector(LANES) as lane:
                one(lane)

        def partial(start: Expr = start) -> None:
            with b.loop(args.n - start) as lane:
                one(lane)

        b.either(start + ROWS <= args.n, whole, partial)


def finish(
    program: TileProgram, store: Store, args: OperandTensors, value: Expr, row: Expr, column: Expr
) -> Expr:
    """Return one element of the output."""
    for name, operand in store.operators:
        if not operand:
            lower = get_operator(name).lower
            assert lower is not None  # every unary operator has one
            value = lower(value)
            continue
        factor = args[operand][row if program.operand(operand).axes == ("m",) else column]
        value = value * factor if name == "mul" else value + T.Cast("float32", factor)
    output = program.operand(store.target).ttype
    return value if output == "float32" else T.Cast(output, value)
