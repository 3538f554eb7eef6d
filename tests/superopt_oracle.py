"""Whether an expression can occur in another, by z3: the axioms contradict that it cannot."""

from __future__ import annotations

from functools import reduce
from typing import Any

import z3

from ladder.ir.operator import AbstractExpression
from ladder.superopt.expressions.normal import factors

TIMEOUT_MS = 2000


class Oracle:
    """Axioms of abstract expressions over an uninterpreted sort.

    timeout_ms: Per question.
    """

    def __init__(self, timeout_ms: int = TIMEOUT_MS) -> None:
        self.context = z3.Context()
        self.sort = z3.DeclareSort("Expression", self.context)
        self.solver = z3.Solver(ctx=self.context)
        self.solver.set("timeout", timeout_ms)
        self._functions: dict[tuple[str, int], Any] = {}
        self._contexts: set[tuple[str, int]] = set()
        self.sub = z3.Function("sub", self.sort, self.sort, z3.BoolSort(self.context))
        self.solver.add(self._axioms())

    def function(self, name: str, arity: int) -> Any:
        """Return an uninterpreted function of expressions."""
        key = (name, arity)
        if key not in self._functions:
            self._functions[key] = z3.Function(name, *([self.sort] * (arity + 1)))
        return self._functions[key]

    def _axioms(self) -> list[Any]:
        sub = self.sub
        x, y, z = (z3.Const(name, self.sort) for name in "xyz")
        add, mul, div = (self.function(name, 2) for name in ("add", "mul", "div"))
        equalities = [
            (add(x, y), add(y, x)), (mul(x, y), mul(y, x)),
            (add(add(x, y), z), add(x, add(y, z))), (mul(mul(x, y), z), mul(x, mul(y, z))),
            (mul(x, add(y, z)), add(mul(x, y), mul(x, z))),
            (add(div(x, z), div(y, z)), div(add(x, y), z)),
            (mul(x, div(y, z)), div(mul(x, y), z)), (div(div(x, y), z), div(x, mul(y, z))),
        ]  # fmt: skip
        contexts = [sub(x, add(x, y)), sub(x, mul(x, y)), sub(x, div(x, y)), sub(y, div(x, y)), sub(x, x)]
        transitive = z3.Implies(z3.And(sub(x, y), sub(y, z)), sub(x, z))
        exp = self.function("exp", 1)
        equalities.append((exp(add(x, y)), mul(exp(x), exp(y))))
        equalities.append((mul(self.term(("const", 1.0)), x), x))
        return [
            *(z3.ForAll([x, y, z], left == right) for left, right in equalities),
            *(z3.ForAll([x, y], context) for context in contexts),
            z3.ForAll([x, y, z], transitive),
        ]

    def term(self, value: AbstractExpression) -> Any:
        """Return an expression as a term: sum(k, x) is a product with the constant [k]."""
        if isinstance(value, str):
            return z3.Const(f"var {value}", self.sort)
        head, *rest = value
        if head == "const":
            return z3.Const(f"const {rest[0]}", self.sort)
        if head == "sum":
            sizes = [z3.Const(f"size {factor}", self.sort) for factor in factors(rest[0])]
            return reduce(lambda inner, size: self.function("mul", 2)(size, inner), sizes, self.term(rest[1]))
        arguments = [self.term(argument) for argument in rest]
        function = self.function(head, len(arguments))
        self._add_context(head, function)
        return function(*arguments)

    def _add_context(self, head: str, function: Any) -> None:
        """Arguments of a function are subexpressions; add, mul and div have it among the axioms."""
        key = (head, function.arity())
        if head in ("add", "mul", "div") or key in self._contexts:
            return
        self._contexts.add(key)
        names = [z3.Const(f"a{number}", self.sort) for number in range(function.arity())]
        for name in names:
            self.solver.add(z3.ForAll(names, self.sub(name, function(*names))))

    def decide(self, part: AbstractExpression, whole: AbstractExpression) -> bool | None:
        """Return whether ``part`` occurs in something equal to ``whole``; None if z3 does not know in time.

        True is a proof from the axioms, False a model of them in which it does not.
        """
        question = self.sub(self.term(part), self.term(whole))
        self.solver.push()
        self.solver.add(z3.Not(question))
        answer = self.solver.check()
        self.solver.pop()
        return True if answer == z3.unsat else False if answer == z3.sat else None
