"""Symbolic sizes of a graph, in the order of a kernel's arguments."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ladder.ir import extents
from ladder.ir.build import bind
from ladder.ir.graph import Graph, Node
from ladder.ir.ops import get_operator


def size_names(graph: Graph) -> tuple[str, ...]:
    """Return the names of all sizes as they first occur: a kernel takes them first, as integers.

    Names that are numbered have that order: it is the one of the names that they stand for, whose terms may
    come in another order in an extent.
    """
    names = extents.size_names(extent for node in graph.nodes for extent in _extents(node))
    numbered = all(re.fullmatch(r"n\d+", name) for name in names)
    return tuple(sorted(names, key=lambda name: int(name[1:]))) if numbered else names


def with_plain_names(graph: Graph) -> Graph:
    """Return a graph whose sizes are named by their order: equal chains of a model share a kernel."""
    names = size_names(graph)
    return bind(graph, {name: f"n{at}" for at, name in enumerate(names)}) if names else graph


def _extents(node: Node) -> Iterator[object]:
    """Return the extents of a node's results and attributes."""
    for tile in node.tiles:
        yield from tile.shape
    kinds = get_operator(node.operator).attributes
    for name, value in node.attributes:
        reader = _READERS.get(kinds[name].kind)
        if reader is not None:
            yield from reader(value)


def _of_calls(value: object) -> list[object]:
    """Return the extents in an argument of a library's function: pairs of ``extent`` and one."""
    if not isinstance(value, tuple):
        return []
    if len(value) == 2 and value[0] == "extent":
        return [value[1]]
    return [found for item in value for found in _of_calls(item)]


_READERS: Mapping[str, Callable[[Any], Iterable[object]]] = {
    "extent": lambda value: [value] if isinstance(value, str) else [],
    "extents": list,
    "sizes": lambda value: [extent for _, extent in value],
    "literal": _of_calls,
}
"""Kind of an attribute -> the extents in it."""
