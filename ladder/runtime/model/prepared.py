"""What a plan is made of, before kernels: an imported program, simplified, and its parts; kept on disk.

Import and partition depend on the graph and the device alone. So a new process that compiles a model again
reads the result (`ladder.runtime.cache` keeps it as a note) and imports, traces and partitions nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.ir.graph_data import as_tuple, graph_from_data, graph_to_data
from ladder.partition import Part, partition, simplify
from ladder.partition.parts import extract, outside_inputs
from ladder.runtime.model.program import Program, Source
from ladder.runtime.packed import gemm_from_dict

if TYPE_CHECKING:
    from targets import TileDevice


@dataclass(frozen=True)
class Prepared:
    """A program for one device.

    Parameters
    ----------
    program
        As imported, its graph simplified.
    parts
        Of its graph, in order.
    """

    program: Program
    parts: Sequence[Part]


def prepare(program: Program, device: TileDevice) -> Prepared:
    """Simplify and divide an imported program.

    Raises
    ------
    LadderError
        If a quantized product is none that a kernel computes.
    """
    graph = simplify(program.graph, device)
    packed = [name for name, source in program.sources.items() if source.kind in ("weight", "part")]
    updated = updated_inputs(program, graph)
    parts = partition(graph, packed, updated, side_by_side=device.is_gpu, device=device)
    return Prepared(replace(program, graph=graph), parts)


def updated_inputs(program: Program, graph: Graph) -> dict[str, str]:
    """Return result of the graph -> the input that takes it."""
    inputs = {s.at[0]: name for name, s in program.sources.items() if s.kind == "argument" and s.at}
    return {graph.outputs[at]: inputs[place] for place, at in program.updates if place in inputs}


# as data ---------------------------------------------------------------------------------------------


def to_data(prepared: Prepared) -> dict[str, Any] | None:
    """Return JSON-able data of which `from_data` makes an equal value; None where that cannot be.

    Parts are kept by the numbers of their nodes: their graphs are cut out of the whole again.
    """
    program = prepared.program
    if program.held:
        return None  # tensors of the program's own
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
    }
    try:
        read = from_data(json.loads(json.dumps(data)))
    except (TypeError, ValueError, KeyError):
        return None  # something in it has no form in JSON
    return data if read == replace(prepared, parts=list(prepared.parts)) else None


def from_data(data: Mapping[str, Any]) -> Prepared:
    """Read back what `to_data` gave.

    Raises
    ------
    KeyError, IndexError, TypeError, ValueError, LadderError
        If the data are of another form.
    """
    graph = graph_from_data(data["graph"])
    gemms = [gemm_from_dict(given) for given in data["gemms"]]
    sources = {name: Source(**_restored(given, gemms)) for name, given in data["sources"].items()}
    rest = {name: as_tuple(value) for name, value in data["program"].items()}
    program = Program(graph=graph, sources=sources, **rest)
    return Prepared(program, [_part(graph, given, gemms) for given in data["parts"]])


def _part(graph: Graph, data: Mapping[str, Any], gemms: Sequence[Gemm]) -> Part:
    given = _restored(data, gemms)
    members = {graph.nodes[at].name for at in given.pop("members")}
    given["graph"] = extract(graph, members, given["outputs"], given["graph"])
    return Part(inputs=outside_inputs(graph, members), **given)


def _fields(value: Any, gemms: dict[Gemm, int]) -> dict[str, Any]:
    """Return the fields of a value, its problem by number."""
    given = {item.name: getattr(value, item.name) for item in fields(value)}
    if given["gemm"] is not None:
        given["gemm"] = gemms.setdefault(given["gemm"], len(gemms))
    return given


def _restored(data: Mapping[str, Any], gemms: Sequence[Gemm]) -> dict[str, Any]:
    given = {name: as_tuple(value) for name, value in data.items()}
    if given["gemm"] is not None:
        given["gemm"] = gemms[given["gemm"]]
    return given
