"""Axes of a few positions, before the last, of all of which a thread has the elements.

As the three channels of an image that are computed of one hue, or the fluxes of a field that are stacked:
what their elements have in common is read and computed once, and which part of a stack one is of is known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ladder.ir.extents import Shape
from ladder.ir.graph import Graph
from ladder.ir.ops import get_operator
from ladder.lower.chain.gpu_nest import GpuNest
from ladder.lower.chain.indices import Index
from ladder.partition.repeats import WORK, short_axes

LEAST_SAVED, TIMES_LESS = 16, 1.3
"""Instructions of an element of each position that must be saved, and times as many as are left."""


def shared_axis(nest: GpuNest) -> int:
    """Return the axis, from the end, of whose positions threads have all; 0 if little is shared."""
    if nest.scatters:
        return 0
    for axis in short_axes(nest.graph, nest.graph.outputs):
        extent = int(nest.graph.tile(nest.graph.outputs[0]).shape[axis])
        alone, together = _work(nest, axis, None), _work(nest, axis, range(extent))
        saved = extent * alone - together
        if saved >= LEAST_SAVED * extent and extent * alone >= TIMES_LESS * together:
            return axis
    return 0


def _work(nest: GpuNest, axis: int, positions: range | None) -> int:
    """Return the instructions of an element at some positions together; None: of one at any."""
    made: Mapping[Any, Any] = {}
    with nest.values.only_loads():
        for value in nest.graph.outputs:
            extents = nest.shape(value)
            index: Index = tuple(nest.probe(f"s{at}", extent) for at, extent in enumerate(extents))
            for at in [index[axis]] if positions is None else positions:
                nest.values.at(value, at_position(index, axis, at))
        made = nest.values.memory
    return sum(_instructions(nest.graph, str(key[0])) for key in made)


def at_position(index: Index, axis: int, position: Any) -> Index:
    """Return an index with another position along an axis, counted from the end."""
    whole = len(index) + axis
    return (*index[:whole], position, *index[whole + 1 :])


def without(shape: Shape, axis: int) -> Shape:
    """Return extents without one, counted from the end."""
    whole = len(shape) + axis
    return (*shape[:whole], *shape[whole + 1 :])


def with_position(index: Index, axis: int, position: int) -> Index:
    """Return an index with one axis more, counted from the end of what it becomes."""
    whole = len(index) + 1 + axis
    return (*index[:whole], position, *index[whole:])


def _instructions(graph: Graph, value: str) -> int:
    node = graph.producer(value)
    return WORK.get(node.operator, 1) if get_operator(node.operator).elementwise else 0
