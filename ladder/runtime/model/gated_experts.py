"""Gates of experts: the chain that alone reads a grouped product of slots becomes its epilogue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ladder.ir.build import node_attributes
from ladder.ir.gemm import PACKED_ROWS
from ladder.ir.graph import Graph
from ladder.partition.gated import gate_between, only_readers, readers_of
from ladder.partition.subgraphs import Subgraph, call_of
from ladder.runtime.compile import Request
from ladder.runtime.experts import of_slots
from schedules.policy import make_plan
from targets import TileDevice
from tile_types.errors import ScheduleError

GROUPED = "ladder.grouped_matmul.default"


def with_expert_gates(graph: Graph, parts: Sequence[Subgraph], device: TileDevice) -> list[Subgraph]:
    """Return parts with gates in the grouped products that alone they read."""
    found, readers = list(parts), readers_of(parts)
    for part in parts:
        request = grouped_request(part)
        after = None if request is None else only_readers(graph, readers, part)
        whole = None if request is None or after is None else _gated(graph, part, request, after[-1], device)
        if after is not None and whole is not None:
            found = [item for item in found if item is not part and item not in after[:-1]]
            found[found.index(after[-1])] = whole
    return found


def grouped_request(part: Subgraph) -> Request | None:
    """Return the request of a grouped product of slots that a part is; None if it is something else."""
    if part.kind != "library" or "call" not in part.operators:
        return None
    given = node_attributes(call_of(part.graph))
    if given["target"] != GROUPED:
        return None
    request, shape = Request.parse(given["arguments"][-1]), call_of(part.graph).tile.shape
    if len(shape) != 3 or request.gemm.masked or request.plan is not None or not isinstance(shape[0], int):
        return None
    return Request.parse(of_slots(request.text, shape[0]))


def _gated(
    graph: Graph, part: Subgraph, request: Request, last: Subgraph, device: TileDevice
) -> Subgraph | None:
    """Return the product with the gate that ``last`` computes; None if that is none, or no kernel has it."""
    (value,), (result,), gemm = part.outputs, last.outputs, request.gemm
    gate = gate_between(graph, value, result)
    shape = (*graph.tile(value).shape[:-1], gemm.n // 2)
    refused = gemm.n % (2 * PACKED_ROWS) or gemm.epilogue or gemm.token_group
    if gate is None or graph.tile(result).shape != shape or refused:
        return None
    gemm = replace(gemm, gate=gate.operator, gate_last=gate.last)
    try:
        make_plan(gemm, device)
    except ScheduleError:
        return None
    call = call_of(part.graph)
    given = node_attributes(call)
    given["arguments"] = (*given["arguments"][:-1], replace(request, gemm=gemm).text)
    call = replace(call, name=result, tiles=(graph.tile(result),), attributes=tuple(sorted(given.items())))
    region = replace(part.graph, nodes=(*part.graph.inputs, call), outputs=(result,))
    return replace(part, graph=region, outputs=(result,))
