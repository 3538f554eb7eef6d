"""Attention whose kernel makes q, and the new rows of its caches: how it is described, built and called."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

from ladder.ir.attention import Attention, as_attention, open_extents
from ladder.ir.attention_row import operand_names
from ladder.ir.build import node_attributes
from ladder.ir.graph import Graph
from ladder.ir.parser import parse
from ladder.ir.printer import print_graph
from ladder.partition import Subgraph
from ladder.partition.attention import chosen, is_open, node_of
from ladder.partition.cached_attention import rows_of
from ladder.runtime.build import Job, function_job
from ladder.runtime.model.attention import arguments, readable
from ladder.runtime.model.chains import canonical_chain
from ladder.runtime.model.entry_calls import ready
from ladder.runtime.model.plan import PlanStep
from ladder.runtime.model.prologues import can_be_emitted
from ladder.runtime.model.workspace import Bound, Slots, Workspace
from schedules.attention import AnySchedule, next_best
from targets import TileDevice


def makes_rows(graph: Graph, device: TileDevice) -> bool:
    """Tell whether the kernel of attention that is chosen alone can make its rows."""
    node = node_of(graph)
    if is_open(graph, node):
        return False
    form, choice = chosen(graph, node, device)
    return _is_emitted(print_graph(canonical_chain(rows_of(graph))), form, device, choice.schedule)


@cache
def _is_emitted(rows: str, form: Attention, device: TileDevice, schedule: AnySchedule) -> bool:
    return can_be_emitted(lambda: _emit(rows, form, device, schedule, "kernel"))


def _emit(rows: str, form: Attention, device: TileDevice, schedule: AnySchedule, name: str) -> Any:
    from ladder.lower.build import emit_attention_with_rows
    from ladder.lower.chain.attention_rows import RowsForm

    return emit_attention_with_rows(RowsForm(parse(rows)), form, device, schedule, name)


def cached_attention_jobs(part: Subgraph, device: TileDevice) -> list[Job]:
    """Return the kernel of such a part."""
    graph, node = part.graph, node_of(part.graph)
    form, choice = chosen(graph, node, device)
    rows = print_graph(canonical_chain(rows_of(graph)))
    batch, tokens, keys = (int(str(extent)) for extent in open_extents(graph, node))

    def job(schedule: AnySchedule) -> Job:
        facts = {"attention": str(form), "schedule": str(schedule), "rows": rows}
        name = (
            f"ladder_attention_{hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:10]}"
        )

        def others() -> Iterator[Job]:
            for other in next_best(form, device, schedule, (batch, tokens, keys)):
                if _is_emitted(rows, form, device, other):
                    yield job(other)

        return function_job(facts, name, device, partial(_emit, rows, form, device, schedule), others=others)

    return [job(choice.schedule)]


def bind_cached_attention(memory: Workspace, step: PlanStep) -> Bound:
    """Return the call: what the chain reads, then what attention takes but q."""
    part, entry = step.part, memory.owner.kernels[step.entry]
    graph, node = part.graph, node_of(part.graph)
    form, given = as_attention(graph, node), node_attributes(node)
    names = operand_names(len(node.inputs), given)
    caches = [graph.producer(value) for value in node.inputs[1:3]]
    bases = {cache.inputs[0] for cache in caches}
    reads = [
        (memory.slot[part.outside[x.name]], x.tile.shape == ())
        for x in rows_of(graph).inputs
        if x.name not in bases
    ]
    others = [
        (name, memory.slot[part.outside[value]])
        for name, value in zip(names[3:], node.inputs[3:], strict=True)
    ]
    outside = dict(zip(graph.outputs, part.outputs, strict=True))
    writes = [
        (name, memory.slot[outside[value]], memory.target(outside[value]))
        for name, value in zip(("out", "k", "v"), (node.name, *node.inputs[1:3]), strict=True)
    ]

    def run(slots: Slots) -> None:
        rows = [ready(slots[slot]) for slot, _ in reads]
        rows = [x.reshape(1) if number else x for x, (_, number) in zip(rows, reads, strict=True)]
        found = {name: readable(name, slots[slot]) for name, slot in others}
        for name, slot, target in writes:
            slots[slot] = found[name] = target()
        whole = {name: found[name] for name in "kv"}
        found |= {name: readable(name, x) for name, x in whole.items()}
        if given["turned"]:
            found["out"] = found["out"].transpose(1, 2)
        entry(*rows, *arguments(form, found, "q"))
        for name, tensor in whole.items():
            if found[name] is not tensor:  # it lies otherwise than kernels read
                tensor.copy_(found[name])

    return run
