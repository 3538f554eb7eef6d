"""Where slices begin, as sizes of their own: graphs that differ in nothing else become one.

The steps of an unrolled loop read ``x[:, 0]``, ``x[:, 1]``, ...: one kernel serves all that takes the place.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import repeat

from ladder.ir.build import node_attributes
from ladder.ir.extents import Shape, product, size_names
from ladder.ir.graph import Graph, Node
from tile_types.tile import Extent

SHARING = 3
"""Least number of graphs that differ only in starts for which one kernel takes the starts as arguments."""


def start_names(graph: Graph) -> set[str]:
    """Return the names of sizes that occur in no shape, only where slices begin: they may be 0."""
    shapes = (extent for node in graph.nodes for tile in node.tiles for extent in tile.shape)
    return set(size_names(extent for begin in _begins(graph) for extent in begin)) - {*size_names(shapes)}


def with_open_starts(graphs: Sequence[Graph], first: Sequence[int]) -> list[tuple[Graph, tuple[int, ...]]]:
    """Return each graph with names for the starts in which several differ, and the numbers for these names.

    graphs: With values and sizes named in order, as ``n0``, ``n1``, ...
    first: How many sizes each has: its starts are named from there on.
    """
    alike: dict[Graph, list[int]] = {}
    for at, graph in enumerate(graphs):
        alike.setdefault(_with_starts(graph, repeat(0)), []).append(at)
    found: list[tuple[Graph, tuple[int, ...]]] = [(graph, ()) for graph in graphs]
    for members in alike.values():
        rows = [[*_flat(graphs[at])] for at in members]
        if len({*map(tuple, rows)}) < SHARING:
            continue
        columns = [*zip(*rows, strict=True)]
        names: dict[tuple[int, ...], str] = {}
        texts = [_opened(column, names, first[members[0]]) for column in columns]
        for number, at in enumerate(members):
            found[at] = _with_starts(graphs[at], iter(texts)), tuple(steps[number] for steps in names)
    return found


def _opened(column: tuple[Extent, ...], names: dict[tuple[int, ...], str], first: int) -> Extent:
    """Return what stands for a start in all graphs: itself, or a multiple of a name that may be known."""
    if len({*column}) == 1:
        return column[0]
    numbers = [*map(int, column)]
    step = math.gcd(*numbers)  # kept in the text: it says how reads are aligned
    name = names.setdefault(tuple(number // step for number in numbers), f"n{first + len(names)}")
    return product([step, name])


def _begins(graph: Graph) -> list[Shape]:
    return [node_attributes(node)["begin"] for node in graph.nodes if node.operator == "slice"]


def _flat(graph: Graph) -> list[Extent]:
    """Return the starts of all slices that are numbers."""
    return [start for begin in _begins(graph) for start in begin if isinstance(start, int)]


def _with_starts(graph: Graph, starts: Iterator[Extent]) -> Graph:
    """Return a graph with other starts in place of those that are numbers, in the order of `_flat`."""

    def changed(node: Node) -> Node:
        if node.operator != "slice":
            return node
        begin = tuple(next(starts) if isinstance(b, int) else b for b in node_attributes(node)["begin"])
        given = tuple((name, begin if name == "begin" else value) for name, value in node.attributes)
        return replace(node, attributes=given)

    return replace(graph, nodes=tuple(map(changed, graph.nodes)))
