"""The tile graph: the one IR between front ends and TIR, its operator table and its tools.

Depends on ``tile_types`` and numpy only (TVM inside scalar lowerings); everything above may
import it. Start with `expr` (tensor expressions), `ops` (the table) and `graph` (the data).
"""

from __future__ import annotations

from ladder.ir.build import GraphBuilder, bind
from ladder.ir.expr import Compute, Tensor, apply, compute, max_, sum_, tensor
from ladder.ir.finite import Field, Residues, UndefinedResidueError
from ladder.ir.gemm import Gemm
from ladder.ir.gemm_graph import as_gemm, gemm_graph, gemm_reference
from ladder.ir.graph import Axis, Graph, Node
from ladder.ir.interpret import abstract_expressions, finite_domain, interpret, lax_classes
from ladder.ir.lower_expr import evaluate, to_graph
from ladder.ir.operator import Attribute, Operator
from ladder.ir.ops import OPERATORS, get_operator, unary_operators
from ladder.ir.parser import parse
from ladder.ir.passes import Pass, rewriting, run_passes
from ladder.ir.printer import print_graph
from ladder.ir.rewrite import Match, Pattern, Rule, pattern, rewrite
from ladder.ir.verify import verify

__all__ = [
    "OPERATORS",
    "Attribute",
    "Axis",
    "Compute",
    "Field",
    "Gemm",
    "Graph",
    "GraphBuilder",
    "Match",
    "Node",
    "Operator",
    "Pass",
    "Pattern",
    "Residues",
    "Rule",
    "Tensor",
    "UndefinedResidueError",
    "abstract_expressions",
    "apply",
    "as_gemm",
    "bind",
    "compute",
    "evaluate",
    "finite_domain",
    "gemm_graph",
    "gemm_reference",
    "get_operator",
    "interpret",
    "lax_classes",
    "max_",
    "parse",
    "pattern",
    "print_graph",
    "rewrite",
    "rewriting",
    "run_passes",
    "sum_",
    "tensor",
    "to_graph",
    "unary_operators",
    "verify",
]
