"""Whole models as files: plan, kernels and tensors in one archive that runs with no compiler present.

The archive is the one of `ladder.runtime.artifact` with ``"kind": "model"`` in its manifest: an uncompressed
zip of the manifest, the kernel libraries and the tensors (safetensors), each with its digest.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from ladder.ir.gemm import Gemm
from ladder.ir.graph import Graph
from ladder.ir.parser import parse
from ladder.ir.printer import print_graph
from ladder.partition.parts import Part
from ladder.runtime import artifact, library, tokens
from ladder.runtime.compile import Request, obtain, target_of
from ladder.runtime.kernel import CompiledGemm
from ladder.runtime.model.executable import Executable
from ladder.runtime.model.plan import Plan, Step
from ladder.runtime.model.structure import SEQUENCES, Structure
from ladder.runtime.model.whole import WholeModel
from ladder.runtime.packed import gemm_from_dict
from schedules.schedule import parse_plan
from tile_types.errors import ArtifactError, LadderError
from tile_types.library import get_type
from tile_types.tile import Tile

STORED = "stored.safetensors"
KIND = "model"


def save_model(model: WholeModel, path: str | os.PathLike[str]) -> Path:
    """Write a model, built for its device, to one file that `load_model` runs without a compiler.

    Parameters
    ----------
    model
        Any; its kernels are taken as they are.
    path
        The file; replaced in one step if it exists.

    Returns
    -------
    The path.

    Raises
    ------
    ArtifactError
        If the file cannot be written.
    """
    from targets import get_device

    if model.libraries is None:
        raise ArtifactError("this model was loaded from a file: copy that file")
    device = get_device(target_of(model.where))
    executable, plan = model.executable, model.steps
    kernels, gemms, rows = _kernels(model, model.libraries)
    members = {f"{name}.so": data for name, data in kernels.items()}
    order, members[STORED] = _stored_bytes(_needed(model))
    content = {
        "kind": KIND,
        "torch": torch.__version__,
        "graph": print_graph(model.graph),
        "plan": _plan_to_json(plan),
        "bindings": executable.bindings,
        "packs": executable.packs,
        "sizes": executable.places,
        "results": executable.results,
        "updates": executable.updates,
        "parameters": dict(model.parameters),
        "returns": model.results,
        "limits": model.limits,
        "stored": order,
        "gemms": gemms,
        "token_kernels": rows,
        "entries": [name for name in kernels if name in executable.kernels],
    }
    return artifact.write_archive(Path(os.fspath(path)), device, content, members)


def _needed(model: WholeModel) -> list[torch.Tensor | None]:
    """Return the tensors that a plan reads beyond those of a call, weights side by side as they are.

    Weights that only such arrays are made of are left out.
    """
    executable, count = model.executable, _count(model.parameters)
    values = [None] * count + list(model.stored)
    joined = () if executable.joined is None else executable.joined.of(values)
    read = {*executable.bindings.values(), *(at for found in executable.packs.values() for at in found)}
    read |= {at for at, _ in executable.updates} | set(_positions(model.results, len(executable.results)))
    stored = [value if at in read else None for at, value in enumerate(values)]
    return [*stored[count:], *joined]


def _count(parameters: Mapping[str, Structure]) -> int:
    """Return how many tensors a call takes."""
    return sum(len(_positions(structure, 0)) for structure in parameters.values())


def _positions(structure: Structure, first: int) -> list[int]:
    """Return the positions of tensors in a structure, from ``first`` on and counted from there."""
    ((kind, held),) = structure.items()
    if kind == "tensor":
        return [held - first] if held >= first else []
    items = held.values() if kind == "dict" else held if kind in SEQUENCES else ()
    return [position for item in items for position in _positions(item, first)]


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


def _requests(plan: Plan) -> list[str]:
    """Return what a plan's quantized products ask for, each once."""
    products = [step for step in plan.steps if step.part.gemm is not None]
    return list(
        dict.fromkeys(step.entry or Request(step.part.gemm).text for step in products if step.part.gemm)
    )


def _token_calls(plan: Plan) -> list[tuple[str, str, int, int]]:
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


# plans as data ---------------------------------------------------------------------------------------


def _plan_to_json(plan: Plan) -> dict[str, Any]:
    tiles = {value: [tile.ttype.name, list(tile.shape), tile.level] for value, tile in plan.tiles.items()}
    rest = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {**rest, "steps": [_to_json(step) for step in plan.steps], "tiles": tiles}


def _plan_from_json(data: Mapping[str, Any]) -> Plan:
    tiles = {
        value: Tile(get_type(ttype), tuple(shape), level)
        for value, (ttype, shape, level) in data["tiles"].items()
    }
    steps = tuple(_step(step) for step in data["steps"])
    return Plan(**{**{name: _tuples(value) for name, value in data.items()}, "steps": steps, "tiles": tiles})


def _to_json(value: Any) -> Any:
    """Return a step or a part as data: every field, graphs as text."""
    if isinstance(value, Graph):
        return print_graph(value)
    if isinstance(value, Gemm):
        return asdict(value)
    if isinstance(value, Step | Part):
        return {field.name: _to_json(getattr(value, field.name)) for field in fields(value)}
    return value


def _step(data: Mapping[str, Any]) -> Step:
    given = {name: _tuples(value) for name, value in data.items() if name != "part"}
    part = {name: _tuples(value) for name, value in data["part"].items()}
    part["graph"] = parse(part["graph"])
    part["gemm"] = None if part["gemm"] is None else gemm_from_dict(part["gemm"])
    return Step(Part(**part), **given)


def _tuples(value: Any) -> Any:
    """Return lists as the tuples that they were."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


# loading ---------------------------------------------------------------------------------------------


def load_model(
    path: Path, manifest: Mapping[str, Any], members: Mapping[str, bytes], device: Any = None
) -> WholeModel:
    """Return the model of an archive whose members are verified.

    Raises
    ------
    ArtifactError
        If it does not fit this version of Ladder.
    """
    where = torch.empty(0, device=device or manifest["family"]).device
    if where.type != manifest["family"]:
        raise ArtifactError(f"{path} is for {manifest['device']}, it cannot run on {where}")
    try:
        entries = _loaded(manifest, members)
        executable = _executable(manifest, entries, where)
        stored = _stored_tensors(manifest, members[STORED], where)
        graph = parse(manifest["graph"])
        limits = tuple((a, b) for a, b in manifest["limits"])
    except (KeyError, TypeError, AttributeError, ValueError, LadderError) as error:
        raise ArtifactError(
            f"{path} does not fit this version of Ladder: {error}; export it again"
        ) from error
    return WholeModel(graph, executable, manifest["parameters"], manifest["returns"], stored, limits)


def _loaded(manifest: Mapping[str, Any], members: Mapping[str, bytes]) -> dict[str, Any]:
    """Load every kernel library; the files are not needed after that."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="ladder-") as folder:
        for name in members:
            if name.endswith(".so"):
                shared = Path(folder) / name
                shared.write_bytes(members[name])
                entry = name.removesuffix(".so")
                found[entry] = library.load_module(shared, manifest["family"])[entry]
    return found


def _executable(manifest: Mapping[str, Any], entries: Mapping[str, Any], where: torch.device) -> Executable:
    executable = Executable(
        _plan_from_json(manifest["plan"]),
        manifest["bindings"],
        {name: tuple(at) for name, at in manifest["packs"].items()},
        {},
        _tuples(manifest["results"]),
        _tuples(manifest["updates"]),
        {name: entries[name] for name in manifest["entries"]},
        where,
        places={name: tuple(place) for name, place in manifest["sizes"].items()},
    )
    for item in manifest["gemms"]:
        gemm = Request.parse(item["request"]).gemm
        limits = [limit for limit, _ in parse_plan(item["plan"]).entries]
        names = item["entries"]
        executable.operators[item["request"]] = CompiledGemm(
            gemm, manifest["family"], limits, [entries[name] for name in names], names
        )
    for item in manifest["token_kernels"]:
        tokens.adopt(_tuples(item["key"]), entries[item["entry"]])
    return executable


def _stored_tensors(
    manifest: Mapping[str, Any], data: bytes, where: torch.device
) -> list[torch.Tensor | None]:
    from safetensors.torch import load

    tensors = {name: tensor.to(where) for name, tensor in load(data).items()}
    return [tensors[name] if name else None for name in manifest["stored"]]
