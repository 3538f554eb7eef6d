"""Operators from tensor expressions."""

from __future__ import annotations

from dataclasses import replace

from ladder.api.matmul import Matmul
from ladder.api.problem import operands_of, require_fits
from ladder.ir import to_graph
from ladder.ir.expr import Compute
from ladder.ir.graph import Graph
from ladder.rewrite import as_gemm
from ladder.runtime.compile import Request
from schedules.schedule import Plan
from targets import TileDevice, get_device
from tile_types import get_type
from tile_types.errors import require_kind
from tile_types.multiples import held_multiple


def compile_expression(
    program: Compute | Graph, target: str | TileDevice | None = None, plan: Plan | None = None
) -> Matmul:
    """Return the operator that a tensor expression or a tile graph describes.

    Parameters
    ----------
    program
        A product of activations ``[M, K]`` and a quantized weight ``[N, K]``, with bias and
        element-wise epilogue; see `ladder.compute`.
    target
        Device; by default the one that the activations are on.
    plan
        Schedules to use instead of the policy's.

    Raises
    ------
    ShapeError
        If it is not one matrix product of that form.
    ConversionError
        If the activation type cannot hold the weights unchanged; names one that can.

    Examples
    --------
    >>> A = ladder.tensor("A", ("M", 4096), "float16")
    >>> B = ladder.tensor("B", (4096, 4096), "nf4", group_size=64)
    >>> product = lambda m, n, k: A[m, k] * B[n, k]
    >>> C = ladder.compute(("M", 4096), product, reduce={"k": 4096}, output="float16")
    >>> op = ladder.compile_expression(C)
    """
    require_kind(
        program, (Compute, Graph), "compile_expression takes the result of ladder.compute, or a graph"
    )
    gemm = as_gemm(program if isinstance(program, Graph) else to_graph(program))
    if isinstance(program, Compute):  # a graph says what is converted to what
        held = held_multiple(get_type(gemm.weight), operands_of(gemm.activation), gemm.zero)
        gemm = replace(gemm, weight=held.name)
    require_fits(get_type(gemm.weight), gemm.activation, gemm.zero)
    return Matmul.from_request(Request(gemm, "" if target is None else get_device(target).name, plan))
