"""Extents that the results and attributes of a node have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from ladder.ir.graph import Node
from ladder.ir.ops import get_operator


def extents_of(node: Node) -> Iterator[object]:
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
