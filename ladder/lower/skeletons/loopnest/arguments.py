"""Arguments of a CPU kernel: the tensors of its tile program, in calling order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.ir.program import Operand, TileProgram
from ladder.lower import builder as b
from ladder.lower.cpu.vectors import BYTES
from schedules.cpu_layout import LANES

Expr = Any

TIR_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Element types that TIR spells otherwise."""

NAMES = {"w": "words", "scale": "scales", "zero": "zeros"}
"""Arguments that kernels call by what packing makes of them."""


@dataclass(frozen=True)
class OperandTensors:
    """Tensors and extents of one kernel.

    m, n, k: Rows of x, columns of the output, row pitch of x.
    blocks, units, groups: Extents of the packed weight.
    tensors: By the names of the program's arguments.
    """

    m: Expr
    n: Expr
    k: Expr
    blocks: Expr
    units: Expr
    groups: Expr
    tensors: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]


def declare_arguments(program: TileProgram) -> OperandTensors:
    """Declare the arguments in calling order; every extent is symbolic."""
    m, n, k = b.symbol("M"), b.symbol("N"), b.symbol("K")
    blocks, units, n_pad, groups = (
        b.symbol("blocks"),
        b.symbol("units"),
        b.symbol("n_pad"),
        b.symbol("groups"),
    )
    bits = program.operand("w").tile.ttype.elem_bits
    shapes: dict[str, tuple[Expr, ...]] = {
        "x": (m, k),
        "w": (blocks, units, LANES * bits),
        "scale": (groups, n_pad),
        "zero": (groups, n_pad),
        "row_scale": (n_pad,),
        "token_scale": (m,),
        "bias": (n,),
        "y": (m, n),
    }
    tensors = {operand.name: _tensor(operand, shapes[operand.name]) for operand in program.arguments}
    if not {"scale", "zero"} & tensors.keys():
        groups = 1
    return OperandTensors(m, n, k, blocks, units, groups, tensors)


def _tensor(operand: Operand, shape: tuple[Expr, ...]) -> Any:
    """Declare a tensor that may start at any element: callers pass slices."""
    dtype = "uint32" if operand.name == "w" else TIR_NAMES.get(operand.ttype, operand.ttype)
    return b.tensor(NAMES.get(operand.name, operand.name), shape, dtype, align=BYTES.get(dtype, 1))
