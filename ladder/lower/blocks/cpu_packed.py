"""Quantized weights in block graphs on CPUs, decoded element by element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.ir.graph import Node
from ladder.lower import builder as b
from ladder.lower.blocks.analysis import gemm_of
from schedules.cpu_layout import LANES, ROWS, UNIT, cpu_layout
from tile_types import TirOps, get_type

Expr = Any


@dataclass(frozen=True)
class PackedMatrix:
    """The packed arrays of a weight ``[N, K]``, see `ladder.lower.cpu.pack`.

    words, scales, zeros, row_scale: Buffers of one axis; None where the problem has none.
    """

    gemm: Gemm
    words: Any
    scales: Any
    zeros: Any
    row_scale: Any

    @staticmethod
    def declare(node: Node, activation: str) -> PackedMatrix:
        """Declare an input's arrays, in the order in which `ladder.runtime.packed` has them."""
        gemm = gemm_of(node.tile.ttype, node.tile.known_shape, activation)
        wanted = {
            "words": "uint32",
            "scales": "float32" if gemm.scale else None,
            "zeros": None if gemm.zero == "none" else "float32",
            "row_scale": "float32",
        }
        arrays = {
            name: b.tensor(f"{node.name}_{name}", (b.symbol(name),), dtype) if dtype else None
            for name, dtype in wanted.items()
        }
        return PackedMatrix(gemm, **arrays)

    def value(self, row: Expr, column: Expr) -> Expr:
        """Return an element as float32."""
        layout = cpu_layout(self.gemm)
        group = column // layout.group if layout.group else 0
        whole = layout.group == layout.padded_group
        place = column if whole else group * layout.padded_group + column % layout.group
        at = group * layout.padded_n(self.gemm.n) + row
        number = T.Cast("float32", get_type(self.gemm.weight).evaluate(self._code(row, place), TirOps()))
        number = number if self.zeros is None else number - self.zeros[at]
        return number * (self.row_scale[row] if self.scales is None else self.scales[at])

    def _code(self, row: Expr, column: Expr) -> Expr:
        layout = cpu_layout(self.gemm)
        _, units, words = layout.shape(self.gemm.n, self.gemm.k)
        first = (row // ROWS * units + column // UNIT) * words + row % ROWS
        step, element = column % UNIT // layout.elements, column % layout.elements
        code: Expr = None
        for plane in layout.planes:
            word = self.words[first + (plane.start + step // plane.slots) * LANES]
            right = T.Cast("uint32", layout.lane * element + plane.width * (step % plane.slots))
            part = T.bitwise_and(T.shift_right(word, right), T.uint32((1 << plane.width) - 1))
            part = T.shift_left(part, T.uint32(plane.shift)) if plane.shift else part
            code = part if code is None else T.bitwise_or(code, part)
        return code
