"""The tile graph: the one IR between front ends and TIR, its operator table and its tools.

Depends on ``tile_types`` and numpy only (TVM inside scalar lowerings); everything above may
import it. Start with `expr` (tensor expressions), `ops` (the table) and `graph` (the data).
"""

from __future__ import annotations

from ladder.ir.build import GraphBuilder, bind
from ladder.ir.expr import Compute, apply, compute, max_, sum_, tensor
from ladder.ir.finite import Field
from ladder.ir.gemm import Gemm
from ladder.ir.gemm_graph import gemm_graph, gemm_reference
from ladder.ir.graph import Graph, Node
from ladder.ir.interpret import finite_domain, interpret
from ladder.ir.lower_expr import evaluate, to_graph
from ladder.ir.ops import OPERATORS
from ladder.ir.parser import parse
from ladder.ir.printer import print_graph
from ladder.ir.verify import verify

__all__ = [
    "OPERATORS",
    "Compute",
    "Field",
    "Gemm",
    "Graph",
    "GraphBuilder",
    "Node",
    "apply",
    "bind",
    "compute",
    "evaluate",
    "finite_domain",
    "gemm_graph",
    "gemm_reference",
    "interpret",
    "max_",
    "parse",
    "print_graph",
    "sum_",
    "tensor",
    "to_graph",
    "verify",
]
