"""The equivalence test; what it proves is worked out in the package's `README.md`."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from ladder.ir.finite import Field, Known, Relations, Residues, RootLog, Unknowns
from ladder.ir.graph import Graph
from ladder.ir.interpret import NUMERIC, interpret
from ladder.ir.modular import UndefinedResidueError, draw_large_prime, draw_prime
from ladder.ir.quantized_values import Components
from ladder.superopt.verifier.bound import LIMIT, Bound, Radicands, bound_of
from ladder.superopt.verifier.certificate import (
    DELTA,
    EXPONENTIALS,
    FREE,
    NO_PRODUCTS,
    ROOTS,
    Certificate,
    Mode,
    has_classes,
    modes_of,
    most_telling,
)
from ladder.superopt.verifier.coverage import require_complete, signatures_differ
from ladder.superopt.verifier.domains import conditions, require_defined
from ladder.superopt.verifier.forms import Bounding, Forms
from ladder.superopt.verifier.relations import Plan, RootRelations, Store, related
from ladder.superopt.verifier.values import COMPOSED, Conversions, domain_of
from tile_types.errors import VerificationError
from tile_types.tile import Tile

SEED_BITS = 128
"""Of the seeds that the verifier draws."""

MAX_POINTS = 4096
"""Most evaluations K per draw; programs with more exponents are refused."""

QUICK_DRAWS = 64
"""Draws until one is defined, before anything is proved."""

PROOF_DRAWS = 64
"""Draws in which the radicands must prove independent."""


MOST_RECOGNISED = 64
"""Most pairs of values that are proved equal to find out where programs are defined."""

_OMEGA = 4
"""A square other than 1: of order q in Z_p for p = 2q + 1, q prime."""

Entropy = tuple[int, ...]
"""A seed, and which of the tests that it serves."""


def verify_equal(
    first: Graph, second: Graph, *, delta: float | Fraction = DELTA, seed: int | None = None
) -> Certificate:
    """Decide whether a program computes what another does, wherever all values of that one are finite.

    first, second: The original and what may replace it, with numeric extents. Inputs and outputs correspond
        in order: a permutation is a difference.
    delta: Wanted bound on the probability of accepting unequal programs.
    seed: Of a certificate, to replay its draws: that proves nothing. By default the verifier draws its own,
        so that no program can be made to fit it.
    Returns Certificate: Never raises for programs outside LAX: they are ``refused``, and ``reason`` names the
        operator.
    Raises ShapeError if an extent is symbolic.
    """
    drawn = secrets.randbits(SEED_BITS) if seed is None else seed
    found = certify(first, second, Fraction(delta), (drawn,), modes_of(first, second))
    return found.seeded(drawn, own=seed is None)


def certify(
    first: Graph,
    second: Graph,
    delta: Fraction,
    entropy: Entropy,
    modes: Sequence[Mode],
    domains: tuple[Graph, Graph] | tuple[()] | None = (),
) -> Certificate:
    """Try modes one after another, then where the programs are defined; the errors of all tests add up.

    domains: Programs of which the second must be defined where the first is, if not those; None: none are.
    """
    difference = signatures_differ(first, second)
    if difference:
        return Certificate("different", f"signatures differ: {difference}")
    try:
        require_complete(first)
        require_complete(second)
        each = delta / (len(modes) + 1)
        spent, failed = Fraction(0), []
        for number, mode in enumerate(modes):
            test = _Test(first, second, (*entropy, number), mode)
            found = _certificate(test, each)
            spent += found.delta if found.equal else each
            if found.equal:
                if domains is not None:
                    where = _Test(*domains, (*entropy, len(modes)), FREE) if domains else test
                    spent += _defined(where, each, entropy)
                return replace(found, delta=spent)
            failed.append(found)
            if found.verdict == "different":
                break
    except VerificationError as error:
        return Certificate("refused", str(error))
    return most_telling(failed)


def refusal(graph: Graph) -> str:
    """Return why equality with a program cannot be decided where exponentials are interpreted, or nothing."""
    found = certify(graph, graph, Fraction(DELTA), (0,), (EXPONENTIALS, ROOTS))
    return found.reason if found.verdict == "refused" else ""


def _defined(test: _Test, delta: Fraction, entropy: Entropy) -> Fraction:
    """Check where the programs are defined; first with all functions unknown, then by proofs."""
    try:
        return test.require_defined(delta / 2, {})
    except VerificationError:
        known = _recognised(*test.graphs, delta / 4, entropy)
        if not known:
            raise
        return delta / 4 + delta / 2 + test.require_defined(delta / 4, known)


def _recognised(first: Graph, second: Graph, delta: Fraction, entropy: Entropy) -> dict[int, set[str]]:
    """Return the values that the second program divides by, or takes roots of, as the first one does."""
    if any(node.body is not None for graph in (first, second) for node in graph.nodes):
        return {}
    asked = list(conditions(first))
    found: dict[int, set[str]] = {}
    tests = 0
    for (kind, b), (same, a) in itertools.product(conditions(second), asked):
        if kind != same or kind in found.get(id(b), ()) or tests == MOST_RECOGNISED:
            continue
        tests += 1
        graphs = replace(first, outputs=(a.name,)), replace(second, outputs=(b.name,))
        if _values_equal(*graphs, delta / MOST_RECOGNISED, (*entropy, tests)):
            found.setdefault(id(b), set()).add(kind)
    return found


def _values_equal(first: Graph, second: Graph, delta: Fraction, entropy: Entropy) -> bool:
    """Whether programs are equal wherever both are defined."""
    if signatures_differ(first, second):
        return False
    modes = modes_of(first, second)
    tests = (_Test(first, second, (*entropy, n), mode) for n, mode in enumerate(modes))
    return any(_certificate(test, delta / len(modes)).equal for test in tests)


def _certificate(test: _Test, delta: Fraction) -> Certificate:
    try:
        return test.run(delta)
    except VerificationError as error:
        return Certificate("refused", str(error))


def agree_at_once(first: Graph, second: Graph, *, seed: int) -> bool:
    """Return whether two programs agree at one random point: what nearly no unequal pair does.

    Roots are unknown functions here, so that programs that are equal only by properties of roots do not,
    nor do those that are undefined wherever they are tried.

    Raises VerificationError if a program is outside LAX.
    """
    for mode in (EXPONENTIALS, FREE):
        try:
            agrees = _Test(first, second, (seed,), mode).agrees_at_once()
        except VerificationError:
            if mode is FREE:
                raise
            continue
        return agrees is True
    return False


def forms_of(graph: Graph, bounding: Bounding) -> tuple[Forms, ...]:
    """Return the forms of a graph's outputs."""
    operands = [_operand(node.tile, bounding.variables) for node in graph.inputs]
    return interpret(graph, operands, domain_of(Conversions.of(graph), bounding))


def _operand(tile: Tile, draw: Any) -> Any:
    """Return a free variable for a tile: of a quantized one, the values of codes and the metadata."""
    shape = tile.known_shape
    if not tile.ttype.is_block:
        return draw(shape)
    blocks = (*shape[:-1], -(-shape[-1] // tile.ttype.block_size))
    metadata = {entry.name: draw(() if entry.scope == "tensor" else blocks) for entry in tile.ttype.metadata}
    return Components(draw(shape), metadata, tile.ttype.block_size)


class _Test:
    """One pair's test in one mode: draws, and what they have shown so far."""

    def __init__(self, first: Graph, second: Graph, entropy: Entropy, mode: Mode) -> None:
        self.graphs, self.mode = (first, second), mode
        self.generator = np.random.default_rng(entropy)
        self.draws = 0
        self.conversions = [Conversions.of(graph) for graph in self.graphs]
        self.exponents = has_classes(("exp",), first, second) and "exp" not in mode.uninterpreted
        self.maxima = has_classes(("maximum",), first, second) or _rescales(first) or _rescales(second)
        converted = any(each.unknown or each.rounded for each in self.conversions)
        free = ["exp"] if "exp" in mode.uninterpreted else []
        composed = any(node.operator in COMPOSED for graph in self.graphs for _, node in graph.walk())
        self.unknown = converted or composed or has_classes(("other", "root", *free), first, second)
        self.boundings = tuple(Bounding(mode.uninterpreted) for _ in self.graphs)
        self.plans: list[Plan] | None = None

    @cached_property
    def forms(self) -> list[tuple[Forms, ...]]:
        """Forms of both programs' outputs."""
        return [forms_of(*pair) for pair in zip(self.graphs, self.boundings, strict=True)]

    def run(self, delta: Fraction) -> Certificate:
        """Reject early, else compute the bound and pass the rounds that it asks for."""
        if self.mode.related:
            self._relate()
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
        return Certificate("equal", "", bound.delta(rounds) + confusion, bound, rounds, self.draws)

    def _relate(self) -> None:
        """Find out which roots are products of others; VerificationError if none is."""
        tiles = [node.tile for node in self.graphs[0].inputs]
        self.plans = related(self.graphs, lambda draw: [_operand(t, draw) for t in tiles], self.generator)
        if self.plans is None:
            raise VerificationError(NO_PRODUCTS)

    def require_defined(self, delta: Fraction, known: dict[int, set[str]]) -> Fraction:
        """Check where the programs are defined; returns the bound on the error of that."""
        _ = self.forms
        sizes = [bounding.largest for bounding in self.boundings]
        free = _Test(*self.graphs, (0,), FREE)
        free.generator, free.plans = self.generator, self.plans

        def draw() -> tuple[list[Field], list[Any]]:
            self.draws += 1
            return free._sample(exponents=False, large=True)

        sizes += [bounding.radicand for bounding in self.boundings]
        return require_defined(*self.graphs, draw, sizes, delta, known)

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
        if (self.unknown or self.maxima) and not _differ_in_float64(*self.graphs):
            what = f"{self.mode.name} were other functions" if self.unknown else "maxima had other values"
            raise VerificationError(f"the outputs would differ if the {what}: nothing is decided")
        return Certificate("different", "outputs differ in a finite field", draws=self.draws)

    def _refused(self, reason: str, bound: Bound) -> Certificate:
        return Certificate("refused", reason, bound=bound, draws=self.draws)

    def _bound(self, delta: Fraction) -> tuple[Bound, Fraction]:
        """Return the bound, and the probability that it is of too few radicands, at most delta / 4."""
        first, second = self.forms
        bound = bound_of(first, second, any(each.exponentials for each in self.boundings))
        bound = bound.with_functions(self.boundings)
        roots = sum(each.roots for each in self.boundings)
        if self.plans is not None:
            bound = bound.with_relations(roots)
        if not roots or "sqrt" in self.mode.uninterpreted:
            return bound, Fraction(0)
        return self._with_radicands(bound, roots, delta / 4)

    def _with_radicands(self, bound: Bound, roots: int, error: Fraction) -> tuple[Bound, Fraction]:
        """Prove that the radicands are independent; refuse if no proof is found."""
        radicands = Radicands()
        for _ in range(PROOF_DRAWS):
            log = RootLog()
            try:
                fields, operands = self._sample(exponents=True, logs=(log, RootLog()))
                for number, own in enumerate(fields):
                    self._run(number, operands, own)
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
                    self._run(number, operands, _at(own, omega)) for number, own in enumerate(fields)
                )
                if not _agree(first, second):
                    # The draw counts only if it is defined at all points; a difference at a defined
                    # point is a proof already.
                    return False
        except UndefinedResidueError:
            return None
        return True

    def _run(self, number: int, operands: Sequence[Any], own: Field) -> tuple[Any, ...]:
        return interpret(self.graphs[number], operands, domain_of(self.conversions[number], own))

    def _sample(
        self, *, exponents: bool, logs: tuple[RootLog, RootLog] | None = None, large: bool = False
    ) -> tuple[list[Field], list[Any]]:
        """Return a field per program, with values for its own unknowns, and common operands."""
        p = draw_large_prime(self.generator) if large else draw_prime(self.generator)
        q, omega = (2, p - 1) if large else ((p - 1) // 2, _OMEGA)
        free = self.mode.uninterpreted
        fields = [Field(p, q, omega, logs, unknowns, free, exponents) for unknowns in self._unknowns()]
        drawing = fields[0]

        def variable(shape: tuple[int, ...]) -> Residues:
            drawn = drawing.random(shape, self.generator)
            return drawn if exponents else Residues(drawn.p, None)

        return fields, [_operand(node.tile, variable) for node in self.graphs[0].inputs]

    def _unknowns(self) -> list[Unknowns]:
        """Functions of both programs are the same; maxima that are none have nothing in common."""
        if self.maxima and "reduce_max" not in self.mode.uninterpreted:
            _ = self.forms
        known: Known = {}
        return [
            Unknowns(self.generator, b.unknowns, tuple(b.maxima), known, relations)
            for b, relations in zip(self.boundings, self._relations(), strict=True)
        ]

    def _relations(self) -> list[Relations | None]:
        if self.plans is None:
            return [None for _ in self.graphs]
        store: Store = {}
        return [RootRelations(plan, store, number == 0) for number, plan in enumerate(self.plans)]


def _at(own: Field, omega: int) -> Field:
    """Return the field for another evaluation of the same draw."""
    assert own.unknowns is not None
    return replace(own, omega=omega, unknowns=own.unknowns.restart())


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
