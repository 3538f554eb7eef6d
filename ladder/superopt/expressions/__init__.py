"""Abstract expressions: which partial graphs can still become the program (Mirage, OSDI'25, §4.3).

E(·) of every operator is the column ``abstract`` of the operator table. The axioms: add and mul commute
and associate; mul distributes over add; ``a/z + b/z = (a+b)/z``, ``a·(b/z) = (a·b)/z``,
``(a/b)/c = a/(b·c)``; ``x = sum(1, x)``; ``sum(i, sum(j, x)) = sum(i·j, x)``; sum over add splits; mul and
div by y move out of sum; ``exp(a+b) = exp(a)·exp(b)``; 1 is neutral. There is no axiom of cancellation.

`normal` decides equality, `subexpression` whether one can occur in another, both by a normal form. What they
do not decide is kept.
"""

from __future__ import annotations

from ladder.superopt.expressions.normal import Normal, UndecidedError, normal, variable
from ladder.superopt.expressions.subexpression import Pruner, is_subexpression

__all__ = ["Normal", "Pruner", "UndecidedError", "is_subexpression", "normal", "variable"]
