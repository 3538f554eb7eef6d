"""Ablation of pruning: the same search with and without it.

Without pruning nothing is compared with the program: states are counted only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ladder.superopt.generator.program import Program
from ladder.superopt.generator.report import Limits
from ladder.superopt.generator.search import Progress, search

FACTOR = 20
"""The search without pruning is stopped when it has visited more than this many times the states."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    program: Its name.
    operators: Most operators of a block graph.
    states, seconds, verified: With pruning.
    states_without, seconds_without: Without; a lower bound unless ``finished``.
    """

    program: str
    operators: int
    states: int
    seconds: float
    verified: int
    states_without: int
    seconds_without: float
    finished: bool

    @property
    def factor(self) -> float:
        """How many times the states are visited without pruning, at least."""
        return self.states_without / max(1, self.states)


def ablation(
    program: Program, limits: Limits, operators: Sequence[int], step: Progress | None = None
) -> Iterator[Row]:
    """Yield a row per number of operators."""
    for count in operators:
        pruned = search(program, replace(limits, operators=count, pruning=True), step=step)
        budget = 1 + (FACTOR + 1) * pruned.counts.states
        without = replace(limits, operators=count, pruning=False, states=budget, compare=False)
        full = search(program, without, step=step)
        yield Row(
            program.name, count, pruned.counts.states, pruned.seconds, len(pruned.found),
            full.counts.states, full.seconds, full.complete,
        )  # fmt: skip
