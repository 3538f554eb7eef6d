"""Proof that values under square roots are independent modulo squares: step 3 of the argument."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ladder.ir.finite import RootLog

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
