"""The normal form of abstract expressions.

Under the axioms, ``sum(k, ·)`` commutes with mul and div, adds like a number and composes by
multiplication: it *is* multiplication with a symbol [k], where ``[i]·[j] = [i·j]`` and ``[1] = 1``. So every
expression is a sum of fractions ``N / D``: N a polynomial with positive integer coefficients in atoms
(inputs, sizes, constants, functions of normal forms), D a polynomial as well, one fraction per D. Without
cancellation, D stays. Each step of `normal` is an axiom read from left to right, and the result does not
depend on the order of steps, so expressions are equal under the axioms iff their normal forms are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from ladder.ir.operator import AbstractExpression
from tile_types.errors import LadderError

Atom = tuple[Any, ...]
"""``("var", name)``, ``("size", name)``, ``("const", value)`` or ``(function, Normal, ...)``."""

Monomial = tuple[tuple[Atom, int], ...]
"""Atoms with powers, sorted."""

Polynomial = tuple[tuple[Monomial, int], ...]
"""Monomials with coefficients, sorted."""

UNIT: Polynomial = (((), 1),)
LIMIT = 256
"""Most monomials of a polynomial."""


class UndecidedError(LadderError):
    """The normal form does not decide: it exceeds `LIMIT`, or a divisor is a fraction itself."""


@dataclass(frozen=True)
class Normal:
    """A sum of fractions: pairs (denominator, numerator), sorted by denominator."""

    fractions: tuple[tuple[Polynomial, Polynomial], ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.fractions)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def terms(self) -> Mapping[Polynomial, Mapping[Monomial, int]]:
        """Denominator -> monomial -> coefficient."""
        return {denominator: dict(numerator) for denominator, numerator in self.fractions}


_key = lru_cache(maxsize=200_000)(repr)
"""Texts of atoms, monomials with coefficients, and fractions, by which they are in order."""


def monomial(powers: Mapping[Atom, int]) -> Monomial:
    """Return a monomial from powers, those of 0 left out."""
    return tuple(sorted(((a, n) for a, n in powers.items() if n), key=lambda pair: _key(pair[0])))


def polynomial(terms: Mapping[Monomial, int]) -> Polynomial:
    """Return a polynomial from coefficients."""
    if len(terms) > LIMIT:
        raise UndecidedError(f"a polynomial of {len(terms)} monomials")
    return tuple(sorted(((m, c) for m, c in terms.items() if c), key=_key))


def expression(terms: Mapping[Polynomial, Mapping[Monomial, int]]) -> Normal:
    """Return the normal form with these numerators by denominator."""
    fractions = [(denominator, polynomial(numerator)) for denominator, numerator in terms.items()]
    return Normal(tuple(sorted(fractions, key=_key)))


def variable(name: str) -> Normal:
    """Return an input."""
    return of_atom(("var", name))


def of_atom(atom: Atom) -> Normal:
    """Return an atom as an expression."""
    return Normal(((UNIT, ((((atom, 1),), 1),)),))


def of_polynomial(value: Polynomial) -> Normal:
    """Return a polynomial as an expression."""
    return Normal(((UNIT, value),))


ONE = of_polynomial(UNIT)


@lru_cache(maxsize=100_000)
def times(a: Monomial, b: Monomial) -> Monomial:
    """Multiply monomials."""
    powers = dict(a)
    for atom, power in b:
        powers[atom] = powers.get(atom, 0) + power
    return monomial(powers)


@lru_cache(maxsize=100_000)
def product(a: Polynomial, b: Polynomial) -> Polynomial:
    """Multiply polynomials."""
    if a == UNIT:
        return b
    if b == UNIT:
        return a
    terms: dict[Monomial, int] = {}
    for left, factor in a:
        for right, other in b:
            both = times(left, right)
            terms[both] = terms.get(both, 0) + factor * other
    return polynomial(terms)


def add(a: Normal, b: Normal) -> Normal:
    """``a/z + b/z = (a+b)/z``."""
    terms = {denominator: dict(numerator) for denominator, numerator in a.terms.items()}
    for denominator, numerator in b.terms.items():
        into = terms.setdefault(denominator, {})
        for term, factor in numerator.items():
            into[term] = into.get(term, 0) + factor
    return expression(terms)


def multiply(a: Normal, b: Normal) -> Normal:
    """Distribute, and ``a·(b/z) = (a·b)/z``."""
    result: dict[Polynomial, dict[Monomial, int]] = {}
    for left, numerator in a.fractions:
        for right, other in b.fractions:
            into = result.setdefault(denominator_product(left, right), {})
            for term, factor in product(numerator, other):
                into[term] = into.get(term, 0) + factor
    return expression(result)


def divide(a: Normal, b: Normal) -> Normal:
    """``(a/b)/c = a/(b·c)``."""
    result: dict[Polynomial, dict[Monomial, int]] = {}
    for denominator, numerator in a.fractions:
        into = result.setdefault(denominator_product(denominator, as_denominator(b)), {})
        for term, factor in numerator:
            into[term] = into.get(term, 0) + factor
    return expression(result)


def as_denominator(value: Normal) -> Polynomial:
    """Return a divisor: a polynomial, or one atom that stands for an expression with fractions."""
    plain = len(value.fractions) == 1 and value.fractions[0][0] == UNIT
    return value.fractions[0][1] if plain else of_atom(("fraction", value)).fractions[0][1]


def of_denominator(value: Polynomial) -> Normal:
    """Return what a divisor stands for."""
    atom = value[0][0][0][0] if is_wrapped(value) else None
    return atom[1] if atom is not None else of_polynomial(value)


def is_wrapped(value: Polynomial) -> bool:
    """Whether a divisor is an expression with fractions."""
    return len(value) == 1 and len(value[0][0]) == 1 and value[0][0][0][0][0] == "fraction"


@lru_cache(maxsize=100_000)
def denominator_product(a: Polynomial, b: Polynomial) -> Polynomial:
    """Multiply divisors; ``b·(c/d)`` is ``(b·c)/d`` in a divisor as well."""
    if UNIT in (a, b) or not (is_wrapped(a) or is_wrapped(b)):
        return product(a, b)
    return as_denominator(multiply(of_denominator(a), of_denominator(b)))


def exponential(a: Normal) -> Normal:
    """``exp(a+b) = exp(a)·exp(b)``: one atom per term."""
    powers: dict[Atom, int] = {}
    for denominator, numerator in a.fractions:
        for term, factor in numerator:
            powers[("exp", Normal(((denominator, ((term, 1),)),)))] = factor
    return of_polynomial(((monomial(powers), 1),))


def size(extent: int | str) -> Normal:
    """Return [k]: a product of primes, or of the names in a symbolic extent."""
    powers: dict[Atom, int] = {}
    for factor in factors(extent):
        atom = ("size", factor)
        powers[atom] = powers.get(atom, 0) + 1
    return of_polynomial(((monomial(powers), 1),))


def factors(extent: int | str) -> Iterable[str]:
    """Return the primes and names whose product an extent is; a polynomial is a name."""
    if isinstance(extent, str):
        if not re.fullmatch(r"\w+(\*\w+)*", extent):
            return [extent]
        return [
            part for name in extent.split("*") for part in (_primes(int(name)) if name.isdigit() else [name])
        ]
    return _primes(extent)


def _primes(number: int) -> list[str]:
    found, factor = [], 2
    while number > 1:
        while number % factor == 0:
            found.append(str(factor))
            number //= factor
        factor += 1
    return found


def _sum(extent: int | str, argument: Normal) -> Normal:
    return multiply(size(extent), argument)


def _constant(value: float) -> Normal:
    return ONE if value == 1 else of_atom(("const", value))


ARITHMETIC = {"add": add, "mul": multiply, "div": divide}


def normal(value: AbstractExpression | Normal) -> Normal:
    """Return the normal form of an abstract expression; arguments may be normal forms already.

    Raises UndecidedError if a polynomial exceeds `LIMIT` monomials.
    """
    if isinstance(value, Normal):
        return value
    if isinstance(value, str):
        return variable(value)
    head, *rest = value
    if head == "const":
        return _constant(rest[0])
    if head == "sum":
        return _sum(rest[0], normal(rest[1]))
    arguments = [normal(argument) if _is_expression(argument) else argument for argument in rest]
    if head in ARITHMETIC:
        return ARITHMETIC[head](*arguments)
    return exponential(*arguments) if head == "exp" else of_atom((head, *arguments))


def _is_expression(value: Any) -> bool:
    return isinstance(value, Normal | tuple | str)
