"""The error bound of the equivalence test, from the forms of two programs, in exact arithmetic.

Step 3 of the argument too: proof that values under square roots are independent modulo squares.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import numpy.typing as npt

from ladder.ir.finite import RootLog
from ladder.ir.modular import LARGE_PRIMES, LEAST_LARGE, LEAST_P, LEAST_Q, SAFE_PRIMES
from ladder.superopt.verifier.forms import Bounding, Exponents, Forms, Radicand

ATTEMPTS = 16
"""Draws per round and per expected draw until one is defined: all fail with probability e**-16."""

RARE = 4
"""Draws per round without residues to wait for: a denominator is 0 about once in 2**30 / degree draws."""

P_BITS, Q_BITS, LARGE_BITS = (least.bit_length() - 1 for least in (LEAST_P, LEAST_Q, LEAST_LARGE))
"""A number of b bits has at most b / P_BITS divisors among the primes p, b / Q_BITS among the primes q."""


def vanishing(degree: int, bits: int) -> Fraction:
    """Return the probability that a polynomial other than 0 is 0 at a random point of a random field."""
    return Fraction(degree, LEAST_P) + Fraction(bits, P_BITS * SAFE_PRIMES)


def vanishing_in_large(degree: int, bits: int) -> Fraction:
    """Return the same for a random field of 61 bits."""
    return Fraction(degree, LEAST_LARGE) + Fraction(bits, LARGE_BITS * LARGE_PRIMES)


def repetitions(once: Fraction, delta: Fraction) -> int | None:
    """Return how often what errs with probability ``once`` must agree for ``delta``; None if never."""
    if 2 * once >= 1:
        return None
    count, total = 1, once
    while total > delta:
        count, total = count + 1, total * once
    return count


def rounded_up(probability: Fraction) -> float:
    """Return a float that is no less: for people and JSON."""
    nearest = float(probability)
    return nearest if Fraction(nearest) >= probability else math.nextafter(nearest, math.inf)


@dataclass(frozen=True)
class Bound:
    """Sizes that bound the error of one draw, see the package's `README.md`.

    degree: d: of coefficients and of numerators and denominators of exponents.
    terms: K: distinct exponents of ``N_A D_B - N_B D_A``.
    bits: log2 of the sum of magnitudes of the integer coefficients.
    exponent_bits: The same of a difference of two exponents' numerator.
    radicands: m: distinct values under roots.
    exponentials: Whether there are any that are interpreted.
    functions: How many values were taken as unknown functions of their operands.
    radicand_degree, radicand_bits: Of the difference of any two operands of functions, as a polynomial.
    """

    degree: int
    terms: int
    bits: int
    exponent_bits: int
    radicands: int = 0
    exponentials: bool = False
    functions: int = 0
    radicand_degree: int = 0
    radicand_bits: int = 0

    def zippel(self, p: int = LEAST_P, q: int = LEAST_Q) -> Fraction:
        """Return steps 2 and 3: ``(K (K - 1) d + K d) / q + 2 d / p`` with 2**m d for d."""
        d, k = self.degree << self.radicands, self.terms
        in_q = Fraction(k * (k - 1) * d + k * d, q) if self.exponentials else Fraction(0)
        return in_q + Fraction(2 * d, p)

    @property
    def reduction(self) -> Fraction:
        """Step 4: primes that divide all coefficients."""
        primes = Fraction(self.bits << self.radicands, P_BITS)
        if self.exponentials:
            primes += Fraction((self.terms - 1) * (self.exponent_bits << self.radicands), Q_BITS)
        return primes / SAFE_PRIMES

    @property
    def epsilon(self) -> Fraction:
        """Probability that one draw is defined and agrees although the programs differ."""
        return self.zippel() + self.reduction + self.merged

    @property
    def merged(self) -> Fraction:
        """Step 6: two different operands have one value, so that their functions are taken as equal."""
        return math.comb(self.functions, 2) * vanishing(self.radicand_degree, self.radicand_bits)

    @property
    def attempts(self) -> int:
        """A: draws allowed per round; a radicand is a residue in half of them (a quarter, if also in Z_q)."""
        if not self.radicands:
            return RARE
        return ATTEMPTS << (self.radicands * (2 if self.exponentials else 1))

    def rounds(self, delta: Fraction) -> int | None:
        """R: rounds for a total error of at most ``delta``; None if a round proves nothing."""
        return repetitions(self.attempts * self.epsilon, delta)

    def delta(self, rounds: int) -> Fraction:
        """Return the total error after ``rounds``."""
        return Fraction(self.attempts * self.epsilon) ** rounds

    def confusion(self, roots: int, draws: int, attempts: int) -> Fraction:
        """Return the probability that two different radicands agree in ``draws`` of ``attempts`` draws.

        ``N_a D_b - N_b D_a`` of any two of the ``roots`` has degree <= 4 d and 2**(4 b) as coefficients.
        """
        one = min(Fraction(1), vanishing(4 * self.degree, 4 * self.bits))
        return math.comb(roots, 2) * math.comb(attempts, draws) * one**draws

    def with_radicands(self, radicands: int) -> Bound:
        """Return the bound for m distinct radicands."""
        return replace(self, radicands=radicands)

    def with_functions(self, boundings: Sequence[Bounding]) -> Bound:
        """Return the bound for programs with unknown functions."""
        functions = sum(bounding.functions for bounding in boundings)
        return replace(self.with_differences(boundings), functions=functions)

    def with_relations(self, roots: int) -> Bound:
        """Return the bound for roots that are products of up to two others, or their reciprocals.

        Such a product has at most four times the degree of one; what is compared is ``a b = c d`` of
        radicands a, b, d and a number c, or what has fewer of them.
        """
        return replace(
            self, degree=4 * self.degree, bits=4 * self.bits, functions=max(self.functions, roots),
            radicand_degree=3 * self.radicand_degree, radicand_bits=4 * self.radicand_bits,
        )  # fmt: skip

    def with_differences(self, boundings: Sequence[Bounding]) -> Bound:
        """Return the bound with the sizes of ``N_a D_b - N_b D_a`` of any two operands N / D."""
        parts = [bounding.radicand for bounding in boundings if bounding.roots or bounding.functions]
        degree, bits = difference(parts)
        return replace(self, radicand_degree=degree, radicand_bits=bits)


def difference(parts: Sequence[Radicand]) -> tuple[int, int]:
    """Return degree and bits of the difference of any two of the values with these sizes."""
    degree = sum(max((part.degrees[side] for part in parts), default=0) for side in (0, 1))
    bits = sum(max((part.bits[side] for part in parts), default=0.0) for side in (0, 1))
    return degree, math.ceil(bits) + 1 if parts else 0


def bound_of(first: Sequence[Forms], second: Sequence[Forms], exponentials: bool) -> Bound:
    """Return the bound for two programs' outputs, the largest over all elements.

    first, second: Output values of both programs computed with `Bounding`, in order.
    exponentials: Whether a program has any.
    """
    bounds = [_of_pair(a, b, exponentials) for a, b in zip(first, second, strict=True)]
    return Bound(
        max(bound.degree for bound in bounds),
        max(bound.terms for bound in bounds),
        max(bound.bits for bound in bounds),
        max(bound.exponent_bits for bound in bounds),
        exponentials=exponentials,
    )


def _of_pair(a: Forms, b: Forms, exponentials: bool) -> Bound:
    left, right = a.numerator * b.denominator, b.numerator * a.denominator
    both = left + right
    exponents = Exponents.of(a).joined(Exponents.of(b), np.ones((), bool))
    degree = np.maximum(np.maximum(both.degree, exponents.u_degree), exponents.v_degree)
    return Bound(
        int(np.max(degree, initial=0)),
        max(1, int(np.max(both.exponents, initial=0))),
        math.ceil(np.max(both.bits, initial=0)),
        math.ceil(np.max(exponents.u_bits + exponents.v_bits + 1, initial=0)),
        exponentials=exponentials,
    )


LIMIT = 6
"""Most distinct radicands: each halves the draws that are defined."""


@dataclass
class Radicands:
    """Collects draws: which roots have equal radicands, and the residue characters of the distinct ones.

    Examples
    --------
    Two roots of different values: each draw gives one vector over GF(2).
    """

    values: list[npt.NDArray[np.int64]] = field(default_factory=list)
    residues: list[npt.NDArray[np.bool_]] = field(default_factory=list)

    def note(self, log: RootLog) -> None:
        """Add a draw's log; draws with a zero radicand, which has no character, are left out."""
        values = np.concatenate(log.radicands)
        if np.all(values != 0):
            self.values.append(values)
            self.residues.append(np.concatenate(log.residues))

    def distinct(self) -> npt.NDArray[np.int64]:
        """Return one position per radicand: roots are of the same if they agree in every draw."""
        _, first = np.unique(np.stack(self.values), axis=1, return_index=True)
        return np.asarray(np.sort(first), np.int64)

    @property
    def draws(self) -> int:
        return len(self.values)

    def independent(self) -> bool:
        """Whether the characters seen refute that any product of radicands is a square."""
        if not self.values:
            return False
        positions = self.distinct()
        vectors = [[not bool(residue[position]) for position in positions] for residue in self.residues]
        return rank(vectors) == len(positions)


def rank(vectors: list[list[bool]]) -> int:
    """Return the rank over GF(2)."""
    basis: list[int] = []
    for vector in vectors:
        number = sum(bit << position for position, bit in enumerate(vector))
        for element in basis:
            number = min(number, number ^ element)
        if number:
            basis.append(number)
    return len(basis)
