"""Affine indexing: ``"n h+r w+s c, f r s c -> n h w f"`` and what follows from it.

One notation serves contractions (matmul, convolution) and views (transpose, window,
broadcast): for every operand one affine expression per axis, then the result's indices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ladder.ir.extents import Shape, floordiv, product, show_shape, total
from tile_types.errors import ShapeError
from tile_types.tile import Extent

_TERM = re.compile(r"([+-]?)(?:(\d+)\*)?([A-Za-z_]\w*)|([+-]?)(\d+)")


@dataclass(frozen=True)
class Affine:
    """``sum(factor * index) + offset``; terms are sorted by index name, factors are never 0."""

    terms: tuple[tuple[str, int], ...] = ()
    offset: int = 0

    @staticmethod
    def of(terms: Mapping[str, int], offset: int = 0) -> Affine:
        """Build the canonical form."""
        return Affine(tuple(sorted((name, factor) for name, factor in terms.items() if factor)), offset)

    @property
    def index(self) -> str | None:
        """The name, if the expression is one index alone."""
        return (
            self.terms[0][0] if self.offset == 0 and len(self.terms) == 1 and self.terms[0][1] == 1 else None
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all indices."""
        return tuple(name for name, _ in self.terms)

    def plus(self, other: Affine, sign: int = 1) -> Affine:
        terms = dict(self.terms)
        for name, factor in other.terms:
            terms[name] = terms.get(name, 0) + sign * factor
        return Affine.of(terms, self.offset + sign * other.offset)

    def times(self, factor: int) -> Affine:
        return Affine.of({name: factor * f for name, f in self.terms}, factor * self.offset)

    def bounds(self, extents: Mapping[str, int]) -> tuple[int, int]:
        """Return the least and the greatest value for indices in ``range(extent)``."""
        reach = [factor * (extents[name] - 1) for name, factor in self.terms]
        low = self.offset + sum(min(0, value) for value in reach)
        return low, self.offset + sum(max(0, value) for value in reach)

    def __str__(self) -> str:
        """Return text without spaces, e.g. ``2*h+r-1``."""
        text = ""
        for name, factor in self.terms:
            scaled = name if abs(factor) == 1 else f"{abs(factor)}*{name}"
            text += ("-" if factor < 0 else "+" if text else "") + scaled
        if self.offset or not text:
            text += f"{self.offset:+d}" if text else str(self.offset)
        return text


@dataclass(frozen=True)
class Indexing:
    """One affine expression per axis of each operand, and the indices of the result."""

    operands: tuple[tuple[Affine, ...], ...]
    result: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """All indices: those of the result, then those summed over, by first appearance."""
        found = dict.fromkeys(self.result)
        for operand in self.operands:
            for axis in operand:
                found.update(dict.fromkeys(axis.names))
        return tuple(found)

    @property
    def reduced(self) -> tuple[str, ...]:
        """Indices that are summed over."""
        return self.names[len(self.result) :]

    def __str__(self) -> str:
        """Return the notation that `parse_indexing` reads."""
        operands = ", ".join(" ".join(map(str, axes)) for axes in self.operands)
        return f"{operands} -> {' '.join(self.result)}".strip()


@lru_cache(maxsize=4096)
def parse_indexing(text: str) -> Indexing:
    """Read ``"m k, n k -> m n"``.

    Raises ShapeError if the text is malformed or the result repeats an index.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise ShapeError(f"indexing {text!r} lacks '->' before the result's indices")
    operands = tuple(tuple(_affine(axis, text) for axis in operand.split()) for operand in left.split(","))
    result = tuple(right.split())
    if len(set(result)) != len(result) or not all(name.isidentifier() for name in result):
        raise ShapeError(f"indexing {text!r}: the result must list distinct index names")
    return Indexing(operands, result)


def _affine(axis: str, text: str) -> Affine:
    terms: dict[str, int] = {}
    offset = position = 0
    while position < len(axis):
        match = _TERM.match(axis, position)
        signed = bool(match and (match[1] or match[4]))
        if match is None or (position and not signed):
            raise ShapeError(f"indexing {text!r}: {axis!r} is not an affine index such as 2*h+r-1")
        if match[3]:
            factor = int(f"{match[1]}{match[2] or 1}")
            terms[match[3]] = terms.get(match[3], 0) + factor
        else:
            offset += int(f"{match[4]}{match[5]}")
        position = match.end()
    return Affine.of(terms, offset)


def solve_extents(
    indexing: Indexing, shapes: Sequence[Shape], known: Mapping[str, Extent]
) -> dict[str, Extent]:
    """Return the extent of every index.

    An index alone on an axis has that axis' extent; an index left over in an affine axis
    gets the largest extent that stays inside.

    Raises ShapeError if ranks or extents disagree or an index cannot be determined.
    """
    _check_ranks(indexing, shapes)
    extents = dict(known)
    axes = [
        pair
        for axes, shape in zip(indexing.operands, shapes, strict=True)
        for pair in zip(axes, shape, strict=True)
    ]
    for axis, extent in axes:
        if (
            axis.index is not None
            and extents.setdefault(axis.index, extent) != extent
            and axis.index not in known
        ):
            raise ShapeError(
                f"index {axis.index!r} of {str(indexing)!r} has extent {extents[axis.index]} on one axis"
                f" and {extent} on another; operand shapes are {', '.join(map(show_shape, shapes))}"
            )
    for axis, extent in axes:
        unknown = [name for name in axis.names if name not in extents]
        if len(unknown) == 1 and dict(axis.terms)[unknown[0]] > 0:
            extents[unknown[0]] = _remaining(axis, unknown[0], extent, extents)
    missing = [name for name in indexing.names if name not in extents]
    if missing:
        raise ShapeError(
            f"the extent of index {missing[0]!r} of {str(indexing)!r} is unknown; give it in sizes"
        )
    return extents


def check_inside(indexing: Indexing, shapes: Sequence[Shape], extents: Mapping[str, Extent]) -> None:
    """Raise ShapeError where an index provably leaves its axis."""
    sizes = {name: extent for name, extent in extents.items() if isinstance(extent, int)}
    for number, (axes, shape) in enumerate(zip(indexing.operands, shapes, strict=True)):
        for axis, extent in zip(axes, shape, strict=True):
            if not isinstance(extent, int) or not set(axis.names) <= set(sizes):
                continue
            low, high = axis.bounds(sizes)
            if (low < 0 or high >= extent) and all(sizes[name] > 0 for name in axis.names):
                raise ShapeError(
                    f"index {axis} of operand {number} spans {low}..{high} but its axis has {extent}"
                    f" elements; shrink the extents or give pad=True to read zeros outside"
                )


def _check_ranks(indexing: Indexing, shapes: Sequence[Shape]) -> None:
    if len(indexing.operands) != len(shapes):
        raise ShapeError(f"{str(indexing)!r} indexes {len(indexing.operands)} operands, got {len(shapes)}")
    for number, (axes, shape) in enumerate(zip(indexing.operands, shapes, strict=True)):
        if len(axes) != len(shape):
            raise ShapeError(
                f"{str(indexing)!r} gives operand {number} {len(axes)} indices,"
                f" its shape is {show_shape(shape)}"
            )


def _remaining(axis: Affine, name: str, extent: Extent, extents: Mapping[str, Extent]) -> Extent:
    """Solve ``factor*(x-1) + others + offset <= extent - 1`` for x."""
    used = [
        product([factor, total([extents[n], -1])]) for n, factor in axis.terms if n != name and factor > 0
    ]
    room = total([extent, -1, -max(axis.offset, 0), *(product([-1, amount]) for amount in used)])
    return total([floordiv(room, dict(axis.terms)[name]), 1])


def gather(
    array: npt.NDArray[np.generic], axes: Sequence[Affine], names: Sequence[str], extents: Mapping[str, int]
) -> npt.NDArray[np.generic]:
    """Return ``result[names...] = array[axes...]``, zero where an index lies outside.

    Names that no axis mentions become axes of extent 1 (callers broadcast them).
    """
    inside = np.ones((1,) * len(names), bool)
    positions = []
    for axis, extent in zip(axes, array.shape, strict=True):
        position = np.full((1,) * len(names), axis.offset, np.int64)
        for name, factor in axis.terms:
            steps = np.arange(extents[name], dtype=np.int64) * factor
            shape = [1] * len(names)
            shape[names.index(name)] = extents[name]
            position = position + steps.reshape(shape)
        inside = inside & (position >= 0) & (position < extent)
        positions.append(np.clip(position, 0, max(extent - 1, 0)))
    if array.size == 0:
        shape = [extents[name] if any(name in axis.names for axis in axes) else 1 for name in names]
        return np.zeros(shape, array.dtype)
    values = array[tuple(positions)] if positions else array.reshape((1,) * len(names))
    return values if inside.all() else np.where(inside, values, np.zeros((), array.dtype))
