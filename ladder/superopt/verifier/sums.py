"""Sums over symbolic extents in the numerator and denominator of a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Sums:
    """How a value is made of sums over one symbol.

    low, high: Fewest and most sums that a term of its numerator multiplies.
    under_low, under_high: The same of its denominator.
    divided: Whether the denominator varies with the symbol: sums over it then have no common one.
    """

    low: int = 0
    high: int = 0
    under_low: int = 0
    under_high: int = 0
    divided: bool = False

    def plus(self, other: Sums) -> Sums:
        """Return those of a sum, over the product of both denominators."""
        return Sums(
            min(self.low + other.under_low, other.low + self.under_low),
            max(self.high + other.under_high, other.high + self.under_high),
            self.under_low + other.under_low,
            self.under_high + other.under_high,
            self.divided or other.divided,
        )

    def times(self, other: Sums) -> Sums:
        """Return those of a product."""
        return Sums(
            self.low + other.low,
            self.high + other.high,
            self.under_low + other.under_low,
            self.under_high + other.under_high,
            self.divided or other.divided,
        )

    def inverted(self, varies: bool) -> Sums:
        """Return those of 1 / value; ``varies``: whether the value varies with the symbol."""
        return Sums(self.under_low, self.under_high, self.low, self.high, self.divided or varies)

    def either(self, other: Sums) -> Sums:
        """Return those of a concatenation."""
        return Sums(
            min(self.low, other.low),
            max(self.high, other.high),
            min(self.under_low, other.under_low),
            max(self.under_high, other.under_high),
            self.divided or other.divided,
        )

    def summed(self) -> Sums:
        """Return those of the sum over the symbol."""
        return replace(self, low=self.low + 1, high=self.high + 1)


PLAIN = Sums()


Operands = Sequence[tuple[Sums, bool]]
"""Sums of each operand over one symbol, and whether it varies with the symbol."""


def sum_of_add(operands: Operands) -> Sums:
    """Return the sums of ``a + b``."""
    return operands[0][0].plus(operands[1][0])


def sum_of_mul(operands: Operands) -> Sums:
    """Return the sums of ``a * b``."""
    return operands[0][0].times(operands[1][0])


def sum_of_div(operands: Operands) -> Sums:
    """Return the sums of ``a / b``."""
    (a, _), (b, varies) = operands
    return a.times(b.inverted(varies))
