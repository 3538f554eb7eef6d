"""Greedy rewriting of movement graphs to a fixed point: redundant moves are removed.

Rules, each a function from a graph to a rewritten one, or None where it applies nowhere:

* what a lane wrote and reads again, in the same pattern, stays in registers;
* what all lanes of a row have, they do not read again: it is a broadcast;
* element-wise operators go forward over moves: what they read is moved instead of what they make, and two
  moves in a row become one;
* moves of the same tensor in the same pattern become one; unused results are not computed;
* parts of a reduction pass through the nearest level that its lanes share (shuffles, shared memory);
* reads along another axis than the result's pass through shared memory, where the mapping has tiles;
* a sync waits for the smallest scope that something crosses, or goes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import numpy as np

from ladder.movement.graph import LEVELS, Compute, Move, MovementGraph, Slice, Step, Sync, Tensor
from ladder.movement.model import follow_in_memory, moved, runs_along_rows, sectors_per_warp, traffic
from ladder.movement.pattern import Pattern, addresses, unravel

Rule = Callable[[MovementGraph], MovementGraph | None]

SCATTERED = 1.5
"""Bytes of touched sectors over wanted bytes from which on a read is worth a tile in shared memory."""

SMALL = 8
"""Elements of what is read over those that are made of it, from which on an input is small."""

SAMPLES = 512

MOST_STEPS = 256
"""Steps to which rewriting may add: neighbours of neighbours are made anew for each that reads them."""


def rewrite(graph: MovementGraph, trace: Callable[[str, MovementGraph], None] | None = None) -> MovementGraph:
    """Apply the rules until none applies.

    trace: Called with each rule's name and the graph after it.
    """
    while True:
        for rule in RULES:
            found = rule(graph)
            if found is not None:
                graph = found
                if trace is not None:
                    trace(rule.__name__, graph)
                break
        else:
            return graph


# ---- finding and replacing ---------------------------------------------------------------------------
def _reads_back(graph: MovementGraph) -> Iterable[tuple[int, Move, str]]:
    """Yield (step, move, lane tensor) for reads of device tensors that lanes of this graph wrote."""
    for at, step in enumerate(graph.steps):
        if not isinstance(step, Move) or graph.level(step.result) != "lane":
            continue
        writer = graph.writers.get(step.source)
        if writer is None or graph.level(step.source) != "device":
            continue
        written = graph.steps[writer]
        if isinstance(written, Move) and not written.pattern and not _is_partial(graph, written.source):
            yield at, step, written.source


def _is_partial(graph: MovementGraph, lane: str) -> bool:
    """Tell whether a lane has only its part of a tensor's rows: what is read back is of other lanes."""
    step = graph.steps[graph.writers[lane]]
    return isinstance(step, Compute) and step.kind == "partial"


def _renamed(step: Step, names: Mapping[str, str]) -> Step:
    """Return a step that reads tensors under their new names."""
    if isinstance(step, Sync) or names.keys().isdisjoint(step.inputs):
        return step
    if isinstance(step, Move):
        return replace(step, source=names[step.source])
    return replace(step, inputs=tuple(names.get(name, name) for name in step.inputs))


def _fresh(graph: MovementGraph, wish: str, taken: dict[str, Tensor]) -> str:
    number = 0
    while (name := f"{wish}_{number}") in graph.tensors or name in taken:
        number += 1
    return name


# ---- rules -------------------------------------------------------------------------------------------
def keep_in_lane(graph: MovementGraph) -> MovementGraph | None:
    """Merge write-then-read: the same lane, the same pattern."""
    merged = {at: lane for at, move, lane in _reads_back(graph) if not move.pattern}
    if not merged:
        return None
    names: dict[str, str] = {}
    kept = []
    for at, step in enumerate(graph.steps):
        if at in merged and not isinstance(step, Sync):
            names[step.result] = names.get(merged[at], merged[at])
        else:
            kept.append(_renamed(step, names))
    return graph.with_steps(tuple(kept))


def broadcast_in_lane(graph: MovementGraph) -> MovementGraph | None:
    """Merge write-then-read where every lane has its row's value."""
    for at, move, lane in _reads_back(graph):
        if _one_per_row(graph, lane, move.pattern, graph.tensors[move.result].shape):
            step = Compute(move.result, "broadcast", "broadcast", (lane,), (), move.pattern)
            return graph.with_steps((*graph.steps[:at], step, *graph.steps[at + 1 :]))
    return None


def _one_per_row(graph: MovementGraph, lane: str, pattern: Pattern, shape: tuple[int, ...]) -> bool:
    """Tell whether a tensor has one element per row of ``shape``, which all lanes of that row have."""
    tensor = graph.tensors[lane]
    rows = int(np.prod(shape[:-1], dtype=np.int64))
    if not shape or (graph.mapping.lanes == 1 and shape != tensor.shape):
        return False
    if tensor.elements not in (rows, rows * shape[-1]) or not _is_reduced(graph, lane):
        return False
    last = shape[-1] if tensor.elements == rows else 1
    count = rows * shape[-1]
    flat = np.unique(np.linspace(0, count - 1, min(count, SAMPLES)).astype(np.int64))
    found, inside = addresses(pattern, tensor.shape, unravel(flat, shape))
    return bool(inside.all() and (found == flat // last).all())


def _is_reduced(graph: MovementGraph, lane: str) -> bool:
    """Tell whether a lane's tensor follows from reductions, and numbers, alone."""
    return _origins(graph, lane) in ({"reduce"}, {"reduce", "number"})


def _origins(graph: MovementGraph, lane: str) -> set[str]:
    step = graph.steps[graph.writers[lane]]
    if isinstance(step, Move):
        return {"number" if graph.level(step.source) == "immediate" else "memory"}
    assert isinstance(step, Compute)  # a sync writes nothing
    if step.kind in ("reduce", "source"):
        return {"reduce" if step.kind == "reduce" else "number"}
    return set().union(*(_origins(graph, name) for name in step.inputs))


def swap_forward(graph: MovementGraph) -> MovementGraph | None:
    """Move what element-wise operators read instead of what they make; two moves become one."""
    before = traffic(graph).bytes["device"]
    reads = list(_reads_back(graph))
    for stored in dict.fromkeys(move.source for _, move, _ in reads):
        found = _pulled(graph, [read for read in reads if read[1].source == stored])
        if found is not None and len(found.steps) > max(MOST_STEPS, len(graph.steps)):
            continue
        if found is not None and traffic(found).bytes["device"] <= before:
            return found
    return None


def _pulled(graph: MovementGraph, reads: list[tuple[int, Move, str]]) -> MovementGraph | None:
    """Return the graph with all reads of one tensor made out of what it is made of."""
    steps: list[Step] = list(graph.steps)
    tensors: dict[str, Tensor] = {}
    for at, move, lane in reversed(reads):
        pull = _Pull(graph, tensors)
        name = pull.through(lane, move.pattern, graph.tensors[move.result].shape)
        if name is None:
            return None
        rest = [_renamed(step, {move.result: name}) for step in steps[at + 1 :]]
        steps = [*steps[:at], *pull.steps, *rest]
    found = graph.with_steps(tuple(steps), tensors)
    return remove_dead(found) or found


class _Pull:
    """Makes a lane's tensor anew in another pattern, out of moves of what it is made of."""

    def __init__(self, graph: MovementGraph, tensors: dict[str, Tensor]) -> None:
        self.graph, self.tensors = graph, tensors
        self.steps: list[Step] = []
        self.made: dict[str, str | None] = {}

    def through(self, lane: str, pattern: Pattern, shape: tuple[int, ...]) -> str | None:
        """Return a tensor equal to the pattern of a lane's tensor, or None, also beyond `MOST_STEPS`."""
        if len(self.steps) > max(MOST_STEPS, len(self.graph.steps)):
            return None
        if lane not in self.made:
            self.made[lane] = self._made(lane, pattern, shape)
        return self.made[lane]

    def _made(self, lane: str, pattern: Pattern, shape: tuple[int, ...]) -> str | None:
        graph = self.graph
        if graph.level(lane) == "immediate":
            return self.moved(lane, lane, pattern, shape)
        step = graph.steps[graph.writers[lane]]
        if isinstance(step, Move):
            if graph.level(step.source) in ("device", "immediate"):
                return self.moved(lane, step.source, step.pattern + pattern, shape)
            return None
        assert isinstance(step, Compute)  # a sync writes nothing
        if step.kind == "elementwise":
            return self.computed(lane, step, pattern, shape)
        (operand, whole) = (
            (step.inputs[0], step.pattern + pattern) if step.kind == "broadcast" else (lane, pattern)
        )
        if step.kind in ("broadcast", "reduce") and _one_per_row(graph, operand, whole, shape):
            name = self.declare(lane, shape)
            self.steps.append(Compute(name, "broadcast", "broadcast", (operand,), (), whole))
            return name
        return None

    def moved(self, lane: str, source: str, pattern: Pattern, shape: tuple[int, ...]) -> str:
        name = self.declare(lane, shape)
        self.steps.append(Move(name, source, pattern))
        return name

    def computed(self, lane: str, step: Compute, pattern: Pattern, shape: tuple[int, ...]) -> str | None:
        """Return the operator applied to pulled operands; outside, what the pattern's borders say."""
        operands = [self.through(name, pattern, shape) for name in step.inputs]
        if None in operands:
            return None
        name = self.declare(lane, shape)
        self.steps.append(replace(step, result=name, inputs=tuple(str(value) for value in operands)))
        borders = {dict(node.attributes).get("value", 0.0) for node in pattern if node.operator == "pad"}
        if not borders:
            return name
        return self.bordered(name, lane, pattern, shape, borders.pop()) if len(borders) == 1 else None

    def bordered(self, name: str, lane: str, pattern: Pattern, shape: tuple[int, ...], border: object) -> str:
        """Choose between a value and the border's by where the pattern reads something."""
        kind, inner = self.graph.tensors[lane].ttype, self.graph.tensors[lane].shape
        holes = tuple(
            replace(n, attributes=tuple((k, 0.0 if k == "value" else v) for k, v in n.attributes))
            for n in pattern
        )
        one = self.constant(lane, 1.0, inner, "bool")
        outside = self.constant(lane, border, shape, kind)
        mask = self.declare(f"{lane}_inside", shape, "bool")
        self.steps.append(Move(mask, one, holes))
        result = self.declare(lane, shape)
        self.steps.append(Compute(result, "elementwise", "select", (mask, name, outside)))
        return result

    def constant(self, lane: str, value: object, shape: tuple[int, ...], kind: str) -> str:
        name = self.declare(f"{lane}_number", shape, kind, "immediate")
        attributes = (("shape", shape), ("type", kind), ("value", value))
        self.steps.append(Compute(name, "source", "constant", (), attributes))  # type: ignore[arg-type]
        return name

    def declare(self, lane: str, shape: tuple[int, ...], kind: str = "", level: str = "lane") -> str:
        name = _fresh(self.graph, lane, self.tensors)
        like = self.graph.tensors.get(lane)
        width = like.slice.width if like is not None and shape and shape[-1] % like.slice.width == 0 else 1
        lanes = self.graph.mapping.lanes
        num = -(-shape[-1] // (width * lanes)) if lanes > 1 and shape else 1
        piece = Slice(level, num, width, width * lanes if num > 1 else width)
        assert kind or like is not None
        self.tensors[name] = Tensor(kind or like.ttype, shape, piece)  # type: ignore[union-attr]
        return name


def _meaning(step: Move | Compute) -> tuple[object, ...]:
    """Return all of a step but where its result goes."""
    return type(step), *(getattr(step, name) for name in step.__match_args__ if name != "result")


def read_once(graph: MovementGraph) -> MovementGraph | None:
    """Merge read-after-read, and equal computations."""
    seen: dict[tuple[object, ...], str] = {}
    names: dict[str, str] = {}
    kept = []
    for step in (_renamed(step, names) for step in graph.steps):
        if not isinstance(step, Sync) and graph.level(step.result) in ("lane", "immediate"):
            first = seen.setdefault(_meaning(step), step.result)
            if first != step.result:
                names[step.result] = first
                continue
        kept.append(step)
    return graph.with_steps(tuple(kept)) if names else None


def remove_dead(graph: MovementGraph) -> MovementGraph | None:
    """Drop steps whose result is unused."""
    needed, kept = set(graph.outputs), []
    for step in reversed(graph.steps):
        if isinstance(step, Sync) or step.result in needed:
            kept.append(step)
            needed |= set(step.inputs)
    if len(kept) == len(graph.steps):
        return None
    return graph.with_steps(tuple(reversed(kept)))


def raise_parts(graph: MovementGraph) -> MovementGraph | None:
    """Pass the parts of a reduction through the nearest level that its lanes share."""
    level = "warp" if graph.mapping.lanes <= 32 else "block"
    for step in graph.steps:
        if isinstance(step, Compute) and step.kind == "partial":
            for at in graph.readers[step.result]:
                move = graph.steps[at]
                if isinstance(move, Move) and graph.level(move.result) == "device":
                    return _at_level(graph, move.result, level)
    return None


def _at_level(graph: MovementGraph, name: str, level: str) -> MovementGraph:
    tensor = graph.tensors[name]
    moved_up = replace(tensor, slice=replace(tensor.slice, level=level))
    return replace(graph, tensors={**graph.tensors, name: moved_up})


def stage_tiles(graph: MovementGraph) -> MovementGraph | None:
    """Read along the source's own axis into shared memory, and from there along the result's."""
    if not graph.mapping.tile[0]:
        return None
    for at, step in enumerate(graph.steps):
        if not isinstance(step, Move) or moved(graph, step)[0] != "device" or step.source not in graph.inputs:
            continue
        if is_scattered(graph, step):
            result = graph.tensors[step.result]
            name = _fresh(graph, f"{step.source}_tile", {})
            tile = replace(result, slice=replace(result.slice, level="block"))
            steps = (Move(name, step.source, step.pattern), Sync("block"), Move(step.result, name))
            return graph.with_steps((*graph.steps[:at], *steps, *graph.steps[at + 1 :]), {name: tile})
    return None


def is_scattered(graph: MovementGraph, move: Move) -> bool:
    """Tell whether lanes read sectors for little of them, while the source lies along the result's rows."""
    if graph.level(move.source) != "device" or graph.level(move.result) != "lane":
        return False
    if graph.tensors[move.source].elements * SMALL < graph.tensors[move.result].elements:
        return False  # caches have it
    if sectors_per_warp(graph, move) <= SCATTERED:
        return False
    return runs_along_rows(graph, move) or follow_in_memory(graph, move)


def relax_syncs(graph: MovementGraph) -> MovementGraph | None:
    """Let a sync wait for the smallest scope that something crosses, or remove it."""
    for at, step in enumerate(graph.steps):
        if not isinstance(step, Sync):
            continue
        scope = _needed_scope(graph, at)
        if scope is None:
            return graph.with_steps(graph.steps[:at] + graph.steps[at + 1 :])
        if scope != step.scope:
            return graph.with_steps((*graph.steps[:at], Sync(scope), *graph.steps[at + 1 :]))
    return None


def _needed_scope(graph: MovementGraph, at: int) -> str | None:
    """Return the farthest level of what only this sync makes visible; None if there is nothing."""
    needed = -1
    for name, written in graph.writers.items():
        level = LEVELS.index(graph.level(name))
        if level <= LEVELS.index("lane") or written > at:
            continue
        for read in graph.readers[name]:
            others = (*graph.steps[written + 1 : at], *graph.steps[at + 1 : read])
            covered = any(isinstance(s, Sync) and LEVELS.index(s.scope) >= level for s in others)
            if read > at and not covered:
                needed = max(needed, level)
    return LEVELS[needed] if needed >= 0 else None


RULES: tuple[Rule, ...] = (
    keep_in_lane,
    broadcast_in_lane,
    remove_dead,
    read_once,
    swap_forward,
    raise_parts,
    stage_tiles,
    relax_syncs,
)
"""In the order in which they are tried."""
