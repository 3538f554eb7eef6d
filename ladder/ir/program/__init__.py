"""Tile programs: what one kernel computes, with every tile's type, shape, level and layout explicit.

`product` builds the block graph of a product, which is a tile program without loops; transforms
(`schedules.transforms`) rewrite it; `text` prints and parses it, `verify` checks it and `count` counts its
bytes and operations. Emitters read nothing else. Tests execute it in numpy (`tests/numeric`).
May import ``tile_types`` and the operator table.
"""

from __future__ import annotations

from ladder.ir.program.count import Counts, count
from ladder.ir.program.model import (
    AddGroup,
    Copy,
    Fill,
    Layout,
    Loop,
    Multiply,
    Operand,
    Statement,
    Store,
    Sum,
    TileProgram,
)
from ladder.ir.program.product import block_graph, operand_type, summed_columns
from ladder.ir.program.text import parse_program
from ladder.ir.program.verify import verify_program

__all__ = [
    "AddGroup",
    "Copy",
    "Counts",
    "Fill",
    "Layout",
    "Loop",
    "Multiply",
    "Operand",
    "Statement",
    "Store",
    "Sum",
    "TileProgram",
    "block_graph",
    "count",
    "operand_type",
    "parse_program",
    "summed_columns",
    "verify_program",
]
