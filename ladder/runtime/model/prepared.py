"""A simplified program and its subgraphs before kernels are built; the plan cache stores it on disk.

Import and partition depend on the graph and the device alone. So a new process that compiles a model again
reads the result (`ladder.runtime.cache` keeps it as a note) and imports, traces and partitions nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch

from ladder import knobs
from ladder.ir.build import node_attributes
from ladder.ir.folding import fold
from ladder.ir.gemm import PACKED_ROWS, Gemm
from ladder.ir.graph import Graph, Node
from ladder.ir.graph_data import as_tuple, graph_from_data, graph_to_data
from ladder.movement.split import split_reductions
from ladder.partition import partition
from ladder.partition.cached_attention import with_cached_attention
from ladder.partition.found_graphs import Replaced, with_found
from ladder.partition.gated import gate_between, only_readers, readers_of, with_gates
from ladder.partition.partition import ordered
from ladder.partition.prologues import with_prologues
from ladder.partition.scatter import with_own_bases, with_own_numbers
from ladder.partition.subgraphs import Subgraph, call_of, engine, extract, outside_inputs
from ladder.rewrite import simplify
from ladder.runtime.compile import Request, candidate_for, gated_schedule
from ladder.runtime.experts import of_slots
from ladder.runtime.model.cached_attention import makes_rows
from ladder.runtime.model.found import finder, weights_of
from ladder.runtime.model.grouped_calls import with_grouped_products
from ladder.runtime.model.library import is_onnx, resolve
from ladder.runtime.model.parameters import with_made, with_parameters_computed
from ladder.runtime.model.program import Program, Source
from ladder.runtime.model.prologues import described
from ladder.runtime.model.unsorted_rows import with_unsorted_rows
from ladder.runtime.packed import gemm_from_dict
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


@dataclass(frozen=True)
class Prepared:
    """A program for one device.

    program: As imported, its graph simplified.
    parts: Of its graph, in order.
    """

    program: Program
    parts: Sequence[Subgraph]


def prepare(program: Program, device: TileDevice, search: float = 0.0) -> Prepared:
    """Simplify and divide an imported program.

    search: Seconds for what the databases of found graphs lack.
    Raises LadderError if a quantized product is none that a kernel computes.
    """
    program = simplified(program, device)
    sources = program.sources.items()
    parts = partition(
        program.graph,
        [name for name, source in sources if source.kind in ("weight", "part")],
        updated_inputs(program, program.graph),
        side_by_side=device.is_gpu,
        device=device,
        packable=[name for name, source in sources if source.graph is not None],
        choose=candidate_for,
    )
    prepared = with_found_graphs(Prepared(with_packed(program, parts), parts), device, search)
    return prepared if program.precise else with_chains_in_products(prepared, device)


def with_chains_in_products(prepared: Prepared, device: TileDevice) -> Prepared:
    """Return a program with gates in the epilogues of products of few activation rows, and norms ahead."""
    if device.kind != "cuda":
        return prepared
    graph, parts, settings = prepared.program.graph, prepared.parts, knobs.settings
    if settings.gated_products:
        parts = with_gates(graph, parts, lambda gemm, rows: bool(gated_schedule(gemm, device, rows)))
        parts = with_expert_gates(graph, parts, device)
    if settings.prologues and "pdl" in device.features:
        parts = with_prologues(graph, parts, lambda *asked: described(device, *asked), device)
        parts = with_cached_attention(graph, parts, lambda part: makes_rows(part, device))
    return replace(prepared, parts=ordered(graph, list(parts)))


def with_found_graphs(prepared: Prepared, device: TileDevice, search: float) -> Prepared:
    """Return a program with found graphs where they are predicted to be faster."""
    find, program = finder(device, search), prepared.program
    if find is None or program.precise:
        return prepared
    weights = weights_of(program.graph, program.sources, device)
    found = with_found(program.graph, prepared.parts, find, weights)
    if all(part.kind != "found" for part in found.parts):
        return prepared
    program = replace(program, graph=found.graph, sources=apart(program.sources, found))
    return Prepared(program, ordered(program.graph, found.parts))


def apart(sources: Mapping[str, Source], found: Replaced) -> dict[str, Source]:
    """Return the sources of a program's inputs where found graphs read weights by themselves, and plain."""
    result = dict(sources)
    for value in {item.value for item in found.slices}:
        own = sorted((item for item in found.slices if item.value == value), key=lambda item: item.begin)
        whole = result.pop(value)
        for item, at in zip(own, whole.joined, strict=True):
            gemm = None if whole.gemm is None else replace(whole.gemm, n=item.rows)
            result[str(item)] = replace(whole, at=at, gemm=gemm, joined=())
    read = {value for part in found.parts if part.kind == "found" for _, value in part.roles}
    for value in read & result.keys():
        if result[value].dense:
            result[value] = replace(result[value], kind="argument", gemm=None, dense=False)
    return result


def simplified(program: Program, device: TileDevice) -> Program:
    """Return a program as it is partitioned: simplified, with parameters folded into weights."""
    plain = {n: s for n, s in program.sources.items() if s.kind == "argument" and s.at and s.graph is None}
    graph = simplify(program.graph, device, precise=program.precise)
    graph = graph if program.precise else split_reductions(graph, device)
    folded = fold(graph, () if program.precise else plain)
    program = with_parameters_computed(with_made(program, folded))
    program = with_own_results(program)
    graph = with_own_numbers(with_unsorted_rows(with_grouped_products(program.graph, device)))
    return replace(program, graph=with_own_bases(graph, updated_inputs(program, graph)))


def with_own_results(program: Program) -> Program:
    """Return a program that copies, before it writes an input, the results that only show that input."""
    graph = program.graph
    targets = {graph.outputs[at]: name for at, name in _targets(program).items()}
    written = set(targets.values())
    made: dict[str, Node] = {}
    for value in graph.outputs:
        shown = shown_by(graph, value)
        if shown in written and not (shown == value == targets.get(value)):
            attributes = (("arguments", (("%", 0),)), ("target", "aten.clone.default"))
            tile = replace(graph.tile(value), layout=None)
            name = f"own_{len(made)}_{value.replace('.', '_')}"
            made[value] = Node(name, "call", (value,), attributes, (tile,))
    if not made:
        return program
    outputs = tuple(made[value].name if value in made else value for value in graph.outputs)
    return replace(program, graph=replace(graph, nodes=(*graph.nodes, *made.values()), outputs=outputs))


def _targets(program: Program) -> dict[int, str]:
    """Return number of an output -> the input that takes it."""
    inputs = {s.at[0]: name for name, s in program.sources.items() if s.kind == "argument" and s.at}
    return {at: inputs[place] for place, at in program.updates if place in inputs}


def shown_by(graph: Graph, value: str) -> str:
    """Return the value in whose memory another one lies: itself, if it is no view."""
    while True:
        node = graph.producer(value)
        views = engine(node) == "view" or node.operator == "restride"
        views = views or (node.operator == "call" and _is_view(node))
        if not views:
            return value
        value = node.inputs[0]


def _is_view(node: Node) -> bool:
    """Say whether a call may give its first operand's memory."""
    target = str(dict(node.attributes)["target"])
    if is_onnx(target):
        return bool(node.inputs)
    schema = resolve(target)._schema
    return bool(node.inputs) and any(item.alias_info is not None for item in schema.returns)


def with_packed(program: Program, parts: Sequence[Subgraph]) -> Program:
    """Return a program whose plain weights of convolutions are packed where a kernel of ours reads them."""
    sources = dict(program.sources)
    for part in parts:
        if part.gemm is None:
            continue
        weight = part.by_role["B"]
        if sources[weight].graph is not None:
            sources[weight] = replace(sources[weight], kind="weight", gemm=part.gemm, dense=True)
    return replace(program, sources=sources)


def updated_inputs(program: Program, graph: Graph) -> dict[str, str]:
    """Return result of the graph -> the input that takes it."""
    return {graph.outputs[at]: name for at, name in _targets(program).items()}


# as data ---------------------------------------------------------------------------------------------


def to_data(prepared: Prepared) -> dict[str, Any] | None:
    """Return JSON-able data of which `from_data` makes an equal value; None where that cannot be.

    Parts are kept by the numbers of their nodes: their graphs are cut out of the whole again.
    """
    program = prepared.program
    if sum(tensor.nbytes for tensor in program.held) > MOST_HELD or not all(map(_is_plain, program.held)):
        return None  # notes are no place for weights
    gemms: dict[Gemm, int] = {}
    sources = {name: _fields(source, gemms) for name, source in program.sources.items()}
    rest = {f.name: getattr(program, f.name) for f in fields(program)}
    for name in ("graph", "sources", "held"):
        del rest[name]
    position = program.graph.positions
    parts = []
    for part in prepared.parts:
        computed = [node.name for node in part.graph.nodes if node.operator != "input"]
        members = [position[name] for name in computed if name in position]
        given = {**_fields(part, gemms), "graph": part.graph.name, "members": members}
        del given["inputs"]
        parts.append(given)
    data = {
        "graph": graph_to_data(program.graph),
        "program": rest,
        "sources": sources,
        "parts": parts,
        "gemms": [asdict(gemm) for gemm in gemms],
        "held": [_tensor_to_data(tensor) for tensor in program.held],
    }
    try:
        read = from_data(json.loads(json.dumps(data)))
    except (TypeError, ValueError, KeyError):
        return None  # something in it has no form in JSON
    return data if read == replace(prepared, parts=list(prepared.parts)) else None


def from_data(data: Mapping[str, Any]) -> Prepared:
    """Read back what `to_data` gave.

    Raises KeyError, IndexError, TypeError, ValueError, LadderError if the data are of another form.
    """
    graph = graph_from_data(data["graph"])
    gemms = [gemm_from_dict(given) for given in data["gemms"]]
    sources = {name: Source(**_restored(given, gemms)) for name, given in data["sources"].items()}
    rest = {name: as_tuple(value) for name, value in data["program"].items()}
    held = tuple(map(_tensor_from_data, data["held"]))
    program = Program(graph=graph, sources=sources, held=held, **rest)
    return Prepared(program, [_part(graph, given, gemms) for given in data["parts"]])


MOST_HELD = 4096
"""Bytes of a program's own tensors that are written among its data."""


def _is_plain(tensor: Any) -> bool:
    return type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.is_contiguous()


def _tensor_to_data(tensor: torch.Tensor) -> dict[str, Any]:
    content = tensor.detach().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []
    return {"type": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape], "bytes": content}


def _tensor_from_data(data: Mapping[str, Any]) -> torch.Tensor:
    content = torch.tensor(data["bytes"], dtype=torch.uint8)
    return content.view(getattr(torch, data["type"])).reshape(data["shape"])


def _part(graph: Graph, data: Mapping[str, Any], gemms: Sequence[Gemm]) -> Subgraph:
    given = _restored(data, gemms)
    members = {graph.nodes[at].name for at in given.pop("members")}
    given["graph"] = extract(graph, members, given["outputs"], given["graph"])
    return Subgraph(inputs=outside_inputs(graph, members), **given)


def _fields(value: Any, gemms: dict[Gemm, int]) -> dict[str, Any]:
    """Return the fields of a value, its problem by number."""
    given = {item.name: getattr(value, item.name) for item in fields(value)}
    if given["gemm"] is not None:
        given["gemm"] = gemms.setdefault(given["gemm"], len(gemms))
    if isinstance(given["graph"], Graph):
        given["graph"] = graph_to_data(given["graph"])
    return given


def _restored(data: Mapping[str, Any], gemms: Sequence[Gemm]) -> dict[str, Any]:
    given = {name: as_tuple(value) for name, value in data.items()}
    if isinstance(data["graph"], Mapping):
        given["graph"] = graph_from_data(data["graph"])
    if given["gemm"] is not None:
        given["gemm"] = gemms[given["gemm"]]
    return given
