"""The equivalence test; what it proves is worked out in the package's docstring."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ladder.ir.finite import Field, Residues, RootLog, Unknowns
from ladder.ir.graph import Graph
from ladder.ir.interpret import NUMERIC, finite_domain, interpret, lax_classes
from ladder.ir.modular import UndefinedResidueError, draw_prime
from ladder.ir.quantized_values import Components
from ladder.superopt.verifier.bound import Bound, bound_of
from ladder.superopt.verifier.coverage import require_complete, signatures_differ
from ladder.superopt.verifier.forms import Bounding, Forms
from ladder.superopt.verifier.radicands import LIMIT, Radicands
from tile_types.errors import VerificationError
from tile_types.tile import Tile

DELTA = 2.0**-64
MAX_POINTS = 4096
"""Most evaluations K per draw; programs with more exponents are refused."""

QUICK_DRAWS = 64
"""Draws until one is defined, before anything is proved."""

PROOF_DRAWS = 64
"""Draws in which the radicands must prove independent."""

_OMEGA = 4
"""A square other than 1: of order q in Z_p for p = 2q + 1, q prime."""


@dataclass(frozen=True)
class Certificate:
    """Result of `verify_equal`.

    Parameters
    ----------
    verdict
        ``"equal"``; ``"different"``: the evaluations differ, which is a proof unless a square stands
        under a root, as in ``sqrt((x * x + 1) ** 2)``; or ``"refused"``. Programs with maxima are
        ``different`` if float64 says so, too: they are equal only if they are whatever the maxima are.
    reason
        Why, if not equal.
    delta
        Bound on the probability of the verdict ``equal`` for this pair if it were unequal; 0 for
        the other verdicts.
    bound
        Degree, terms and coefficient sizes that delta follows from.
    rounds, draws
        Rounds passed, and draws they took.
    seed
        Of all draws, to repeat them.
    """

    verdict: str
    reason: str = ""
    delta: float = 0.0
    bound: Bound | None = None
    rounds: int = 0
    draws: int = 0
    seed: int = 0

    @property
    def equal(self) -> bool:
        """Whether the programs were proved equal, up to ``delta``."""
        return self.verdict == "equal"

    def as_json(self) -> dict[str, Any]:
        """Return what a report shows."""
        sizes = {} if self.bound is None else {
            "degree": self.bound.degree, "terms": self.bound.terms, "bits": math.ceil(self.bound.bits),
            "radicands": self.bound.radicands, "epsilon": self.bound.epsilon,
        }  # fmt: skip
        return {
            "verdict": self.verdict, "reason": self.reason, "delta": self.delta, **sizes,
            "rounds": self.rounds, "draws": self.draws, "seed": self.seed,
        }  # fmt: skip


def verify_equal(
    first: Graph, second: Graph, *, delta: float = DELTA, seed: int | None = None
) -> Certificate:
    """Decide whether two programs with numeric extents compute the same function.

    Parameters
    ----------
    first, second
        Graphs whose inputs and outputs correspond in order. Outputs are compared in order: a
        permutation is a difference.
    delta
        Wanted bound on the probability of accepting unequal programs.
    seed
        Of the draws; by default fresh entropy, so that no program can be made to fit them.

    Returns
    -------
    Certificate
        Never raises for programs outside LAX: they are ``refused``, and ``reason`` names the operator.

    Raises
    ------
    ShapeError
        If an extent is symbolic.
    """
    seed = secrets.randbits(64) if seed is None else seed
    difference = signatures_differ(first, second)
    if difference:
        return Certificate("different", f"signatures differ: {difference}", seed=seed)
    try:
        require_complete(first)
        require_complete(second)
    except VerificationError as error:
        return Certificate("refused", str(error), seed=seed)
    if _has(("root",), first, second):
        certificate = _certificate(first, second, seed, delta, unknown_roots=True)
        if certificate.equal:
            return certificate
    return _certificate(first, second, seed, delta)


def _certificate(first: Graph, second: Graph, seed: int, delta: float, **options: bool) -> Certificate:
    try:
        return _Test(first, second, seed, **options).run(delta)
    except VerificationError as error:
        return Certificate("refused", str(error), seed=seed)


def agree_at_once(first: Graph, second: Graph, *, seed: int) -> bool:
    """Return whether two programs agree at one random point: what nearly no unequal pair does.

    Roots are unknown functions here, so that programs that are equal only by properties of roots do not,
    nor do those that are undefined wherever they are tried.

    Raises
    ------
    VerificationError
        If a program is outside LAX.
    """
    roots = _has(("root",), first, second)
    return _Test(first, second, seed, unknown_roots=roots).agrees_at_once() is True


def _has(classes: Sequence[str], *graphs: Graph) -> bool:
    return any(not lax_classes(graph).isdisjoint(classes) for graph in graphs)


def forms_of(graph: Graph, bounding: Bounding) -> tuple[Forms, ...]:
    """Return the forms of a graph's outputs."""
    operands = [_operand(node.tile, bounding.variables) for node in graph.inputs]
    return interpret(graph, operands, finite_domain(bounding))


def _operand(tile: Tile, draw: Any) -> Any:
    """Return a free variable for a tile: of a quantized one, the values of codes and the metadata."""
    shape = tile.known_shape
    if not tile.ttype.is_block:
        return draw(shape)
    blocks = (*shape[:-1], -(-shape[-1] // tile.ttype.block_size))
    metadata = {entry.name: draw(() if entry.scope == "tensor" else blocks) for entry in tile.ttype.metadata}
    return Components(draw(shape), metadata, tile.ttype.block_size)


class _Test:
    """One pair's test: draws, and what they have shown so far."""

    def __init__(self, first: Graph, second: Graph, seed: int, unknown_roots: bool = False) -> None:
        self.graphs = (first, second)
        self.generator = np.random.default_rng(seed)
        self.seed = seed
        self.draws = 0
        self.exponents = _has(("exp",), first, second)
        self.maxima = _has(("maximum",), first, second) or _rescales(first) or _rescales(second)
        self.unknown_roots = unknown_roots
        self.boundings = tuple(Bounding(unknown_roots) for _ in self.graphs)

    @cached_property
    def forms(self) -> list[tuple[Forms, ...]]:
        """Forms of both programs' outputs."""
        return [forms_of(*pair) for pair in zip(self.graphs, self.boundings, strict=True)]

    def run(self, delta: float) -> Certificate:
        """Reject early, else compute the bound and pass the rounds that it asks for."""
        if self.agrees_at_once() is False:
            return self._different()
        bound, confusion = self._bound(delta)
        if bound.terms > MAX_POINTS:
            return self._refused(
                f"the bound needs K = {bound.terms} evaluations, at most {MAX_POINTS}", bound
            )
        rounds = bound.rounds(delta / 2)
        if rounds is None:
            return self._refused("the degrees are too large for 31-bit fields; shrink the inputs", bound)
        for _ in range(rounds):
            if not self._round(bound):
                return self._different()
        total = bound.delta(rounds) + confusion
        return Certificate("equal", "", total, bound, rounds, self.draws, self.seed)

    def agrees_at_once(self) -> bool | None:
        """Evaluate at one point only: nearly every unequal pair differs there, which needs no bound.

        None if all draws were undefined.
        """
        for _ in range(QUICK_DRAWS):
            agrees = self._draw(1, exponents=self.exponents)
            if agrees is not None:
                return agrees
        return None

    def _different(self) -> Certificate:
        """Programs without unknowns are different; with unknowns, only if float64 says so."""
        if self.unknown_roots or (self.maxima and not _differ_in_float64(*self.graphs)):
            what = "roots were other functions" if self.unknown_roots else "maxima had other values"
            raise VerificationError(f"the outputs would differ if the {what}: nothing is decided")
        return Certificate("different", "outputs differ in a finite field", draws=self.draws, seed=self.seed)

    def _refused(self, reason: str, bound: Bound) -> Certificate:
        return Certificate("refused", reason, bound=bound, draws=self.draws, seed=self.seed)

    def _bound(self, delta: float) -> tuple[Bound, float]:
        """Return the bound, and the probability that it is of too few radicands, at most delta / 4."""
        first, second = self.forms
        bound = bound_of(first, second, any(each.exponentials for each in self.boundings))
        if self.unknown_roots:
            return bound.with_unknown_roots(self.boundings), 0.0
        roots = sum(each.roots for each in self.boundings)
        return self._with_radicands(bound, roots, delta / 4) if roots else (bound, 0.0)

    def _with_radicands(self, bound: Bound, roots: int, error: float) -> tuple[Bound, float]:
        """Prove that the radicands are independent; refuse if no proof is found."""
        radicands = Radicands()
        for _ in range(PROOF_DRAWS):
            log = RootLog()
            try:
                fields, operands = self._sample(exponents=True, logs=(log, RootLog()))
                for graph, field in zip(self.graphs, fields, strict=True):
                    interpret(graph, operands, finite_domain(field))
            except UndefinedResidueError:
                continue
            radicands.note(log)
            if (
                not radicands.draws
                or (confusion := bound.confusion(roots, radicands.draws, PROOF_DRAWS)) > error
            ):
                continue
            found = len(radicands.distinct())
            if found > LIMIT:
                raise VerificationError(
                    f"{found} different values stand under square roots, at most {LIMIT}: shrink the inputs"
                )
            if radicands.independent():
                return bound.with_radicands(found), confusion
        raise VerificationError(
            "what stands under the square roots may be a square, or one may be a product of others and a"
            " square: a finite field cannot tell the sign of such roots"
        )

    def _round(self, bound: Bound) -> bool:
        for _ in range(bound.attempts):
            agrees = self._draw(bound.terms, exponents=bound.exponentials)
            if agrees is not None:
                return agrees
        raise VerificationError(f"a division or root was undefined in {bound.attempts} draws in a row")

    def _draw(self, points: int, *, exponents: bool) -> bool | None:
        """Return whether all outputs agree at all points of one draw; None if a value is undefined."""
        self.draws += 1
        fields, operands = self._sample(exponents=exponents)
        try:
            for point in range(1, points + 1):
                omega = pow(_OMEGA, point, fields[0].p)
                first, second = (
                    interpret(graph, operands, finite_domain(_at(field, omega)))
                    for graph, field in zip(self.graphs, fields, strict=True)
                )
                if not _agree(first, second):
                    # The draw counts only if it is defined at all points; a difference at a defined
                    # point is a proof already.
                    return False
        except UndefinedResidueError:
            return None
        return True

    def _sample(
        self, *, exponents: bool, logs: tuple[RootLog, RootLog] | None = None
    ) -> tuple[list[Field], list[Any]]:
        """Return a field per program, with values for its own unknowns, and common operands."""
        p = draw_prime(self.generator)
        known: dict[tuple[Any, ...], tuple[int, int]] | None = {} if self.unknown_roots else None
        fields = [Field(p, (p - 1) // 2, _OMEGA, logs, unknowns) for unknowns in self._unknowns(known)]
        field = fields[0]

        def variable(shape: tuple[int, ...]) -> Residues:
            drawn = field.random(shape, self.generator)
            return drawn if exponents else Residues(drawn.p, None)

        return fields, [_operand(node.tile, variable) for node in self.graphs[0].inputs]

    def _unknowns(self, roots: dict[tuple[Any, ...], tuple[int, int]] | None) -> list[Unknowns]:
        """Roots of both programs are the same function; their maxima have nothing in common."""
        if self.maxima:
            _ = self.forms
        return [Unknowns(self.generator, b.unknowns, tuple(b.maxima), roots) for b in self.boundings]


def _at(field: Field, omega: int) -> Field:
    """Return the field for another evaluation of the same draw."""
    assert field.unknowns is not None
    return replace(field, omega=omega, unknowns=field.unknowns.restart())


def _rescales(graph: Graph) -> bool:
    return any(dict(node.attributes).get("kind") == "rescale" for _, node in graph.walk())


def _differ_in_float64(first: Graph, second: Graph) -> bool:
    """Whether results at a random point differ by far more than rounding."""
    generator = np.random.default_rng(0)
    operands = [
        _operand(node.tile, lambda shape: generator.uniform(0.5, 2.0, shape)) for node in first.inputs
    ]
    with np.errstate(all="ignore"):
        pairs = zip(*(interpret(graph, operands, NUMERIC) for graph in (first, second)), strict=True)
        return any(bool(np.any(np.abs(a - b) > 1e-6 * (1 + np.abs(a)))) for a, b in pairs)


def _agree(first: Sequence[Residues], second: Sequence[Residues]) -> bool:
    return all(np.array_equal(a.p, b.p) for a, b in zip(first, second, strict=True))
