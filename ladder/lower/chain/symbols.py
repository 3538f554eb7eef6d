"""The symbolic sizes of a chain: which there are, and their order among a kernel's arguments."""

from __future__ import annotations

import re

from ladder.ir.graph import Graph

_NAME = re.compile(r"[A-Za-z_]\w*")
_FUNCTIONS = {"floordiv", "ceildiv"}


def size_names(graph: Graph) -> tuple[str, ...]:
    """Return the names of all sizes, sorted: a kernel takes them first, as integers."""
    texts = [str(extent) for node in graph.nodes for tile in node.tiles for extent in tile.shape]
    for node in graph.nodes:
        for _, value in node.attributes:
            texts += [str(part) for part in _flat(value)]
    symbolic = {name for text in texts for name in _NAME.findall(text)} & _declared(graph)
    return tuple(sorted(symbolic))


def _declared(graph: Graph) -> set[str]:
    """Return the names that occur in shapes or extents of nodes."""
    texts = [e for node in graph.nodes for tile in node.tiles for e in tile.shape if isinstance(e, str)]
    texts += [
        str(value)
        for node in graph.nodes
        for key, value in node.attributes
        if key == "extent" and isinstance(value, str)
    ]
    return {name for text in texts for name in _NAME.findall(text)} - _FUNCTIONS


def _flat(value: object) -> list[object]:
    return [item for part in value for item in _flat(part)] if isinstance(value, tuple) else [value]
