"""Whole models as files: plan, kernels and tensors in one archive that runs with no compiler present.

The archive is that of `ladder.runtime.artifact` with ``"kind": "model"`` in its manifest. What follows from
the graph and its parts (steps, tiles, lifetimes) is not stored but worked out again, and what refers to
something else is checked, so that a manifest cannot contradict itself.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.ir.parser import parse
from ladder.ir.printer import print_graph
from ladder.ir.verify import verify
from ladder.partition.subgraphs import KINDS, Subgraph
from ladder.runtime import artifact, tokens
from ladder.runtime.archive import MANIFEST
from ladder.runtime.compile import Request, obtain, target_of
from ladder.runtime.fields import EXTENT, NUMBER, OneOf, require
from ladder.runtime.model.bound_plan import BoundPlan
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.plan import ModelPlan, make_plan
from ladder.runtime.model.structure import require_structure, tensor_positions, tensors_taken
from ladder.runtime.model.whole import WholeModel
from ladder.runtime.packed import gemm_from_dict
from targets import get_device
from tile_types.errors import ArtifactError

STORED = "stored.safetensors"
KIND = "model"


def save_model(model: WholeModel, path: str | os.PathLike[str], sign: Any = None) -> Path:
    """Write a model, built for its device, to one file that `load_model` runs without a compiler.

    model: Any; its kernels are taken as they are.
    path: The file; replaced in one step if it exists.
    sign: An Ed25519 key that signs the file, see `ladder.runtime.signing`.
    Returns: The path.
    Raises ArtifactError if the file cannot be written.
    """
    if model.libraries is None:
        raise ArtifactError("this model was loaded from a file: copy that file")
    device = get_device(target_of(model.where))
    bound, plan = model.executable.bound, model.steps
    kernels, gemms, rows = _kernels(model, model.libraries)
    members = {f"{name}.so": data for name, data in kernels.items()}
    order, members[STORED] = _stored_bytes(_needed(model))
    content = {
        "kind": KIND,
        "torch": torch.__version__,
        "graph": print_graph(model.graph),
        "parts": [_to_json(step.part) for step in plan.steps],
        "steps": [step.entry for step in plan.steps],
        "bindings": bound.bindings,
        "packs": bound.packs,
        "sizes": bound.places,
        "results": bound.results,
        "updates": bound.updates,
        "parameters": dict(model.parameters),
        "returns": model.results,
        "limits": model.limits,
        "stored": order,
        "gemms": gemms,
        "token_kernels": rows,
        "entries": [name for name in kernels if name in bound.kernels],
    }
    return artifact.write_archive(Path(os.fspath(path)), device, content, members, sign)


def _needed(model: WholeModel) -> list[torch.Tensor | None]:
    """Return the tensors that a plan reads beyond those of a call, weights side by side as they are.

    Weights that only such arrays are made of are left out.
    """
    bound, count = model.executable.bound, tensors_taken(model.parameters)
    values = [None] * count + list(model.stored)
    joined = () if bound.joined is None else bound.joined.of(values)
    read = {*bound.bindings.values(), *(at for found in bound.packs.values() for at in found)}
    read |= {at for at, _ in bound.updates} | set(tensor_positions(model.results, len(bound.results)))
    stored = [value if at in read else None for at, value in enumerate(values)]
    return [*stored[count:], *joined]


def _kernels(
    model: WholeModel, libraries: Mapping[str, Path]
) -> tuple[dict[str, bytes], list[Any], list[Any]]:
    """Return kernel -> library; which serve the quantized products; and which quantize tokens."""
    found = {name: path.read_bytes() for name, path in libraries.items()}
    gemms, rows = [], []
    for text in _requests(model.steps):
        plan, kernels = obtain(Request.parse(text).on(model.where))
        found |= {kernel.entry: kernel.library.read_bytes() for kernel in kernels}
        entries = [kernel.entry for kernel in kernels]
        gemms.append({"request": text, "plan": str(plan), "entries": entries})
    for key, kernel in tokens.kernels_for(_token_calls(model.steps), model.where):
        found[kernel.entry] = kernel.library.read_bytes()
        rows.append({"key": key, "entry": kernel.entry})
    return found, gemms, rows


def _requests(plan: ModelPlan) -> list[str]:
    """Return what a plan's quantized products ask for, each once."""
    products = [step for step in plan.steps if step.part.kind == "gemm"]
    return list(
        dict.fromkeys(step.entry or Request(step.part.gemm).text for step in products if step.part.gemm)
    )


def _token_calls(plan: ModelPlan) -> list[tuple[str, str, int, int]]:
    """Return (type, activation, group, K) of the tokens that a plan quantizes."""
    found = []
    for step in plan.steps:
        for node in step.part.graph.nodes:
            given = dict(node.attributes)
            if given.get("target") != "ladder.quantize_tokens.default":
                continue
            tile, arguments = step.part.graph.tile(node.inputs[0]), given["arguments"]
            assert isinstance(arguments, tuple)  # what calls have
            group = arguments[2] if len(arguments) > 2 else 0
            found.append((tile.ttype.name, str(arguments[1]), int(str(group)), int(tile.shape[-1])))
    return found


def _stored_bytes(tensors: Sequence[torch.Tensor | None]) -> tuple[list[str], bytes]:
    """Return the name of every stored tensor, empty for none, and the file; one tensor is written once."""
    from safetensors.torch import save

    distinct = {id(tensor): tensor for tensor in tensors if tensor is not None}
    names = {key: f"t{at}" for at, key in enumerate(distinct)}
    written = {names[key]: tensor.detach().cpu().contiguous().clone() for key, tensor in distinct.items()}
    return ["" if tensor is None else names[id(tensor)] for tensor in tensors], bytes(save(written))


# parts as data ---------------------------------------------------------------------------------------


def _to_json(value: Any) -> Any:
    """Return a part as data: every field, graphs as text."""
    if isinstance(value, Graph):
        return print_graph(value)
    if isinstance(value, Gemm):
        return asdict(value)
    if isinstance(value, Subgraph):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    return value


def _part(data: Mapping[str, Any]) -> Subgraph:
    part = {name: _tuples(value) for name, value in data.items()}
    part["graph"] = parse(part["graph"])
    part["gemm"] = None if part["gemm"] is None else gemm_from_dict(part["gemm"])
    return Subgraph(**part)


def _tuples(value: Any) -> Any:
    """Return lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# loading ---------------------------------------------------------------------------------------------


TEXTS, POSITIONS = [str], {str: int}

PART = {
    "kind": str, "graph": str, "inputs": TEXTS, "outputs": TEXTS, "reason": str,
    "gemm": OneOf((None, {str: object})), "roles": [(str, str)], "found": str,
}  # fmt: skip

FORM = {
    "graph": str, "parts": [PART], "steps": TEXTS, "bindings": POSITIONS, "packs": {str: [int]},
    "sizes": {str: (int, int)}, "results": [OneOf((int, (OneOf((NUMBER, str, bool, None)),)))],
    "updates": [(int, int)], "parameters": {str: {str: object}}, "returns": {str: object},
    "limits": [(EXTENT, EXTENT)], "stored": TEXTS, "entries": TEXTS,
    "gemms": [{"request": str, "plan": str, "entries": TEXTS}],
    "token_kernels": [{"key": [OneOf((str, int, bool, None))], "entry": str}],
}  # fmt: skip
"""Fields of a model's manifest; see `ladder.runtime.fields`."""


def load_model(
    path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes], device: Any = None
) -> WholeModel:
    """Return the model of an archive whose members are verified.

    Raises ArtifactError if it does not fit this version of Ladder.
    """
    where = torch.empty(0, device=device or manifest["family"]).device
    if where.type != manifest["family"]:
        raise ArtifactError(f"{path} is for {manifest['device']}, it cannot run on {where}")
    with artifact.reading(path, STORED):
        tensors = _stored_tensors(members, where)
    with artifact.reading(path, MANIFEST):
        require(manifest, FORM, "manifest")
        stored = [tensors[name] if name else None for name in manifest["stored"]]
        graph, plan = _plan(manifest)
        _check_positions(manifest, graph, plan, stored)
        executable = _executable(manifest, plan, members, where)
        limits = tuple((a, b) for a, b in manifest["limits"])
        model = WholeModel(graph, executable, manifest["parameters"], manifest["returns"], stored, limits)
        model.prepare()
    return model


def _plan(manifest: Mapping[str, Any]) -> tuple[Graph, ModelPlan]:
    """Return the graph and the plan of its parts."""
    graph = parse(manifest["graph"])
    verify(graph)
    parts = [_part(data) for data in manifest["parts"]]
    if len(parts) != len(manifest["steps"]):
        raise ArtifactError(f"{len(manifest['steps'])} steps for {len(parts)} parts")
    known = {value for node in graph.inputs for value in node.values}
    for at, part in enumerate(parts):
        _check_part(graph, part, known, f"manifest.parts[{at}]")
        known |= set(part.outputs)
    if missing := set(graph.outputs) - known:
        raise ArtifactError(f"no part makes {', '.join(sorted(missing))}")
    entries = {at: entry for at, entry in enumerate(manifest["steps"]) if entry}
    return graph, make_plan(graph, parts, entries, manifest["family"])


def _check_part(graph: Graph, part: Subgraph, known: Collection[str], where: str) -> None:
    """Compare a part with the graph that it is cut out of."""
    verify(part.graph)
    if part.kind not in KINDS or (part.kind in ("gemm", "prologue")) != (part.gemm is not None):
        raise ArtifactError(f"{where} is of kind {part.kind!r:.40}")
    if unknown := [value for value in part.inputs if value not in known]:
        raise ArtifactError(f"{where} reads {', '.join(unknown)} before anything makes it")
    own = [value for node in part.graph.inputs for value in node.values]
    pairs = [*zip(own, part.inputs, strict=True), *zip(part.graph.outputs, part.outputs, strict=True)]
    for inner, outer in pairs:
        mine, theirs = part.graph.tile(inner), graph.tile(outer)
        if (mine.ttype, mine.shape) != (theirs.ttype, theirs.shape):
            raise ArtifactError(f"{where} has {mine} for {outer}, the graph has {theirs}")


def _check_positions(
    manifest: Mapping[str, Any], graph: Graph, plan: ModelPlan, stored: Sequence[torch.Tensor | None]
) -> None:
    """Check that every position names an argument, a stored tensor or a result that there is."""
    for name, form in {**manifest["parameters"], "what it returns": manifest["returns"]}.items():
        require_structure(form, name)
    taken = sorted(at for form in manifest["parameters"].values() for at in tensor_positions(form, 0))
    if taken != list(range(len(taken))):
        raise ArtifactError(f"parameters take the tensors {taken}")
    total, results, outputs = len(taken) + len(stored), len(manifest["results"]), len(plan.outputs)
    packed = [at for positions in manifest["packs"].values() for at in positions]
    updates = manifest["updates"]
    ranges = {
        "bindings": (manifest["bindings"].values(), total),
        "packs": (packed, total),
        "sizes": ([at for at, _ in manifest["sizes"].values()], total),
        "results": ([at for at in manifest["results"] if isinstance(at, int)], outputs),
        "updates": ([at for at, _ in updates], total),
        "updates' results": ([at for _, at in updates], outputs),
        "returns": (tensor_positions(manifest["returns"], 0), results + total),
    }
    for name, (positions, count) in ranges.items():
        if any(not 0 <= at < count for at in positions):
            raise ArtifactError(f"manifest.{name} goes beyond {count}")
    named, inputs = {*manifest["bindings"], *manifest["packs"]}, {node.name for node in graph.inputs}
    # What a quantized product takes beside its weight's name may be arrays of that weight.
    read = {value for step in plan.steps if step.part.gemm is None for value in step.part.inputs}
    if missing := (read | set(plan.outputs)) & inputs - named:
        raise ArtifactError(f"nothing gives the inputs {', '.join(sorted(missing))}")
    if unknown := named - inputs:
        raise ArtifactError(f"there are no inputs {', '.join(sorted(unknown))}")


def _executable(
    manifest: Mapping[str, Any], plan: ModelPlan, members: Mapping[str, bytes], where: torch.device
) -> Executable:
    load_entry = artifact.loader(members, manifest["family"])
    bound = BoundPlan(
        plan,
        manifest["bindings"],
        {name: tuple(at) for name, at in manifest["packs"].items()},
        {},
        _tuples(manifest["results"]),
        _tuples(manifest["updates"]),
        {name: load_entry(name) for name in manifest["entries"]},
        where,
        places={name: tuple(place) for name, place in manifest["sizes"].items()},
    )
    for item in manifest["gemms"]:
        gemm = Request.parse(item["request"]).gemm
        bound.operators[item["request"]] = artifact.operator_of(
            gemm, item["plan"], item["entries"], load_entry, manifest
        )
    for item in manifest["token_kernels"]:
        tokens.adopt(_tuples(item["key"]), load_entry(item["entry"]))
    return Executable(bound)


def _stored_tensors(members: Mapping[str, bytes], where: torch.device) -> dict[str, torch.Tensor]:
    from safetensors.torch import load

    if STORED not in members:
        raise ArtifactError("it is missing")
    return {name: tensor.to(where) for name, tensor in load(members[STORED]).items()}
