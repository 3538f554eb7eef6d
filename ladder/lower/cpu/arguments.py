"""Arguments of every CPU GEMM kernel: which tensors, in which order, with which extents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.cpu.layout import LANES, CpuLayout

Expr = Any

TIR_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Element types that TIR spells otherwise."""

BYTES = {"float32": 4, "int32": 4, "uint32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Arguments:
    """Tensors and extents of one kernel; absent tensors are None.

    Parameters
    ----------
    m, n, k
        Rows of A, columns of the output, row pitch of A.
    blocks, units, groups
        Extents of the packed weight.
    x, words, scales, zeros, row_scale, token_scale, bias, y
        See `ladder.lower.cpu.pack` and `ladder.ir.gemm.Gemm`.
    """

    m: Expr
    n: Expr
    k: Expr
    blocks: Expr
    units: Expr
    groups: Expr
    x: Any
    words: Any
    scales: Any
    zeros: Any
    row_scale: Any
    token_scale: Any
    bias: Any
    y: Any


def _tensor(name: str, shape: tuple[Expr, ...], dtype: str) -> Any:
    """Declare a tensor that may start at any element: callers pass slices."""
    return b.tensor(name, shape, dtype, align=BYTES.get(dtype, 1))


def declare_arguments(gemm: Gemm, layout: CpuLayout) -> Arguments:
    """Declare the arguments in calling order; every extent is symbolic."""
    m, n, k = b.symbol("M"), b.symbol("N"), b.symbol("K")
    blocks, units, n_pad, groups = (
        b.symbol("blocks"),
        b.symbol("units"),
        b.symbol("n_pad"),
        b.symbol("groups"),
    )
    integer_zero = layout.lane == 8 and gemm.zero == "integer"
    zero_dtype = "int32" if integer_zero else "float32"
    x = _tensor("x", (m, k), TIR_NAMES.get(gemm.activation, gemm.activation))
    words = _tensor("words", (blocks, units, LANES * layout.bits), "uint32")
    scales = _tensor("scales", (groups, n_pad), "float32") if gemm.scale else None
    zeros = _tensor("zeros", (groups, n_pad), zero_dtype) if gemm.zero != "none" else None
    row_scale = _tensor("row_scale", (n_pad,), "float32")
    token_scale = _tensor("token_scale", (m,), "float32") if gemm.token_scale else None
    bias = _tensor("bias", (n,), gemm.output) if gemm.bias else None
    y = _tensor("y", (m, n), gemm.output)
    if scales is None and zeros is None:
        groups = 1
    return Arguments(m, n, k, blocks, units, groups, x, words, scales, zeros, row_scale, token_scale, bias, y)
