"""Loops over rows in which some reductions read rows of a large input, and others its columns.

Lanes that share a row read neighbours of the one and far elements of the other: each has a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

from ladder.ir.build import node_attributes
from ladder.ir.extents import product
from ladder.ir.graph import Graph, Node
from ladder.partition.repeats import known
from ladder.partition.rows import REDUCTIONS, Index, places_read, row_axes

MUCH_READ = 1 << 20
"""Elements of an input from which on another launch costs less."""

ROW = "row"
"""The loop over rows."""


def mixes_directions(graph: Graph, outputs: Sequence[str]) -> bool:
    """Tell whether reductions of a loop over rows read a large input in both directions."""
    reductions = [node for node in graph.nodes if node.operator in REDUCTIONS]
    if len(reductions) < 2 or (rows := row_axes(graph, outputs)) is None:
        return False
    before = {node.name for node in reductions if _is_before_the_last(graph, node)}
    return any(
        any(ways == {True} for ways in of.values())
        and any(ways == {False} and name in before for name, ways in of.items())
        for of in _directions(graph, outputs, rows)
    )


def reads_columns(graph: Graph, outputs: Sequence[str], rows: int) -> bool:
    """Tell whether a reduction of a loop over rows reads columns of a large input."""
    return any({False} in of.values() for of in _directions(graph, outputs, rows))


def _directions(graph: Graph, outputs: Sequence[str], rows: int) -> list[dict[str, set[bool]]]:
    """Return, of each large input, the reductions that read it, and whether they run along neighbours."""
    large = {n.name for n in graph.inputs if known(product(n.tile.shape)) >= MUCH_READ}
    found: dict[str, dict[str, set[bool]]] = {name: {} for name in large}
    ends = frozenset({ROW}), frozenset[str]()
    for value, place in places_read(graph, outputs, rows, ends, lambda node: node.name) if large else ():
        if value in large:
            _note(found[value], graph.tile(value).shape, place)
    return [*found.values()]


def _is_before_the_last(graph: Graph, node: Node) -> bool:
    """Tell whether a reduction runs along an axis before the last, as columns are reduced."""
    shape = graph.tile(node.inputs[0]).shape
    return product(shape[node_attributes(node)["axis"] % len(shape) + 1 :]) != 1


def _note(directions: dict[str, set[bool]], shape: Sequence[object], place: Index) -> None:
    """Note, of each reduction that an element's place depends on, whether it runs along neighbours."""
    *outer, last = [part for part, extent in zip(place, shape, strict=True) if extent != 1]
    for name in frozenset().union(*outer, last) - {ROW}:
        if name in last:
            directions.setdefault(name, set()).add(True)
        elif last == {ROW}:
            directions.setdefault(name, set()).add(False)
