"""Limits of a search, and its report."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from ladder.ir.graph import Graph
from ladder.superopt.generator.alphabet import steps_of
from ladder.superopt.generator.mapping import Choices
from ladder.superopt.generator.program import Program
from ladder.superopt.generator.space import LEAST_TILE
from ladder.superopt.generator.structure import Structure
from ladder.superopt.verifier import Certificate, Stability
from targets import get_device


@dataclass(frozen=True)
class Limits:
    """How far to search.

    operators: Operators of a block graph, loads and stores not counted.
    kernels: Kernels: the block graph, and operators before it.
    grid, loops: Grid dimensions, at most 3, and dimensions of the loop.
    split: Whether blocks may share a reduction, for a second block graph to combine.
    proofs: Most graphs that are proved, if one of them is stable: the cheapest of each mapping, then the
        second ...
    seconds: Time budget; what was found until then is reported, as incomplete.
    states: Budget of states, or None. One process visits no more; with several, it is when they stop.
    workers: Processes.
    pruning: False keeps every prefix (ablation).
    compare: False does not compare complete graphs with the program: states are counted only (ablation).
    capacity: Bytes of shared memory of a block.
    units: Multiprocessors.
    """

    operators: int = 8
    kernels: int = 1
    grid: int = 3
    loops: int = 1
    split: bool = True
    proofs: int = 16
    seconds: float | None = None
    states: int | None = None
    workers: int = 2
    pruning: bool = True
    compare: bool = True
    capacity: int = 227 * 1024
    units: int = 132

    @staticmethod
    def of(program: Program, device: str, **given: Any) -> Limits:
        """Return limits that suit a program and a device, but for what is given (None is not).

        A CPU has no shared memory to respect: its limits are those of an H200.

        Raises UnknownNameError if there is no such device.
        """
        found = get_device(device)
        room = {"capacity": found.shared_per_block, "units": found.units} if found.shared_per_block else {}
        known = {name: value for name, value in given.items() if value is not None}
        return Limits(**{"operators": operators_of(program), **room, **known})

    def choices(self, program: Program) -> Choices:
        """Return what limits the mappings of a program."""
        return Choices(self.grid, self.loops, least_tile(program), self.split, reduced(program))


ACCUMULATORS = 2
"""Steps that a looped block graph has beside a program's own."""

LEAST_OPERATORS = 8


def operators_of(program: Program) -> int:
    """Return how many operators a block graph of a program may need: its own, decodings and accumulators."""
    own = steps_of(program.symbolic)
    return max(LEAST_OPERATORS, own + ACCUMULATORS) + len(program.packed)


def reduced(program: Program) -> frozenset[str]:
    """Return the dimensions that a program sums over."""
    graph = program.symbolic
    first = {node.inputs[0]: node for node in graph.nodes if node.operator in ("matmul", "reduce_sum")}
    axes = {value: dict(node.attributes).get("axis", -1) for value, node in first.items()}
    return frozenset(str(graph.tile(value).shape[axis]) for value, axis in axes.items())  # type: ignore[index]


def least_tile(program: Program) -> int:
    """Return the smallest extent of a split dimension in a tile."""
    return LEAST_TILE if program.multiplies else 1


@dataclass
class Counts:
    """Counts of a search.

    states: Prefixes visited.
    pruned: Steps dropped because their value can occur in no equal program, or no steps lead from it to a
        result.
    candidates: Complete graphs.
    verified, rejected: Candidates by the equivalence test.
    reasons: Why, for the rejected.
    """

    states: int = 0
    pruned: int = 0
    candidates: int = 0
    verified: int = 0
    rejected: int = 0
    reasons: dict[str, int] = field(default_factory=dict)

    def reject(self, reason: str) -> None:
        """Count a candidate that passed the quick test as rejected after all."""
        self.verified -= 1
        self.rejected += 1
        self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def add(self, other: Counts) -> None:
        """Add another's."""
        for name in ("states", "pruned", "candidates", "verified", "rejected"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for reason, count in other.reasons.items():
            self.reasons[reason] = self.reasons.get(reason, 0) + count


@dataclass(frozen=True)
class VerifiedGraph:
    """A verified graph.

    structure: Mapping and steps.
    graph: At the program's sizes.
    certificate, extents: Of equality of ``graph`` at all extents, proved by a test at these.
    stability: Of floating-point behaviour.
    cost: Bytes that blocks load per wave: what graphs are ranked by until kernels are measured.
    """

    structure: Structure
    graph: Graph
    certificate: Certificate
    extents: dict[str, int]
    stability: Stability
    cost: float


@dataclass(frozen=True)
class Report:
    """Result of `search`.

    found: Verified and stable graphs, cheapest first.
    unstable: Verified graphs that failed the floating-point test.
    complete: Whether the whole space was searched within the budget.
    seconds: That the search took, whenever that was.
    dearer: Graphs that agree with the program at a random point, but were not among the cheapest to be
        proved.
    recalled: Whether it was read from a database.
    delta: Bound on the probability that any of the verified graphs is not equal to the program: the errors of
        all proofs that were tried add up.
    """

    program: Program
    limits: Limits
    found: tuple[VerifiedGraph, ...]
    unstable: tuple[VerifiedGraph, ...]
    counts: Counts
    seconds: float
    complete: bool
    dearer: int = 0
    recalled: bool = False
    delta: Fraction = Fraction(0)

    @property
    def origin(self) -> str:
        """Where it comes from, for people."""
        where = "from the database; its search took" if self.recalled else "searched in"
        return f"{where} {self.seconds:.1f} s{'' if self.complete else ', out of time: not complete'}"
