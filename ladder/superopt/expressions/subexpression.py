"""Whether an expression can occur inside something equal to another.

``e`` is a subexpression of T iff a context of ``· + y``, ``· · y``, ``· / y``, ``x / ·``, ``sum(k, ·)`` and
functions turns e into an expression equal to T. The first three and sum compose to ``e · M / D + R``; by
the normal form, T then contains every term of ``e · m / D`` for one monomial m of M, with at least its
coefficient (there is nothing that cancels). Otherwise e lies inside a denominator of T or an argument of
one of its functions, and the question recurs there. Both directions are exact, so the answer "no" is a
proof that e leads nowhere under the axioms; divisors that are fractions themselves are left undecided.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from ladder.ir.operator import AbstractExpression
from ladder.superopt.expressions.normal import (
    UNIT,
    Atom,
    Monomial,
    Normal,
    Polynomial,
    UndecidedError,
    denominator_product,
    expression,
    is_wrapped,
    monomial,
    normal,
    of_polynomial,
    polynomial,
    times,
)


@lru_cache(maxsize=1_000_000)
def is_subexpression(part: Normal, whole: Normal) -> bool:
    """Return whether ``part`` can occur in something equal to ``whole`` under the axioms."""
    if _scaled_within(part, whole):
        return True
    return any(is_subexpression(part, inner) for inner in inner_expressions(whole))


@lru_cache(maxsize=100_000)
def inner_expressions(whole: Normal) -> tuple[Normal, ...]:
    """Return the denominators of an expression and what its functions are applied to."""
    found: dict[Normal, None] = {}
    for denominator, numerator in whole.fractions:
        if denominator != UNIT:
            found[of_polynomial(denominator)] = None
        for side in (denominator, numerator):
            for term, _ in side:
                found.update(dict.fromkeys(_arguments(term)))
    return tuple(found)


def _arguments(term: Monomial) -> Iterator[Normal]:
    exponents: list[tuple[Normal, int]] = []
    for atom, power in term:
        if atom[0] == "exp":
            exponents.append((atom[1], power))
            continue
        yield from (argument for argument in atom[1:] if isinstance(argument, Normal))
    if exponents:
        # exp(a)·exp(b) is exp(a + b): what occurs in any partial sum occurs in the whole.
        yield _sum_of(exponents)


def _sum_of(exponents: list[tuple[Normal, int]]) -> Normal:
    terms: dict[Polynomial, dict[Monomial, int]] = {}
    for argument, power in exponents:
        ((denominator, numerator),) = argument.fractions
        into = terms.setdefault(denominator, {})
        into[numerator[0][0]] = into.get(numerator[0][0], 0) + power
    return expression(terms)


def _scaled_within(part: Normal, whole: Normal) -> bool:
    """Whether ``whole`` contains all terms of ``part · m / D`` for some monomial m and polynomial D."""
    if not part.fractions:
        return True
    first, numerator = part.fractions[0]
    leading = numerator[0][0]
    for denominator, terms in whole.terms.items():
        rest = quotient(denominator, first)
        if rest is None:
            continue
        for term in terms:
            factor = divided(term, leading)
            if factor is not None and _contains(whole, part, factor, rest):
                return True
    return False


def _contains(whole: Normal, part: Normal, factor: Monomial, rest: Polynomial) -> bool:
    for denominator, numerator in part.fractions:
        available = whole.terms.get(denominator_product(denominator, rest))
        if available is None:
            return False
        if any(available.get(times(term, factor), 0) < count for term, count in numerator):
            return False
    return True


def divided(a: Monomial, b: Monomial) -> Monomial | None:
    """Return a / b, or None if b does not divide a."""
    powers = dict(a)
    for atom, power in b:
        if powers.get(atom, 0) < power:
            return None
        powers[atom] -= power
    return monomial(powers)


@lru_cache(maxsize=100_000)
def quotient(a: Polynomial, b: Polynomial) -> Polynomial | None:
    """Return the polynomial with ``b · quotient = a``, or None.

    By the leading monomials of a fixed order that products respect; exact over the integers, and a
    factor with a negative coefficient is no factor here.
    """
    if b == UNIT:
        return a
    if a == b:
        return UNIT
    if is_wrapped(a):
        raise UndecidedError("a divisor that is a fraction may have any factor")
    if is_wrapped(b):
        return None  # nothing cancels: a multiple of a fraction is a fraction
    atoms = sorted({atom for term, _ in (*a, *b) for atom, _ in term}, key=repr)
    rest = dict(a)
    found: dict[Monomial, int] = {}
    lead, factor = max(b, key=lambda pair: _order(pair[0], atoms))
    while rest:
        top = max(rest, key=lambda term: _order(term, atoms))
        step = divided(top, lead)
        if step is None or rest[top] % factor or rest[top] < 0:
            return None
        count = rest[top] // factor
        found[step] = found.get(step, 0) + count
        for term, other in b:
            reduced = times(term, step)
            rest[reduced] = rest.get(reduced, 0) - count * other
            if not rest[reduced]:
                del rest[reduced]
    return polynomial(found)


def _order(term: Monomial, atoms: Sequence[Atom]) -> tuple[int, ...]:
    powers = dict(term)
    return tuple(powers.get(atom, 0) for atom in atoms)


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
            return True
