"""Patterns: where a move reads its source, as a sequence of nodes that only rename positions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ladder.ir.build import node_attributes
from ladder.ir.graph import Node
from ladder.ir.indexing import parse_indexing

Integers = npt.NDArray[np.int64]
Index = tuple[Integers, ...]
Pattern = tuple[Node, ...]
"""Views in the order in which they are applied to the source."""


def addresses(pattern: Pattern, shape: Sequence[int], index: Index) -> tuple[Integers, npt.NDArray[np.bool_]]:
    """Return the elements before those that are read in a source of ``shape``, and whether they exist.

    index: Positions in what is read, one array per axis.
    """
    inside = np.ones(np.broadcast_shapes(*(np.shape(at) for at in index)) if index else (), np.bool_)
    for at in reversed(range(len(pattern))):
        before = tuple(map(int, pattern[at - 1].tile.shape)) if at else tuple(shape)
        index = _PLACES[pattern[at].operator](pattern[at], before, index)
        for position, extent in zip(index, before, strict=True):
            inside = inside & (position >= 0) & (position < extent)
    flat = np.zeros(inside.shape, np.int64)
    for position, extent in zip(index, shape, strict=True):
        flat = flat * extent + np.clip(position, 0, extent - 1)
    return flat, inside


def unravel(flat: Integers, shape: Sequence[int]) -> Index:
    """Return positions along each axis."""
    found: list[Integers] = []
    for extent in reversed(shape[1:]):
        found.append(flat % extent)
        flat = flat // extent
    return (flat, *reversed(found)) if shape else ()


def _broadcast(node: Node, before: Sequence[int], index: Index) -> Index:
    own = index[len(index) - len(before) :]
    return tuple(np.zeros_like(i) if extent == 1 else i for i, extent in zip(own, before, strict=True))


def _reshape(node: Node, before: Sequence[int], index: Index) -> Index:
    flat = np.zeros((), np.int64)
    for position, extent in zip(index, node.tile.shape, strict=True):
        flat = flat * int(extent) + position
    return unravel(flat, before)


def _transpose(node: Node, before: Sequence[int], index: Index) -> Index:
    permutation = node_attributes(node)["permutation"]
    return tuple(index[permutation.index(axis)] for axis in range(len(before)))


def _slice(node: Node, before: Sequence[int], index: Index) -> Index:
    attributes = node_attributes(node)
    step = attributes["step"] or (1,) * len(before)
    return tuple(int(b) + i * s for b, i, s in zip(attributes["begin"], index, step, strict=True))


def _pad(node: Node, before: Sequence[int], index: Index) -> Index:
    return tuple(i - int(low) for i, low in zip(index, node_attributes(node)["low"], strict=True))


def _repeat(node: Node, before: Sequence[int], index: Index) -> Index:
    attributes = node_attributes(node)
    axis = attributes["axis"] % len(before)
    return tuple(i // attributes["times"] if at == axis else i for at, i in enumerate(index))


def _map(node: Node, before: Sequence[int], index: Index) -> Index:
    indexing = parse_indexing(node_attributes(node)["spec"])
    by_name = dict(zip(indexing.result, index, strict=True))
    zero = np.zeros((), np.int64)
    return tuple(
        sum((by_name[name] * factor for name, factor in axis.terms), zero + axis.offset)
        for axis in indexing.operands[0]
    )


_PLACES: Mapping[str, Callable[[Node, Sequence[int], Index], Index]] = {
    "broadcast": _broadcast,
    "convert": _broadcast,
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "pad": _pad,
    "repeat": _repeat,
    "map": _map,
}
"""View -> positions in its operand."""

VIEWS = tuple(name for name in _PLACES if name != "convert")
"""Operators that a pattern is made of."""
