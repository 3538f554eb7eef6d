"""The movement graph of a chain: every mapping instantiated and rewritten, the fastest by the model."""

from __future__ import annotations

from functools import lru_cache

from ladder.ir.build import bind
from ladder.ir.extents import size_names
from ladder.ir.graph import Graph
from ladder.ir.starts import start_names
from ladder.movement.decompose import decompose
from ladder.movement.graph import Move, MovementGraph
from ladder.movement.instantiate import instantiate
from ladder.movement.mapping import mappings, spreads
from ladder.movement.model import HOPPER, Machine, alternates, predicted
from ladder.movement.rewrite import is_scattered, rewrite
from tile_types.errors import ShapeError

PROBE = 256
"""Stand-ins for symbolic extents."""


@lru_cache(maxsize=256)
def ranked(graph: Graph, machine: Machine = HOPPER) -> tuple[MovementGraph, ...]:
    """Return the rewritten movement graphs of a chain, one per mapping, fastest by the model first.

    graph: A loop over rows (`ladder.partition.rows`); symbolic extents are taken for `PROBE`.
    Raises ScheduleError if it is no loop over rows.
    """
    plain = decompose(graph)
    known, blocks = bound(plain), (machine.wave, machine.threads)
    found = [rewrite(instantiate(known, mapping)) for mapping in mappings(plain, False, *blocks)]
    scattered = (is_scattered(found[0], step) for step in found[0].steps if isinstance(step, Move))
    if any(scattered):
        tiles = mappings(plain, True, *blocks)
        found += [rewrite(instantiate(known, mapping)) for mapping in tiles]
    elif any(isinstance(step, Move) and alternates(found[0], step) for step in found[0].steps):
        found += [rewrite(instantiate(known, mapping)) for mapping in spreads(plain)]
    return tuple(sorted(found, key=lambda moves: predicted(moves, machine)))


def bound(graph: Graph) -> Graph:
    """Return the graph with a number for every symbolic extent: larger where extents would be below 0."""
    names = symbols(graph)
    graph = bind(graph, dict.fromkeys(start_names(graph), 0))
    for probe in (PROBE, 16 * PROBE, 256 * PROBE):
        try:
            return bind(graph, dict.fromkeys(names, probe))
        except ShapeError:
            continue
    return bind(graph, dict.fromkeys(names, PROBE**3))


def symbols(graph: Graph) -> set[str]:
    """Return the names of symbolic extents."""
    return set(size_names(extent for node in graph.nodes for extent in node.tile.shape))
