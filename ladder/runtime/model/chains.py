"""Kernels of memory-bound chains: one per form, found or built side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ladder.ir.graph import Graph
from ladder.ir.printer import print_graph
from ladder.ir.starts import with_open_starts
from ladder.lower.chain import emit_chain
from ladder.lower.chain.scatter import size_names, with_plain_names
from ladder.runtime.build import Job, function_job
from ladder.runtime.library import alone
from ladder.runtime.model.sizes import CallSizes, is_fixed
from tile_types.errors import ScheduleError
from tile_types.tile import Extent

if TYPE_CHECKING:
    from ladder.movement.mapping import Mapping
    from ladder.partition import Subgraph
    from targets import TileDevice


def canonical_chain(graph: Graph) -> Graph:
    """Return the chain with values and sizes named in order: equal chains of a model share a kernel."""
    names = {node.name: f"v{at}" for at, node in enumerate(graph.nodes)}
    nodes = tuple(
        replace(node, name=names[node.name], inputs=tuple(names[value] for value in node.inputs))
        for node in graph.nodes
    )
    plain = replace(graph, name="chain", nodes=nodes, outputs=tuple(names[value] for value in graph.outputs))
    return with_plain_names(plain)


def shared_chains(parts: Sequence[Subgraph]) -> dict[int, tuple[Graph, tuple[int, ...]]]:
    """Return number of a chain among the parts -> what its kernel computes, and the starts that it is given.

    A kernel takes the sizes of the chain first, then where its slices begin, as far as chains differ in that.
    """
    numbers = [number for number, part in enumerate(parts) if part.kind == "chain"]
    graphs = [canonical_chain(parts[number].graph) for number in numbers]
    found = with_open_starts(graphs, [len(size_names(graph)) for graph in graphs])
    return dict(zip(numbers, found, strict=True))


def chain_job(graph: Graph, device: TileDevice, mapping: Mapping | None = None) -> Job:
    """Return the kernel that a chain wants."""
    graph = canonical_chain(graph)
    facts = {"chain": print_graph(graph), "mapping": "" if mapping is None else repr(mapping)}
    name = f"ladder_chain_{hashlib.sha256(''.join(facts.values()).encode()).hexdigest()[:10]}"

    def emit(name: str) -> Any:
        return emit_chain(graph, device, name, mapping)

    others = partial(_other_jobs, graph, device) if mapping is None and device.is_gpu else tuple
    return function_job(facts, name, device, emit, others=others)


def _other_jobs(graph: Graph, device: TileDevice) -> Iterator[Job]:
    """Yield the kernels of a chain by other mappings than the best one, which is emitted if it can be."""
    from ladder.movement.choose import machine_of, ranked

    with suppress(ScheduleError):  # chains side by side are no one loop over rows: they have no mapping
        for moves in ranked(graph, machine_of(device))[1:]:
            yield chain_job(graph, device, moves.mapping)


def kernel_of(entry: Any, now: CallSizes, elements: Sequence[Extent], most: int) -> Callable[[], Any]:
    """Return what gives the kernel of open sizes on CPUs: one that starts no threads where work is little.

    Where sizes are known, a kernel itself starts none for little work; kernels of open sizes start them for
    any. That takes longer than the work, and much longer where other processes use the cores.

    entry: The kernel.
    elements: Numbers that are below ``most`` where there is little to compute; none if that is not asked.
    """
    lone = entry if is_fixed(tuple(elements)) else alone(entry)
    if lone is entry:
        return lambda: entry
    numbers = now.numbers(tuple(elements))
    return lambda: lone if max(numbers()) < most else entry
