"""Cost model of movement graphs: bytes per memory level, synchronizations, launches and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, prod

import numpy as np

from ladder.movement.graph import LEVELS, Compute, Move, MovementGraph, Slice, Sync
from ladder.movement.pattern import addresses, unravel
from ladder.partition.rows import SCANS
from tile_types.library import get_type

SECTOR = 32
"""Bytes that a GPU moves at least."""

BURST = 64
"""Bytes that memory brings at least: of rows of which a block reads a few columns, others have the rest."""

NARROW = ((64, 2.2), (128, 1.25))
"""Bytes side by side up to which blocks of columns read slower, and how many times."""

WARP = 32

JOIN = 40e-9
"""Seconds in which a lane takes what a warp found, of reductions along an axis before the last."""

LEAST_TOGETHER = 16
"""Elements side by side in memory, along axes of a result before its last, that are worth a tile's row."""

LEAST_BYTES = 2.0
"""Bytes that a lane reads at least."""

LOADS_AT_ONCE = 4
"""Loads of a lane that reduces along an axis before the last, before it waits for the first."""

STALL = 0.4
"""Times a barrier's own time that lanes with more to store wait there for each warp of a block."""

BESIDE = 2
"""Neighbours at least of which a thread that reduces alone works out one address."""


@dataclass(frozen=True)
class Traffic:
    """Traffic of a movement graph: bytes, syncs and launches.

    bytes: Level -> bytes moved to or from it; what several lanes read of the device counts once.
    syncs: Scope -> how often it waits.
    launches: Kernels.
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


def held(graph: MovementGraph) -> frozenset[str]:
    """Return the values of the chain that lanes keep across a sync: computed before, read again after it.

    Numbers and what was only loaded are not among them: reading those again costs nothing.
    """
    found = set()
    for name, written in graph.writers.items():
        step = graph.steps[written]
        if graph.level(name) != "lane" or not isinstance(step, Compute) or step.kind != "elementwise":
            continue
        reads = graph.readers[name]
        if step.operator != "convert" and any(
            isinstance(graph.steps[at], Sync) and reads[0] < at < reads[-1]
            for at in range(written, reads[-1])
        ):
            found.add(name.removesuffix(".r"))
    return frozenset(found)


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
    return np.broadcast_to(np.where(inside, found, -1), flat.shape)  # a tensor of rank 0 has one address


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
        if last > 0 and ((far - near == 1) & inside & beyond).mean() > 0.75:
            return True
    return False


def follow_in_memory(graph: MovementGraph, move: Move) -> bool:
    """Tell whether axes of the result before the last are one in the source, in any order: as of windows."""
    source, result = graph.tensors[move.source], graph.tensors[move.result]
    rows = [axis for axis, extent in enumerate(result.shape[:-1]) if extent > 1]
    if not rows:
        return False
    steps = np.zeros((len(rows) + 1, len(result.shape)), np.int64)
    steps[np.arange(len(rows)), rows] = 1
    found, inside = addresses(move.pattern, source.shape, tuple(steps.T))
    apart = {int(at - found[-1]): axis for at, axis in zip(found[:-1], rows, strict=True)}
    together = 1
    while inside.all() and together in apart:
        together *= result.shape[apart[together]]
    return together >= LEAST_TOGETHER


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
    """Costs of moves on a GPU.

    device, cache: Bytes per second of memory, and of the cache that all units share.
    resident: Bytes that stay in that cache from kernel to kernel.
    units: Multiprocessors.
    launch: Seconds from a kernel's start to its first data, the next kernel's start overlapping.
    block, turn, sync: Seconds of starting a block, of a lane's next vector after its first, and of a barrier.
    life: Seconds that a lane stays: from its start over its first read to its last store.
    resident_lanes: Of a multiprocessor.
    issue: Operations of all lanes per second.
    wave, threads: Lanes of which blocks are made, and of a block at most.
    """

    device: float = 4.25e12
    cache: float = 6.5e12
    resident: float = 2.5e7
    units: int = 132
    launch: float = 0.8e-6
    block: float = 1.15e-9
    turn: float = 0.3e-6
    sync: float = 0.15e-6
    life: float = 1.8e-6
    resident_lanes: int = 2048
    issue: float = 132 * 128 * 1.7e9
    wave: int = WARP
    threads: int = 1024


HOPPER = Machine()
"""An H200; block, turn and launch are fitted to `benchmarks.chains`."""

OPERATIONS = {"exp": 3.0, "exp_ftz": 3.0, "div": 3.0, "div_ftz": 3.0, "rsqrt": 3.0, "convert": 0.7}
"""Element-wise operator -> instructions per element, 1 for others."""


def predicted(graph: MovementGraph, machine: Machine = HOPPER) -> float:
    """Return the seconds that a graph takes."""
    found = traffic(graph)
    inflated = sum(
        moved(graph, step)[1] * (max(1.0, touched(graph, step)) if _by_lanes(graph, step) else 1.0)
        for step in graph.steps
        if isinstance(step, Move) and moved(graph, step)[0] == "device"
    )
    blocks, turns = launch_shape(graph)
    nbytes, read = far_bytes(graph)
    near = nbytes <= machine.resident
    bandwidth = machine.cache if near else machine.device
    reduced = sum(isinstance(step, Compute) and step.kind == "reduce" for step in graph.steps)
    issue = operations(graph) / machine.issue * idle_lanes(graph)
    waits = found.syncs["block"] * machine.sync + found.syncs["warp"] * machine.sync / 5
    life = (
        machine.life * (0.4 if near else 1.0)
        + waits * max(2, STALL * graph.mapping.lanes / machine.wave if stores_rows(graph) else 0)
        + 0.5 * issue * machine.units * machine.resident_lanes / max(1, all_lanes(graph))
    )
    if graph.mapping.across:
        life += JOIN * graph.mapping.lanes / machine.wave
        waits += 4 * machine.sync * reduced
        issue += reduced * exchanges(graph, machine) / machine.issue
    lanes = machine.units * machine.resident_lanes
    flight = (
        read * life / (lanes * bytes_per_lane(graph)) * (idle_lanes(graph) if graph.mapping.across else 1)
    )
    if graph.mapping.across > 1 and graph.inputs:
        bandwidth /= next((times for most, times in NARROW if _segment(graph) <= most), 1.0)
    memory = max(nbytes / bandwidth, inflated / machine.cache, flight)
    work = max(memory, issue) * max(1.0, machine.units / blocks)
    busy = float((work**3 + (blocks * machine.block) ** 3) ** (1 / 3))
    return found.launches * machine.launch + busy + (turns - 1) * machine.turn + waits


def stores_rows(graph: MovementGraph) -> bool:
    """Tell whether lanes store elements of rows, and not only numbers of them."""
    return any(graph.tensors[name].elements > graph.rows for name in graph.outputs)


def exchanges(graph: MovementGraph, machine: Machine) -> float:
    """Return the shuffles of all lanes in which blocks of columns end one reduction."""
    mapping = graph.mapping
    beside = min(machine.wave, max(2, mapping.lanes // mapping.across))
    return launch_shape(graph)[0] * mapping.lanes * mapping.num * log2(beside)


def _segment(graph: MovementGraph) -> float:
    """Return the bytes side by side that a block of columns reads of a row, of the largest input."""
    largest = max((graph.tensors[name] for name in graph.inputs), key=lambda tensor: tensor.elements)
    return graph.mapping.across * graph.mapping.num * get_type(largest.ttype).elem_bits / 8


def touched(graph: MovementGraph, move: Move) -> float:
    """Return the bytes of sectors that lanes touch over those that they want."""
    source, result = graph.tensors[move.source], graph.tensors[move.result]
    mapping, beyond = graph.mapping, result.elements > graph.rows
    if not beyond or graph.level(move.source) != "device":
        return sectors_per_warp(graph, move)
    size, columns = get_type(source.ttype).elem_bits / 8, prod(result.shape[-mapping.axes :])
    if mapping.across > 1:
        wanted = min(mapping.across * mapping.num, columns) * size
        whole = wanted % BURST == 0 and columns * size % BURST == 0
        return float((-(-wanted // BURST) + 0.5 * (not whole)) * BURST / wanted)
    crossed = mapping.lanes > 1 and not any(
        isinstance(s, Compute) and (s.kind == "partial" or s.operator in SCANS) for s in graph.steps
    )
    return (
        max(SECTOR / size, sectors_per_warp(graph, move))
        if crossed and columns > 1
        else sectors_per_warp(graph, move)
    )


def far_bytes(graph: MovementGraph) -> tuple[int, int]:
    """Return (bytes to and from memory, those that are read): what is read again comes from a cache."""
    reads: dict[str, int] = {}
    written = 0
    for step in graph.steps:
        if isinstance(step, Move) and moved(graph, step)[0] == "device":
            if graph.level(step.source) == "device":
                reads[step.source] = reads.get(step.source, 0) + moved(graph, step)[1]
            else:
                written += moved(graph, step)[1]
    read = sum(min(count, graph.tensors[name].nbytes) for name, count in reads.items())
    return read + written, read


def all_lanes(graph: MovementGraph) -> int:
    """Return how many lanes a kernel has, one after the other."""
    if graph.mapping.lanes > 1 and not graph.mapping.across:
        return graph.rows * graph.mapping.lanes
    if graph.mapping.across:
        return launch_shape(graph)[0] * graph.mapping.lanes
    return launch_shape(graph)[0] * graph.mapping.threads


def bytes_per_lane(graph: MovementGraph) -> float:
    """Return the bytes that a lane reads before it needs one of them."""
    whole = max(LEAST_BYTES, far_bytes(graph)[1] / max(1, all_lanes(graph)))
    most = LOADS_AT_ONCE * (16.0 if graph.mapping.num > 2 else 8.0)
    return min(whole, most) if graph.mapping.across else whole


def idle_lanes(graph: MovementGraph) -> float:
    """Return the lanes that rows take over those that have elements."""
    mapping = graph.mapping
    if mapping.across:
        step, count = mapping.lanes // mapping.across, max(1, positions(graph))
        return -(-count // step) * step / count
    if mapping.lanes == 1 or not mapping.num:
        return 1.0
    return max(1.0, mapping.lanes * mapping.num * graph.width / graph.columns)


def launch_shape(graph: MovementGraph) -> tuple[int, float]:
    """Return the blocks of a kernel, and the vectors that a lane takes one after the other."""
    mapping = graph.mapping
    shapes = [graph.tensors[name].shape for name in graph.outputs]
    vectors = max(graph.tensors[name].elements // graph.tensors[name].slice.width for name in graph.outputs)
    rows, columns = prod(shapes[0][:-1]), shapes[0][-1] if shapes[0] else 1
    if mapping.across:
        columns = prod(shapes[0][-mapping.axes :])
        blocks = graph.rows // columns * -(-columns // (mapping.across * mapping.num))
        spread = max(graph.tensors[name].elements for name in graph.outputs) // max(1, graph.rows)
        each = positions(graph) + (spread if spread > 1 else 0)
        return max(1, blocks), max(1.0, each * mapping.across / mapping.lanes / LOADS_AT_ONCE)
    if mapping.lanes > 1:
        together = mapping.tile[0] or mapping.teams
        turns: float = mapping.num or -(-graph.columns // (mapping.lanes * graph.width))
        if mapping.num and all(graph.tensors[name].elements == graph.rows for name in graph.outputs):
            turns *= min(1.0, max(0.5, graph.width / 4))  # all loads of small vectors come before a sum
        return max(1, -(-graph.rows // together)), max(1, turns) * together / mapping.teams
    alone = positions(graph) / LOADS_AT_ONCE
    if mapping.tile[0]:
        down, across = -(-rows // mapping.tile[0]), -(-columns // mapping.tile[1])
        share = 2 * mapping.tile[0] * mapping.tile[1] / (8 * mapping.threads)
        return max(1, down * across), share + alone
    share = mapping.threads * max(1, mapping.num)
    several = max(1, mapping.num)  # each is reduced after the one before
    return max(1, -(-vectors // share)), 1.0 + 0.3 * (several - 1) + alone * several


def positions(graph: MovementGraph) -> int:
    """Return the elements that each number of a result is reduced from, one reduction after the other."""
    found = [s for s in graph.steps if isinstance(s, Compute) and s.kind == "reduce"]
    return sum(graph.tensors[s.inputs[0]].elements // max(1, graph.tensors[s.result].elements) for s in found)


def operations(graph: MovementGraph) -> float:
    """Return the instructions of all lanes: what is computed, and about 10 per access for addresses."""
    total, mapping, alike = 0.0, graph.mapping, alike_for_columns(graph)
    scanned = 12 + (88 if mapping.lanes > WARP else 48) / graph.width
    for step in graph.steps:
        if isinstance(step, Compute) and step.operator in SCANS:
            total += scanned * graph.tensors[step.inputs[0]].elements
        elif isinstance(step, Compute) and step.kind in ("elementwise", "partial"):
            shared = mapping.num if step.result in alike else 1
            total += OPERATIONS.get(step.operator, 1.0) * graph.tensors[step.inputs[0]].elements / shared
        elif isinstance(step, Move) and moved(graph, step)[0] == "device":
            tensor = graph.tensors[step.result]
            alone = BESIDE if mapping.lanes == 1 and positions(graph) else 1
            total += 10 * tensor.elements / (mapping.num if mapping.across else tensor.slice.width * alone)
    return total


def alike_for_columns(graph: MovementGraph) -> set[str]:
    """Return what is the same for all columns of a position, where a lane has these: it is computed once."""
    found = set[str]()
    for step in graph.steps if graph.mapping.across == 1 else ():
        if isinstance(step, Move) and graph.level(step.source) in ("device", "immediate"):
            alike = _is_of_positions(graph, step)
        else:
            alike = isinstance(step, Compute) and step.kind == "elementwise" and found.issuperset(step.inputs)
        if alike and not isinstance(step, Sync):
            found.add(step.result)
    return found


def _is_of_positions(graph: MovementGraph, move: Move) -> bool:
    """Tell whether neighbouring columns read the same element."""
    source, result = graph.tensors[move.source], graph.tensors[move.result]
    columns = prod(result.shape[-graph.mapping.axes :])
    first = np.unique(np.linspace(0, result.elements // columns - 1, 64).astype(np.int64)) * columns
    near, _ = addresses(move.pattern, source.shape, unravel(first, result.shape))
    far, _ = addresses(move.pattern, source.shape, unravel(first + columns - 1, result.shape))
    return bool((near == far).all())


def _by_lanes(graph: MovementGraph, move: Move) -> bool:
    """Tell whether lanes read a move's source in the order of the result: tiles follow the source."""
    return graph.level(move.result) == "lane"
