"""The error bound of the equivalence test, from the forms of two programs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ladder.ir.modular import LEAST_P, LEAST_Q, SAFE_PRIMES
from ladder.superopt.verifier.forms import Bounding, Exponents, Forms

ATTEMPTS = 16
"""Draws per round and per expected draw until one is defined: all fail with probability e**-16."""

RARE = 4
"""Draws per round without residues to wait for: a denominator is 0 about once in 2**30 / degree draws."""


@dataclass(frozen=True)
class Bound:
    """Sizes that bound the error of one draw, see the package's docstring.

    Parameters
    ----------
    degree
        d: of coefficients and of numerators and denominators of exponents.
    terms
        K: distinct exponents of ``N_A D_B - N_B D_A``.
    bits
        log2 of the sum of magnitudes of the integer coefficients.
    exponent_bits
        The same of a difference of two exponents' numerator.
    radicands
        m: distinct values under roots.
    exponentials
        Whether there are any.
    unknown_roots
        How many roots were taken as unknown functions of what stands under them.
    radicand_degree, radicand_bits
        Of the difference of any two radicands, as a polynomial.
    """

    degree: int
    terms: int
    bits: float
    exponent_bits: float
    radicands: int = 0
    exponentials: bool = False
    unknown_roots: int = 0
    radicand_degree: int = 0
    radicand_bits: float = 0.0

    def zippel(self, p: int = LEAST_P, q: int = LEAST_Q) -> float:
        """Return steps 2 and 3: ``(K (K - 1) d + K d) / q + 2 d / p`` with 2**m d for d."""
        d, k = self.degree * 2.0**self.radicands, self.terms
        in_q = (k * (k - 1) * d + k * d) / q if self.exponentials else 0.0
        return in_q + 2 * d / p

    @property
    def reduction(self) -> float:
        """Step 4: primes that divide all coefficients."""
        conjugates = 2.0**self.radicands
        primes = conjugates * self.bits / math.log2(LEAST_P)
        if self.exponentials:
            primes += (self.terms - 1) * conjugates * self.exponent_bits / math.log2(LEAST_Q)
        return primes / SAFE_PRIMES

    @property
    def epsilon(self) -> float:
        """Probability that one draw is defined and agrees although the programs differ."""
        return self.zippel() + self.reduction + self.merged

    @property
    def merged(self) -> float:
        """Step 6: two different radicands have one value, so that their roots are taken as equal."""
        one = self.radicand_degree / LEAST_P + self.radicand_bits / (math.log2(LEAST_P) * SAFE_PRIMES)
        return math.comb(self.unknown_roots, 2) * one

    @property
    def attempts(self) -> int:
        """A: draws allowed per round; a radicand is a residue in half of them (a quarter, if also in Z_q)."""
        if not self.radicands:
            return RARE
        return ATTEMPTS << (self.radicands * (2 if self.exponentials else 1))

    def rounds(self, delta: float) -> int | None:
        """R: rounds for a total error of at most ``delta``; None if a round proves nothing."""
        per_round = self.attempts * self.epsilon
        return None if per_round >= 0.5 else max(1, math.ceil(math.log(delta) / math.log(per_round)))

    def delta(self, rounds: int) -> float:
        """Return the total error after ``rounds``."""
        return float((self.attempts * self.epsilon) ** rounds)

    def confusion(self, roots: int, draws: int, attempts: int) -> float:
        """Return the probability that two different radicands agree in ``draws`` of ``attempts`` draws.

        ``N_a D_b - N_b D_a`` of any two of the ``roots`` has degree <= 4 d and 2**(4 b) as coefficients.
        """
        one = 4 * self.degree / LEAST_P + 4 * self.bits / (math.log2(LEAST_P) * SAFE_PRIMES)
        return float(math.comb(roots, 2) * math.comb(attempts, draws) * min(1.0, one) ** draws)

    def with_radicands(self, radicands: int) -> Bound:
        """Return the bound for m distinct radicands."""
        return replace(self, radicands=radicands)

    def with_unknown_roots(self, boundings: Sequence[Bounding]) -> Bound:
        """Return the bound for programs whose roots were taken as unknown."""
        roots = sum(bounding.roots for bounding in boundings)
        return replace(self.with_differences(boundings), unknown_roots=roots)

    def with_differences(self, boundings: Sequence[Bounding]) -> Bound:
        """Return the bound with the sizes of ``N_a D_b - N_b D_a`` of any two radicands N / D."""
        parts = [bounding.radicand for bounding in boundings if bounding.roots]
        degree = sum(max((part.degrees[side] for part in parts), default=0) for side in (0, 1))
        bits = sum(max((part.bits[side] for part in parts), default=0.0) for side in (0, 1))
        return replace(self, radicand_degree=degree, radicand_bits=bits + 1 if parts else 0.0)


def bound_of(first: Sequence[Forms], second: Sequence[Forms], exponentials: bool) -> Bound:
    """Return the bound for two programs' outputs, the largest over all elements.

    Parameters
    ----------
    first, second
        Output values of both programs computed with `Bounding`, in order.
    exponentials
        Whether a program has any.
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
        max(1, int(min(np.max(both.exponents, initial=0), 2.0**62))),
        float(np.max(both.bits, initial=0)),
        float(np.max(exponents.u_bits + exponents.v_bits + 1, initial=0)),
        exponentials=exponentials,
    )
