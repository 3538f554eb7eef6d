"""Which memory must be copied before a graph runs, so that a run that raises an error can be undone.

After such a run the program itself runs from the beginning, and raises the error at its own line. Memory
that a graph overwrites without having read it needs no copy: the program writes the same values again, as
long as it reaches every write that the failed run made.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.fx

from ladder.capture.values.aliasing import storage_of
from ladder.capture.values.kinds import is_a
from ladder.capture.values.monitor import Monitor

OVERWRITES = ("index_copy_", "copy_", "fill_", "zero_", "setitem")
"""Operators that overwrite elements of their first operand without reading them."""


class Effect(NamedTuple):
    """What an operator does to memory, by keys of storages, and whether it may fail.

    `reads` leaves out what the operator only gives a view of, and what it overwrites. `fails` is by what it
    may fail: operators that have it in common fail together.
    """

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    overwrites: bool = False
    fails: Any = None


def effect_of(node: torch.fx.Node, given: Any, result: Any, monitor: Monitor) -> Effect:
    """Return what the operator of a node has done, given its arguments and its result."""
    (first, *rest), own = storages(given), storages(result)
    name = getattr(node.target, "__name__", str(node.target))
    overwrites = name in OVERWRITES and monitor.mutated == {first} and first not in rest
    written = frozenset(monitor.mutated)
    reads = rest if overwrites else [key for key in (first, *rest) if key in written or key not in own]
    by = _extent_and_index(node, *given) if name == "index_copy_" else node
    return Effect(frozenset(reads), written, overwrites, by if monitor.fails or by is not node else None)


def _extent_and_index(node: torch.fx.Node, args: Sequence[Any], named: Any) -> Any:
    """Return the extent and the index that decide whether ``index_copy_`` fails; else the node itself."""
    if len(args) != 4 or type(args[1]) is not int:
        return node
    return args[0].shape[args[1]] if args[0].dim() else 1, node.args[2]


def storages(value: Any) -> list[int]:
    """Return the storages of the tensors in a value, 0 where there is none."""
    if is_a(value, torch.Tensor):
        return [storage_of(value) if value.layout is torch.strided else 0]
    items: Iterable[Any] = ()
    if is_a(value, dict | tuple | list):
        items = value.values() if is_a(value, dict) else value
    return [key for item in items for key in storages(item)] or [0]


def to_keep(
    graph: torch.fx.Graph, effects: Mapping[torch.fx.Node, Effect], written: Collection[int]
) -> set[int]:
    """Return the storages that must be copied, of those from outside the graph that are `written`."""
    kept, read = set[int](), set[int]()
    failing = set[Any]()
    behind: dict[torch.fx.Node, set[Any]] = {}
    writers: dict[int, set[Any]] = {}
    for node in graph.nodes:
        effect = effects.get(node, Effect())
        if node not in effects and node.op.startswith("call") and not node.meta.get("part"):
            return set(written)  # an operator of unknown effect
        before = {by for source in node.all_input_nodes for by in behind[source]}
        before |= {by for key in effect.reads | effect.writes for by in writers.get(key, ())}
        if effect.fails is not None:
            before.add(effect.fails)
        if not effect.overwrites or effect.writes & read or not before.issuperset(failing):
            kept |= effect.writes
        read |= effect.reads | effect.writes
        if effect.fails is not None:
            failing.add(effect.fails)
        behind[node] = before
        for key in effect.writes:
            writers[key] = writers.get(key, set()) | before
    return kept & {*written}
