"""Operands from tiles of matrices that are not packed: 64 x 64 elements in shared memory, rows of 128 bytes.

Chunks of 16 bytes of a row are swizzled by the row, as tensor copies do (PTX ISA, "Swizzle modes", 128B).
"""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.lower import Expr
from ladder.lower import builder as b
from ladder.lower.cuda.activations import LOAD_SPAN
from ladder.lower.gpu.activation_tile import CHUNK_BYTES
from schedules.footprint import SWIZZLE_ROW

LOAD_TURNED = LOAD_SPAN.replace(".shared", ".trans.shared")

STEPS = 4
"""Steps of 16 columns of K in a tile; each takes four registers of a lane."""


def load_operands(stored: str, tile: Expr, row_warp: Expr, lane: Expr, target: Any, first: int = 0) -> None:
    """Load a warp's operands of a tile: 16 of its weight rows, all 64 columns of K.

    stored: How the matrix lies (`ladder.ir.gemm.STORED`).
    tile: Its address in shared memory, a multiple of 128.
    row_warp, lane: Which 16 rows, and the lane.
    target, first: Receives the registers, and where.

    Matrices of ``ldmatrix.x4`` are the registers of a step: rows g and g + 8 of eight columns of K, then of
    the next eight. Rows of memory are those of the weight, or columns of K; the latter are turned.
    """
    half, high, eighth = lane // 8 % 2, lane // 16, lane % 8
    by_rows = stored == "rows"
    row, chunk = (row_warp * 16 + half * 8, high) if by_rows else (high * 8, row_warp * 2 + half)
    own = (row + eighth) * SWIZZLE_ROW + (chunk ^ eighth) * CHUNK_BYTES
    start = b.bind(T.cuda.cvta_generic_to_shared(tile) + T.Cast("uint32", own))
    for step in range(STEPS):
        along = T.uint32(step * 2 * CHUNK_BYTES if by_rows else step * 16 * SWIZZLE_ROW)
        registers = (target[first + 4 * step + i] for i in range(4))
        spelling = LOAD_SPAN if by_rows else LOAD_TURNED
        b.ptx(spelling, *registers, start ^ along if by_rows else start + along)
