"""The movement graph of a chain: every mapping instantiated and rewritten, the fastest by the model."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import lru_cache

from ladder.ir.build import bind
from ladder.ir.extents import size_names
from ladder.ir.graph import Graph
from ladder.ir.starts import start_names
from ladder.movement.decompose import decompose
from ladder.movement.graph import Move, MovementGraph
from ladder.movement.instantiate import instantiate
from ladder.movement.mapping import mappings
from ladder.movement.model import HOPPER, Machine, predicted
from ladder.movement.rewrite import is_scattered, rewrite
from ladder.partition.strided_rows import strided_rows
from schedules.waves import MOST_THREADS
from targets import TileDevice, get_device
from tile_types.errors import ShapeError

LAUNCH = 1.2e-6
"""Seconds of a launch on AMD GPUs (`schedules.cost_amd`)."""

KEPT = 0.8
"""Share of the last cache that is still there for the next kernel."""

LAST_CACHE = {"gfx942": (256 << 20, 17.2e12), "gfx950": (256 << 20, 17.2e12)}
"""Architecture -> bytes and peak bytes per second of a cache behind L2 (CDNA3 and CDNA4 whitepapers)."""


def machine_of(device: TileDevice) -> Machine:
    """Return the costs that the model ranks mappings with.

    Those of an H200 are fitted; other NVIDIA GPUs have its figures in the ratio of rows of `targets`, and
    its latencies. Those of AMD GPUs follow from `targets.amd`: nothing was measured there, and what a block
    and a turn cost is the H200's.
    """
    dram, l2 = device.layer("dram"), device.layer("l2")
    if device.vendor != "amd":
        return _like_hopper(device)
    capacity, bandwidth = LAST_CACHE.get(device.arch, (l2.capacity, l2.bandwidth))
    hopper_latency = 700e-9
    return Machine(
        device=dram.sustained_bandwidth,
        cache=min(bandwidth, l2.bandwidth) * l2.sustained,
        resident=capacity * KEPT,
        units=device.units,
        launch=LAUNCH,
        life=HOPPER.life * dram.latency / hopper_latency,
        resident_lanes=device.max_threads_per_unit,
        issue=device.units * device.vector_ops_per_cycle * device.clock,
        wave=device.warp,
        threads=MOST_THREADS,
    )


def _like_hopper(device: TileDevice) -> Machine:
    """Return the H200's costs with the bandwidths, the cache and the multiprocessors of another GPU."""
    fitted = get_device("cuda/sm_90a")

    def share(name: str, figure: str) -> float:
        return float(getattr(device.layer(name), figure) / getattr(fitted.layer(name), figure))

    rate = device.units * device.clock * device.vector_ops_per_cycle
    return replace(
        HOPPER,
        device=HOPPER.device * share("dram", "bandwidth"),
        cache=HOPPER.cache * share("l2", "bandwidth"),
        resident=HOPPER.resident * share("l2", "capacity"),
        units=device.units,
        resident_lanes=device.max_threads_per_unit,
        issue=HOPPER.issue * rate / (fitted.units * fitted.clock * fitted.vector_ops_per_cycle),
    )


PROBE = 256
"""Stand-ins for symbolic extents."""


@lru_cache(maxsize=256)
def ranked(graph: Graph, machine: Machine = HOPPER) -> tuple[MovementGraph, ...]:
    """Return the rewritten movement graphs of a chain, one per mapping, fastest by the model first.

    graph: A loop over rows (`ladder.partition.rows`); symbolic extents are taken for `PROBE`.
    Raises ScheduleError if it is no loop over rows.
    """
    found_rows = strided_rows(graph)
    plain = decompose(graph if found_rows is None else found_rows.graph)
    known, blocks = bound(plain), (machine.wave, machine.threads)
    found = [rewrite(instantiate(known, mapping)) for mapping in mappings(plain, False, *blocks)]
    scattered = (is_scattered(found[0], step) for step in found[0].steps if isinstance(step, Move))
    if any(scattered):
        tiles = mappings(plain, True, *blocks)
        found += [rewrite(instantiate(known, mapping)) for mapping in tiles]
    return tuple(sorted(found, key=lambda moves: predicted(moves, machine)))


def bound(graph: Graph) -> Graph:
    """Return the graph with a number for every symbolic extent: another where extents would be below 0.

    Larger ones first: extents are as often what is left of a symbol as what it leaves of a number.
    """
    names = symbols(graph)
    graph = bind(graph, dict.fromkeys(start_names(graph), 0))
    for probe in (PROBE, 16 * PROBE, 256 * PROBE, PROBE**3, 16, 4, 2, 1):
        with suppress(ShapeError):
            return bind(graph, dict.fromkeys(names, probe))
    return bind(graph, dict.fromkeys(names, 0))


def symbols(graph: Graph) -> set[str]:
    """Return the names of symbolic extents."""
    return set(size_names(extent for node in graph.nodes for extent in node.tile.shape))
