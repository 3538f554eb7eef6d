"""Keeps or drops prefixes of a search, with cached answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ladder.ir.operator import AbstractExpression
from ladder.superopt.expressions.normal import Normal, UndecidedError, as_expression, normal
from ladder.superopt.expressions.oracle import shared_oracle
from ladder.superopt.expressions.subexpression import is_subexpression


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
