"""What a movement graph costs: bytes per level, syncs, launches, and the time that they take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from ladder.movement.graph import LEVELS, Move, MovementGraph, Slice, Sync, Tensor
from ladder.movement.pattern import addresses, unravel
from tile_types.library import get_type

SECTOR = 32
"""Bytes that a GPU moves at least."""

WARP = 32


@dataclass(frozen=True)
class Traffic:
    """What moves.

    Parameters
    ----------
    bytes
        Level -> bytes moved to or from it; what several lanes read of the device counts once.
    syncs
        Scope -> how often it waits.
    launches
        Kernels.
    """

    bytes: Mapping[str, int]
    syncs: Mapping[str, int]
    launches: int


def moved(graph: MovementGraph, move: Move) -> tuple[str, int]:
    """Return (level, bytes) of a move: of the farther side, what is read of it."""
    source, result = graph.tensors[move.source], graph.tensors[move.result]
    levels = (source.slice.level, result.slice.level)
    level = max(levels, key=LEVELS.index)
    if "immediate" in levels:
        return "immediate", 0
    size = get_type(source.ttype).elem_bits / 8
    return level, int(min(source.elements, result.elements) * size)


def traffic(graph: MovementGraph) -> Traffic:
    """Return what a graph moves."""
    found = dict.fromkeys(LEVELS[2:], 0)
    for step in graph.steps:
        if isinstance(step, Move):
            level, count = moved(graph, step)
            if level in found:
                found[level] += count
    syncs = {scope: graph.syncs(scope) for scope in LEVELS[2:]}
    return Traffic(found, syncs, graph.launches)


# ---- how a warp reads --------------------------------------------------------------------------------
def warp_addresses(graph: MovementGraph, move: Move) -> np.ndarray:
    """Return the elements that the lanes of some warps read at once, ``[warps, 32, width]``; -1 for none."""
    source, result = graph.tensors[move.source], graph.tensors[move.result]
    width = result.slice.width
    vectors = max(1, result.elements // width)
    starts = np.linspace(0, max(0, vectors - WARP), 8).astype(np.int64)
    lanes = np.minimum(starts[:, None] + np.arange(WARP), vectors - 1)
    flat = lanes[..., None] * width + np.arange(width)
    found, inside = addresses(move.pattern, source.shape, unravel(flat, result.shape))
    return np.where(inside, found, -1)


def sectors_per_warp(graph: MovementGraph, move: Move) -> float:
    """Return the bytes of the sectors that warps touch, over the bytes of the distinct elements they want."""
    size = get_type(graph.tensors[move.source].ttype).elem_bits / 8
    touched = wanted = 0.0
    for warp in warp_addresses(graph, move):
        found = np.unique(warp[warp >= 0])
        wanted += found.size * size
        touched += np.unique((found * size // SECTOR).astype(np.int64)).size * SECTOR
    return touched / wanted if wanted else 1.0


def runs_along_rows(graph: MovementGraph, move: Move) -> bool:
    """Tell whether neighbours along an axis before the last are neighbours in the source."""
    source, result = graph.tensors[move.source], graph.tensors[move.result]
    if len(result.shape) < 2:
        return False
    step = 1
    for extent in reversed(result.shape[1:]):
        step *= extent
        last = result.elements - step
        flat = np.unique(np.linspace(0, max(0, last - 1), 64).astype(np.int64))
        near, inside = addresses(move.pattern, source.shape, unravel(flat, result.shape))
        far, beyond = addresses(move.pattern, source.shape, unravel(flat + step, result.shape))
        if last > 0 and inside.all() and beyond.all() and (far - near == 1).mean() > 0.75:
            return True
    return False


def source_slice(graph: MovementGraph, move: Move) -> Slice:
    """Return what one lane touches of a move's source."""
    result = graph.tensors[move.result].slice
    warps = warp_addresses(graph, move)
    lane = warps[0, 0]
    together = bool((np.diff(lane) == 1).all())
    level = graph.level(move.source)
    if together:
        return Slice(level, result.num, result.width, result.stride)
    step = int(lane[1] - lane[0]) if lane.size > 1 else 1
    return Slice(level, result.num * result.width, 1, step)


# ---- time --------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Machine:
    """What moves cost.

    Parameters
    ----------
    device, cache
        Bytes per second of memory, and of the cache that all units share.
    units
        Multiprocessors or cores.
    launch, sync, latency
        Seconds of a kernel, of a block's barrier, and from the first read to its data.
    lanes
        Lanes that must be at work to reach the bandwidth.
    """

    device: float = 4.2e12
    cache: float = 6.5e12
    units: int = 132
    launch: float = 1.6e-6
    sync: float = 3e-8
    latency: float = 0.9e-6
    lanes: int = 132 * 1024


HOPPER = Machine()
"""An H200."""


def predicted(graph: MovementGraph, machine: Machine) -> float:
    """Return the seconds that a graph takes."""
    found = traffic(graph)
    inflated = sum(
        moved(graph, step)[1] * (max(1.0, sectors_per_warp(graph, step)) if _by_lanes(graph, step) else 1.0)
        for step in graph.steps
        if isinstance(step, Move) and moved(graph, step)[0] == "device"
    )
    rows = _rows(graph)
    lanes = rows * graph.mapping.lanes if graph.mapping.lanes > 1 else _elements(graph) / 8
    busy = min(1.0, lanes / machine.lanes)
    waves = max(1.0, lanes / (machine.units * 2048))
    waits = found.syncs["block"] * machine.sync + found.syncs["warp"] * machine.sync / 3
    memory = max(found.bytes["device"] / machine.device, inflated / machine.cache) / max(busy, 0.05)
    return found.launches * (machine.launch + machine.latency) + memory + waits * waves


def _by_lanes(graph: MovementGraph, move: Move) -> bool:
    """Tell whether lanes read a move's source in the order of the result: tiles follow the source."""
    return graph.level(move.result) == "lane"


def _elements(graph: MovementGraph) -> int:
    return max(graph.tensors[name].elements for name in graph.outputs)


def _rows(graph: MovementGraph) -> int:
    tensor: Tensor = graph.tensors[graph.outputs[0]]
    return prod(tensor.shape[:-1])


def syncs_of(graph: MovementGraph) -> int:
    """Return how many syncs a graph has."""
    return sum(isinstance(step, Sync) for step in graph.steps)
