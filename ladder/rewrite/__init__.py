"""Rewriting of tile graphs: canonical forms and pattern matches, as tables of rules.

All front ends (torch graphs, ONNX models, tensor expressions) come through here, so what a rule recognises
is recognised for each of them. `rules` is the engine, `simplify` says which tables are applied to a model and
in what order. May import ``schedules``, ``targets``, ``ladder.ir`` and what lies below.
"""

from __future__ import annotations

from ladder.rewrite.gemm_match import as_gemm
from ladder.rewrite.passes import Pass, rewriting, run_passes
from ladder.rewrite.rules import Rule, pattern, rewrite
from ladder.rewrite.simplify import simplify

__all__ = ["Pass", "Rule", "as_gemm", "pattern", "rewrite", "rewriting", "run_passes", "simplify"]
