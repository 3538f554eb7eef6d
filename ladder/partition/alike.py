"""Chains that take about as long as a launch become one: those of few elements, and those of equal rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.ir.extents import Shape, product
from ladder.partition.repeats import known
from ladder.partition.rows import REDUCTIONS, loop_extents
from ladder.partition.strided_rows import with_rows

if TYPE_CHECKING:
    from ladder.partition.chains import Chains

LEAST_READ, MOST_READ = 1 << 15, 1 << 22
"""Elements that each of them reduces: of fewer, blocks of one kernel take several; more take longer."""

MOST_REDUCTIONS = 8
"""Reductions of one chain of them."""


LITTLE = 1 << 16
"""Elements of a chain below which it joins those that read it."""


def join_readers(chains: Chains) -> None:
    """Join chains of few elements with others of few that read them: now they may be one loop."""
    for number in sorted(chains.members, reverse=True):
        readers = chains.reading(number) if number in chains.members else set()
        for reader in sorted(one for one in readers if one is not None):
            both = number in chains.members and reader in chains.members
            if both and max(_work(chains, number), _work(chains, reader)) < LITTLE:
                chains.join(number, reader)


def _work(chains: Chains, number: int) -> int:
    """Return the elements of the largest value that a chain computes or reads."""
    region, _ = chains.region(chains.members[number])
    return max(known(product(node.tile.shape)) for node in region.nodes)


def join_alike(chains: Chains) -> None:
    """Join chains of GPUs that reduce values of the same rows, whatever they read."""
    groups: dict[tuple[int, Shape], list[int]] = {}
    for number in sorted(chains.members):
        rows = _rows(chains, number)
        if rows is not None:
            groups.setdefault(rows, []).append(number)
    for numbers in groups.values():
        for at, first in enumerate(numbers):
            for other in numbers[at + 1 :]:
                if first in chains.members and other in chains.members and _fit(chains, first, other):
                    chains.join(first, other)


def _fit(chains: Chains, first: int, other: int) -> bool:
    together = chains.members[first] | chains.members[other]
    few = len(chains.reductions & together) <= MOST_REDUCTIONS
    return few and not chains.obstacle(together)


def _rows(chains: Chains, number: int) -> tuple[int, Shape] | None:
    """Return the elements of what a chain reduces, and the extents of its rows; None if they differ."""
    region, outputs = with_rows(*chains.region(chains.members[number]), True)
    reduced = [node for node in region.nodes if node.operator in REDUCTIONS]
    counts = {known(product(region.tile(node.inputs[0]).shape)) for node in reduced}
    count = counts.pop() if len(counts) == 1 else 0
    numbers = all(node.tile.shape == region.tile(outputs[0]).shape for node in reduced)
    if not numbers or not LEAST_READ <= count <= MOST_READ:
        return None
    return count, loop_extents(region, outputs)
