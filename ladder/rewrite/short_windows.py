"""Reductions over few positions of windows of what is stored, written out: of rows, then of columns.

A loop over a window takes an element at a time where windows slide along the last axis. What is computed of
moved copies of an image are vectors of neighbouring results, and rows are combined before columns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

from ladder.ir.build import GraphBuilder, node_attributes, transformed
from ladder.ir.extents import product, total
from ladder.ir.graph import Graph, Node
from ladder.ir.indexing import Affine, parse_indexing
from ladder.ir.ops import get_operator
from ladder.ir.shapes import replaced
from ladder.rewrite.axis_rules import JOIN_FOLDING
from ladder.rewrite.rules import rewrite
from ladder.rewrite.short_reductions import COMBINING
from tile_types.tile import Extent

MOST = 25
"""Positions of a window that are written out, at most."""


@dataclass(frozen=True)
class Sliding:
    """Windows along axes of an image, all positions of which are reduced.

    map: The node that makes them.
    image: What they are of.
    places: Per axis of the image, the place that an element of a window has.
    names: Index of each axis of the result.
    extents: Index -> extent.
    pad: Whether places beyond a border are zeros.
    """

    map: str
    image: str
    places: Sequence[Affine]
    names: Sequence[str]
    extents: Mapping[str, Any]
    pad: bool


def with_moved_copies(graph: Graph) -> Graph:
    """Return a graph whose short reductions over windows are computed of moved copies."""
    if not any(node.operator == "map" for node in graph.nodes):
        return graph
    read = Counter(value for node in graph.nodes for value in node.inputs) + Counter(graph.outputs)
    found = {node.name: _sliding(graph, node, read) for node in graph.nodes if node.operator in COMBINING}
    if not any(found.values()):
        return graph

    images: dict[str, str] = {}

    def one(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        if node.operator == "map":
            images[node.name] = inputs[0]  # the new graph may name it otherwise
        windows = found.get(node.name)
        if windows is None:
            return None
        return _combined(builder, node, replace(windows, image=images[windows.map]))

    return rewrite(replace(transformed(graph, one), grid=graph.grid), JOIN_FOLDING)


def _sliding(graph: Graph, node: Node, read: Counter[str]) -> Sliding | None:
    """Return the windows that a reduction, the last of their axes, is over."""
    axes, below = list[int](), node
    while below.operator == node.operator and not node_attributes(below)["keep"]:
        if axes and read[below.name] != 1:
            return None
        axes.append(node_attributes(below)["axis"] % len(graph.tile(below.inputs[0]).shape))
        below = graph.producer(below.inputs[0])
    if below.operator != "map" or read[below.name] != 1:
        return None
    given = node_attributes(below)
    indexing = parse_indexing(given["spec"])
    names = list(indexing.result)
    reduced = [names.pop(axis) for axis in reversed(axes)]
    extents = dict(zip(indexing.result, below.tile.shape, strict=True))
    windows = Sliding(below.name, below.inputs[0], indexing.operands[0], names, extents, given["pad"])
    return windows if _is_stored(graph, windows.image) and _is_short(graph, windows, reduced) else None


def _is_stored(graph: Graph, value: str) -> bool:
    """Tell whether a value is read from memory and at most converted; each copy computes what is computed."""
    node = graph.producer(value)
    while node.operator in ("pad", "convert") or get_operator(node.operator).engine == "view":
        node = graph.producer(node.inputs[0])
    return node.operator == "input" or get_operator(node.operator).engine != "chain"


def _is_short(graph: Graph, windows: Sliding, reduced: Sequence[str]) -> bool:
    """Tell whether windows of few positions slide along the last axis, and each axis is one of the result."""
    taps = [windows.extents[name] for name in reduced]
    if not all(isinstance(count, int) for count in taps) or not 1 < prod(taps) <= MOST:
        return False
    shape = graph.tile(windows.image).shape
    if len(shape) != len(windows.names) or len(windows.places[-1].terms) != 2:
        return False
    slid = [name for place in windows.places for name in place.names if name in reduced]
    steps = [
        dict(place.terms).get(name, 0) for place, name in zip(windows.places, windows.names, strict=True)
    ]
    return (
        sorted(slid) == sorted(reduced)
        and all(len(place.terms) <= 2 and step > 0 for place, step in zip(windows.places, steps, strict=True))
        and (not windows.pad or all(isinstance(count, int) for count in _beyond(windows, shape)))
    )


def _beyond(windows: Sliding, shape: Sequence[Extent]) -> list[Extent]:
    """Return how many places behind the last one of each axis windows reach; open ones may be expressions."""
    found = []
    for place, extent in zip(windows.places, shape, strict=True):
        last = [product([factor, total([windows.extents[name], -1])]) for name, factor in place.terms]
        found.append(total([*last, place.offset, 1, product([-1, extent])]))
    return found


def _combined(builder: GraphBuilder, node: Node, windows: Sliding) -> str:
    """Add what a reduction is, of copies; a sum begins with 0, so that it is 0 of zeros of either sign."""
    value, offsets = _bordered(builder, windows)
    for axis, (place, name) in enumerate(zip(windows.places, windows.names, strict=True)):
        terms, shape = dict(place.terms), builder.tile(value).shape
        step = terms.pop(name)
        count, gap = next(((windows.extents[tap], gap) for tap, gap in terms.items()), (1, 0))
        if not terms and windows.extents[name] == shape[axis]:
            continue
        parts = [
            builder.add(
                "slice",
                value,
                begin=replaced((0,) * len(shape), axis, offsets[axis] + at * gap),
                shape=replaced(shape, axis, windows.extents[name]),
                step=replaced((1,) * len(shape), axis, step),
            )
            for at in range(count)
        ]
        value = reduce(lambda a, b: builder.add(COMBINING[node.operator], a, b), parts)
    if node.operator != "reduce_sum":
        return value
    zero = builder.add("constant", value=0, shape=(), type=node.tile.ttype.name)
    return builder.add("add", zero, value)


def _bordered(builder: GraphBuilder, windows: Sliding) -> tuple[str, list[int]]:
    """Return the image with the zeros around it that windows reach, and where the first window begins."""
    shape, offsets = builder.tile(windows.image).shape, [place.offset for place in windows.places]
    if not windows.pad:
        return windows.image, offsets
    low = [max(0, -offset) for offset in offsets]
    high = [max(0, int(count)) for count in _beyond(windows, shape)]
    value = builder.add("pad", windows.image, low=tuple(low), high=tuple(high), value=0)
    return value, [offset + before for offset, before in zip(offsets, low, strict=True)]
