"""Certificates of equality, and the modes in which the test treats functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from ladder.ir.graph import Graph
from ladder.ir.interpret import lax_classes
from ladder.superopt.verifier.bound import Bound, rounded_up

DELTA = 2.0**-64

NO_PRODUCTS = "no root is a product of others"


@dataclass(frozen=True)
class Mode:
    """Parts of the programs that are interpreted: all else are unknown functions of equal operands.

    name: For reasons.
    uninterpreted: Which of ``exp``, ``sqrt`` and ``reduce_max`` are such functions.
    related: Whether it is found out which roots are products of others.
    """

    name: str
    uninterpreted: frozenset[str]
    related: bool = False


FREE = Mode("functions", frozenset({"exp", "sqrt", "reduce_max"}))


EXPONENTIALS = Mode("roots", frozenset({"sqrt"}))


ROOTS = Mode("functions", frozenset())


RELATED = (Mode("roots", frozenset({"sqrt"}), related=True), Mode("functions", frozenset(), related=True))


def modes_of(*graphs: Graph) -> tuple[Mode, ...]:
    """Return how programs are tried, cheapest first; the last one interprets most."""
    exponentials, roots = (has_classes((lax,), *graphs) for lax in ("exp", "root"))
    more = [FREE, *([EXPONENTIALS] if exponentials else []), *([ROOTS, *RELATED] if roots else [])]
    return tuple(more)


@dataclass(frozen=True)
class Certificate:
    """Result of `verify_equal`.

    verdict: ``"equal"``: the second program is defined, and equal, wherever all values of the first are
        finite. ``"different"``: the evaluations differ, which is a proof unless a square stands under a root,
        as in ``sqrt((x * x + 1) ** 2)``. Programs with unknown functions are ``different`` if float64 says
        so, too: they are equal only if they are whatever the functions are. ``"refused"``: nothing is
        decided. ``"replayed"``: equal in the draws of a seed that the caller gave, which proves nothing.
    reason: Why, if not equal.
    delta: Bound on the probability of the verdict ``equal`` for this pair if it were unequal, added up over
        all tests that were made; 0 for ``different`` and ``refused``, 1 for a replay.
    bound: Degree, terms and coefficient sizes that delta follows from.
    rounds, draws: Rounds passed, and draws they took.
    seed: Of all draws, to repeat them.
    """

    verdict: str
    reason: str = ""
    delta: Fraction = Fraction(0)
    bound: Bound | None = None
    rounds: int = 0
    draws: int = 0
    seed: int = 0

    @property
    def equal(self) -> bool:
        """Whether the programs were proved equal, up to ``delta``."""
        return self.verdict == "equal"

    @property
    def error(self) -> float:
        """``delta`` as a float that is no less."""
        return rounded_up(self.delta)

    def as_json(self) -> dict[str, Any]:
        sizes = {} if self.bound is None else {
            "degree": self.bound.degree, "terms": self.bound.terms, "bits": self.bound.bits,
            "radicands": self.bound.radicands, "epsilon": rounded_up(self.bound.epsilon),
        }  # fmt: skip
        return {
            "verdict": self.verdict, "reason": self.reason, "delta": self.error, **sizes,
            "rounds": self.rounds, "draws": self.draws, "seed": str(self.seed),
        }  # fmt: skip

    def seeded(self, seed: int, *, own: bool) -> Certificate:
        """Return it with its seed; of a caller's seed, equality is a replay."""
        if own or not self.equal:
            return replace(self, seed=seed)
        reason = "a replay of a given seed proves nothing: programs may be made to fit it"
        return replace(self, verdict="replayed", reason=reason, delta=Fraction(1), seed=seed)


def most_telling(failed: Sequence[Certificate]) -> Certificate:
    """Return a proof that programs differ, or else the last reason why nothing is decided."""
    different = [found for found in failed if found.verdict == "different"]
    reasons = [found for found in failed if found.reason != NO_PRODUCTS]
    return different[0] if different else (reasons or failed)[-1]


def has_classes(classes: Sequence[str], *graphs: Graph) -> bool:
    """Return whether graphs have operators of some classes of LAX."""
    return any(not lax_classes(graph).isdisjoint(classes) for graph in graphs)
