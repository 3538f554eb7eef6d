"""The end of AMD kernels: runs of outputs of an activation row, finished and stored as one vector."""

from __future__ import annotations

from typing import Any

from tvm.script import tirx as T

from ladder.ir.gemm import Gemm
from ladder.lower import builder as b
from ladder.lower.gpu.arguments import Arguments
from ladder.lower.gpu.epilogue import finish, finish_float
from ladder.lower.rocm.dialect import as_type, lanes, vector
from ladder.lower.rocm.machine import join_bfloat

Expr = Any


def store_run(gemm: Gemm, args: Arguments, sums: list[Expr], m: Expr, n: Expr) -> None:
    """Finish and store neighbouring float32 sums of row m from column n on; columns beyond N are not written.

    The store is one vector where rows of the output start at multiples of its size.
    """
    count = len(sums)

    def whole() -> None:
        values = [b.bind(finish_float(gemm, value, m, n + i, args)) for i, value in enumerate(sums)]
        b.store(args.y, _as_output(gemm, values), m, lanes(n, count))

    def single() -> None:
        for i, value in enumerate(sums):
            with b.when(n + i < args.n):
                b.store(args.y, finish(gemm, value, m, n + i, args), m, n + i)

    b.either(T.And(args.n % count == 0, n + count <= args.n), whole, single)


def _as_output(gemm: Gemm, values: list[Expr]) -> Expr:
    """Return float32 values as a vector of the output type."""
    if gemm.output == "bfloat16":  # TVM would round each by many instructions
        words = [join_bfloat(*values[i : i + 2]) for i in range(0, len(values), 2)]
        return as_type(vector(words), f"bfloat16x{len(values)}")
    return vector([value if gemm.output == "float32" else T.Cast(gemm.output, value) for value in values])
