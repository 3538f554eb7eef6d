"""The same question put to z3: the axioms, and that the part is not a subexpression, contradict each other.

z3 answers where the normal form is too large; what it does not know in time decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import Any

from ladder.ir.operator import AbstractExpression
from ladder.superopt.expressions.normal import Normal, UndecidedError, as_expression, factors, normal
from ladder.superopt.expressions.subexpression import is_subexpression

TIMEOUT_MS = 2000


class Oracle:
    """Axioms of abstract expressions over an uninterpreted sort.

    timeout_ms: Per question.
    """

    def __init__(self, timeout_ms: int = TIMEOUT_MS) -> None:
        import z3

        self.z3 = z3
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
            self._functions[key] = self.z3.Function(name, *([self.sort] * (arity + 1)))
        return self._functions[key]

    def _axioms(self) -> list[Any]:
        z3, sub = self.z3, self.sub
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
            return self.z3.Const(f"var {value}", self.sort)
        head, *rest = value
        if head == "const":
            return self.z3.Const(f"const {rest[0]}", self.sort)
        if head == "sum":
            sizes = [self.z3.Const(f"size {factor}", self.sort) for factor in factors(rest[0])]
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
        names = [self.z3.Const(f"a{number}", self.sort) for number in range(function.arity())]
        for name in names:
            self.solver.add(self.z3.ForAll(names, self.sub(name, function(*names))))

    def decide(self, part: AbstractExpression, whole: AbstractExpression) -> bool | None:
        """Return whether ``part`` occurs in something equal to ``whole``; None if z3 does not know in time.

        True is a proof from the axioms, False a model of them in which it does not.
        """
        question = self.sub(self.term(part), self.term(whole))
        self.solver.push()
        self.solver.add(self.z3.Not(question))
        answer = self.solver.check()
        self.solver.pop()
        return True if answer == self.z3.unsat else False if answer == self.z3.sat else None


@lru_cache(maxsize=1)
def shared_oracle() -> Oracle:
    """Return this process' oracle."""
    return Oracle()


class Pruner:
    """Decides whether values can occur in a program.

    targets: Abstract expressions of the program's outputs.
    enabled: False keeps everything (ablation).
    """

    def __init__(self, targets: Sequence[AbstractExpression | Normal], enabled: bool = True) -> None:
        self.targets = tuple(normal(target) for target in targets)
        self.enabled = enabled
        self._answers: dict[Normal, bool] = {}

    def normal(self, value: Any) -> Normal | None:
        """Return the normal form, or None if it is too large or not wanted: nothing is known then."""
        if not self.enabled:
            return None
        try:
            return normal(value)
        except UndecidedError:
            return None

    def keeps(self, value: Normal | None) -> bool:
        """Return False only if the value is proved to occur in no program equal to a target."""
        if not self.enabled or value is None:
            return True
        answer = self._answers.get(value)
        if answer is None:
            answer = self._answers[value] = self._ask(value)
        return answer

    def _ask(self, value: Normal) -> bool:
        try:
            return any(is_subexpression(value, target) for target in self.targets)
        except UndecidedError:
            return self._ask_z3(value)

    def _ask_z3(self, value: Normal) -> bool:
        part = as_expression(value)
        answers = (shared_oracle().decide(part, as_expression(target)) for target in self.targets)
        return any(answer is not False for answer in answers)
