"""Sums of exponentials less a maximum (softmax, cross entropy) of long rows on GPUs, in parts.

The maximum of a whole row has to be known before the first exponential is summed, so that a row that no
block holds is read twice, and few rows are one kernel each for maximum and sum. A part has its own maximum
instead: its sum is multiplied by the exponential of what that lies below the row's, so that one kernel,
which holds the part, finds both (Milakov and Gimelshein, Online normalizer calculation for softmax, 2018).
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from math import inf
from typing import NamedTuple

import numpy as np

from ladder.ir.build import GraphBuilder, node_attributes, prune, reduced_axis, transformed
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator
from ladder.ir.shapes import replaced
from ladder.movement.split_elements import reshaped

EXPONENTIALS = ("exp", "exp_ftz")

TYPES = ("float32", "float64")
"""Types of sums that lie in memory between kernels."""


class Sum(NamedTuple):
    """A sum of exponentials.

    node: The ``reduce_sum``.
    power: The exponential.
    read: What is read: exponentials are of it less ``less``.
    less: What is subtracted: one number a row or column, made of the maximum.
    maximum: The ``reduce_max`` of ``read``.
    axis: Along which both run.
    """

    node: Node
    power: Node
    read: str
    less: str
    maximum: Node
    axis: int


def sums_of_exponentials(graph: Graph) -> list[Sum]:
    """Return the sums of ``exp(x - f(max(x)))`` along an axis, of known extents."""
    found = (_sum(graph, node) for node in graph.nodes if node.operator == "reduce_sum")
    return [one for one in found if one is not None]


def _sum(graph: Graph, node: Node) -> Sum | None:
    power = graph.producer(node.inputs[0])
    if power.operator not in EXPONENTIALS:
        return None
    below = graph.producer(power.inputs[0])
    if below.operator != "sub":
        return None
    read, less = below.inputs
    tile = graph.tile(read)
    if tile.known_shape != power.tile.shape or tile.ttype.name not in TYPES:
        return None
    axis = reduced_axis(graph, node)
    one = replaced(power.tile.shape, axis, 1)
    spread = graph.tile(less).shape  # leading axes of one element may be missing
    if (*one[: len(one) - len(spread)], *spread) != one or set(one[: len(one) - len(spread)]) - {1}:
        return None
    maximum = _maximum_of(graph, less, read, axis)
    return None if maximum is None else Sum(node, power, read, less, maximum, axis)


def _maximum_of(graph: Graph, less: str, read: str, axis: int) -> Node | None:
    """Return the maximum along an axis of ``read`` of which a number of each row or column is made."""
    ahead, seen = [less], set[str]()
    while ahead:
        node = graph.producer(ahead.pop())
        if node.operator == "reduce_max" and node.inputs[0] == read and reduced_axis(graph, node) == axis:
            return node
        passed = get_operator(node.operator).elementwise or node.operator in ("reshape", "broadcast")
        if passed and node.name not in seen:
            seen.add(node.name)
            ahead += node.inputs
    return None


class Parts(NamedTuple):
    """What is found of parts of rows, each of shape ``[..., parts, 1]``, or ``[..., parts, 1, columns]``.

    maxima: The largest of each.
    finite: The same, but finite: less any other, what is infinite has the exponential 0 or infinity as well.
    sums: Of exponentials less that.
    """

    maxima: str
    finite: str
    sums: str


def in_parts(graph: Graph, counts: Mapping[str, int]) -> Graph:
    """Return a graph whose sums of exponentials, and the maxima in them, are of parts first.

    counts: ``reduce_sum`` -> parts of its rows.
    """
    sums = [one for one in sums_of_exponentials(graph) if counts.get(one.node.name, 1) > 1]
    of_maxima = {one.maximum.name: one for one in sums}
    of_sums = {one.node.name: one for one in of_maxima.values()}
    parts: dict[str, Parts] = {}
    names: dict[str, str] = {}

    def divided(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        if node.name in of_maxima:
            one = of_maxima[node.name]
            found = parts[one.node.name] = of_parts(builder, one, inputs[0], counts[one.node.name])
            return over_parts(builder, node, found.maxima, one.axis)
        if node.name in of_sums:
            one, found = of_sums[node.name], parts[node.name]
            less = names[one.less]
            shape = replaced(graph.tile(one.read).shape, one.axis, 1)
            less = builder.add("reshape", less, shape=(*shape[: one.axis], 1, *shape[one.axis :]))
            share = builder.add(one.power.operator, builder.add("sub", found.finite, less))
            return over_parts(builder, node, builder.add("mul", found.sums, share), one.axis)
        return None

    return renamed(graph, divided, {one.less for one in sums}, names) if sums else graph


def renamed(
    graph: Graph,
    made: Callable[[GraphBuilder, Node, tuple[str, ...]], str | None],
    wanted: Container[str],
    names: dict[str, str],
) -> Graph:
    """Return a graph some of whose nodes are made otherwise.

    made: As of `ladder.ir.build.transformed`; it may ask `names`.
    names: Becomes the new name of each node that was made, and of those that are wanted.
    """

    def noted(builder: GraphBuilder, node: Node, inputs: tuple[str, ...]) -> str | None:
        found = made(builder, node, inputs)
        if found is None and node.name in wanted:
            (found,) = builder.copy(node, inputs)
        if found is not None:
            names[node.name] = found
        return found

    return replace(prune(transformed(graph, noted)), grid=graph.grid)


def of_parts(builder: GraphBuilder, one: Sum, value: str, count: int) -> Parts:
    """Add what is found of the parts of rows."""
    kind, within = builder.tile(value).ttype.name, one.axis + 1
    rows = in_equal_parts(builder, value, one.axis, count, -inf)  # below every number
    maxima = builder.add("reduce_max", rows, axis=within, keep=True)
    most = float(np.finfo(kind).max)
    finite = builder.add("maximum", maxima, builder.add("constant", value=-most, type=kind))
    finite = builder.add("minimum", finite, builder.add("constant", value=most, type=kind))
    powers = builder.add(one.power.operator, builder.add("sub", rows, finite))
    return Parts(maxima, finite, builder.add("reduce_sum", powers, axis=within, keep=True))


def in_equal_parts(builder: GraphBuilder, value: str, axis: int, count: int, filler: float) -> str:
    """Return a value with an axis in parts of equal length, an axis more; the last is filled up."""
    shape = builder.tile(value).known_shape
    length = -(-shape[axis] // count)
    if beyond := length * count - shape[axis]:
        high = tuple(beyond if at == axis else 0 for at in range(len(shape)))
        value = builder.add("pad", value, low=(0,) * len(shape), high=high, value=filler)
    return reshaped(builder, value, (*shape[:axis], count, length, *shape[axis + 1 :]))


def over_parts(builder: GraphBuilder, node: Node, value: str, axis: int) -> str:
    """Reduce what parts have, side by side along an axis, as a node reduced the whole."""
    shape = builder.tile(value).shape
    if shape[axis] == 1:
        return builder.add("reshape", value, shape=node.tile.shape)
    found = builder.add("reshape", value, shape=(*shape[: axis + 1], *shape[axis + 2 :]))
    return builder.add(node.operator, found, axis=axis, keep=node_attributes(node)["keep"])
