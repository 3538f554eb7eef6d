"""Which mappings are tried: grid, loop, imap and fmap."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ladder.superopt.generator.structure import UNIT_AXIS, Mapping

LEAST_SPLIT = 1024
"""Smallest extent of a reduction that blocks share."""


@dataclass(frozen=True)
class Choices:
    """Limits of the mappings.

    grid, loops: Most grid and loop dimensions.
    least: Smallest extent of a split dimension in a tile: dimensions up to it are not split.
    split: Whether blocks may share a reduction.
    reduced: Dimensions that the program sums over.
    """

    grid: int = 3
    loops: int = 1
    least: int = 16
    split: bool = True
    reduced: frozenset[str] = frozenset()


def mappings(
    inputs: Sequence[Sequence[str]], output: Sequence[str], sizes: Any, choices: Choices
) -> Iterator[Mapping]:
    """Yield every mapping: grid dimensions split axes of the output, loop dimensions axes that it lacks.

    All but the last two axes of the output, unless of one element, are batch dimensions: the grid always
    splits them into single indices. One more grid dimension may split a long axis that the output lacks,
    in all operands that have it. Dimensions that one tile holds are not split.

    An axis of an operand that another dimension could split is split or replicated, if the program sums over
    the dimension; otherwise no sum could make the axis the result's. Every grid and loop dimension splits
    some operand.
    """
    named = sorted({name for axes in inputs for name in axes} - {UNIT_AXIS})
    batch = tuple(name for name in output[:-2] if name != UNIT_AXIS)
    inner = [name for name in named if name not in output and sizes[name] > choices.least]
    wide = [name for name in output if name not in (UNIT_AXIS, *batch) and sizes[name] > choices.least]
    shared = [name for name in inner if choices.split and sizes[name] >= LEAST_SPLIT]
    for split in (None, *shared):
        most = choices.grid - len(batch) - (split is not None)
        for count in range(min(most, len(wide)) + 1):
            for grid in itertools.combinations(wide, count):
                for loops in _up_to(choices.loops, inner):
                    yield from _mappings(inputs, batch, grid, loops, split, choices.reduced)


def _up_to(most: int, names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield all combinations of at most so many names."""
    for count in range(min(most, len(names)) + 1):
        yield from itertools.combinations(names, count)


def _mappings(
    inputs: Sequence[Sequence[str]],
    batch: tuple[str, ...],
    grid: tuple[str, ...],
    loops: tuple[str, ...],
    split: str | None,
    reduced: frozenset[str],
) -> Iterator[Mapping]:
    extra = (split,) if split is not None else ()
    whole = (*batch, *(name for name in grid if name not in reduced), *extra)
    always = {name: [_everywhere(inputs, name)] for name in whole}
    dimensions = (*batch, *grid, *extra)
    choices = [always.get(name) or list(_splits(inputs, name)) for name in (*dimensions, *loops)]
    for chosen in itertools.product(*choices):
        axes = list(zip(*chosen, strict=True)) if chosen else [()] * len(inputs)
        imap, fmap = (tuple(per[part] for per in axes) for part in _at(len(dimensions)))
        yield Mapping(dimensions, loops, imap, fmap, batch, split)


def _at(position: int) -> tuple[slice, slice]:
    """Return the slices before a position and from it on."""
    return slice(None, position), slice(position, None)


def _everywhere(inputs: Sequence[Sequence[str]], dimension: str) -> tuple[int, ...]:
    """Return for each operand the axis of a dimension, -1 where it lacks it."""
    return tuple(list(axes).index(dimension) if dimension in axes else -1 for axes in inputs)


def _splits(inputs: Sequence[Sequence[str]], dimension: str) -> Iterator[tuple[int, ...]]:
    """Yield for each operand the axis of a dimension or -1, at least one split."""
    choices = [(axis, -1) if axis >= 0 else (-1,) for axis in _everywhere(inputs, dimension)]
    return (split for split in itertools.product(*choices) if max(split) >= 0)
