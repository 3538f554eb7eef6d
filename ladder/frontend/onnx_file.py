"""Opening of ONNX models: errors of a file are reported here, before the import.

What exporters and optimizers write in ways of their own is restated as the standard has it. onnxruntime's
optimizer appends the nodes that it fuses, so that nodes stand after those that read them; it writes norms as
operators of ONNX's domain before ONNX had them; some tools name that domain ``ai.onnx``, leave out the
versions of the domains that they use, or the graph's name, write -1 for an open extent, leave the channels of
pictures open though a stored kernel says how many there are, or leave nodes without results.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.inliner

from ladder.frontend.onnx_check import (
    MOST_NODES,
    check_model,
    check_size,
    external_bytes,
    graphs_of,
    nodes_of,
)
from ladder.frontend.onnx_scans import with_lean_loops, with_windows
from ladder.frontend.onnx_sizes import give_names, own_names, stated
from ladder.frontend.onnx_stages import names_read
from ladder.frontend.onnx_values import Known
from ladder.frontend.onnx_wide_codes import with_float_codes
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.evaluate import schema_of, version_of, versions_of
from tile_types.errors import ArtifactError

MICROSOFT = "com.microsoft"
"""Domain of onnxruntime's own operators."""

UNSTATED = {MICROSOFT: 1, "ai.onnx.ml": 1}
"""Domains of which onnxruntime takes this version where a model uses them and states none."""

BEFORE: Mapping[str, int] = {
    "LayerNormalization": 17, "SimplifiedLayerNormalization": 1 << 31, "ThresholdedRelu": 10,
}  # fmt: skip
"""Operators that onnxruntime has in ONNX's domain -> the version from which on they are the standard's."""


def restated(model: Any) -> Any:
    """Return a model without functions as the standard has it; the same object where nothing is to do."""
    found = model
    for applies, change in CHANGES:
        if applies(found):
            if found is model:
                found = onnx.ModelProto()
                found.CopyFrom(model)
            change(found)
    return found


# open extents ------------------------------------------------------------------------------------------


NOTHING_KNOWN = {"none", "null", "unk", "unknown", "undefined", "n/a"}
"""What tools write for extents of which they know nothing, beside "?" and the like: these may differ."""


def _open(model: Any) -> list[Any]:
    """Return the extents that are stated as -1, or by a name that says nothing."""
    infos = [info for graph in graphs_of(model.graph) for info in stated(graph)]
    dims = [dim for info in infos for dim in info.type.tensor_type.shape.dim]
    return [dim for dim in dims if dim.dim_value == -1 or (dim.dim_param and _says_nothing(dim.dim_param))]


def _says_nothing(name: str) -> bool:
    return name.lower() in NOTHING_KNOWN or not any(map(str.isalpha, name))


def _leave_open(model: Any) -> None:
    for dim in _open(model):
        dim.Clear()


def _channels(model: Any) -> list[tuple[Any, int]]:
    """Return open channels of inputs that a convolution reads, and how many its stored kernel takes."""
    graph = model.graph
    kernels = {tensor.name: tensor.dims for tensor in graph.initializer}
    inputs = {info.name: info.type.tensor_type.shape.dim for info in graph.input}
    found = []
    for node in graph.node:
        if node.op_type != "Conv" or node.domain or node.input[1] not in kernels:
            continue
        dims, kernel = inputs.get(node.input[0], ()), kernels[node.input[1]]
        if len(dims) == len(kernel) and not dims[1].HasField("dim_value"):
            groups = next((each.i for each in node.attribute if each.name == "group"), 1)
            found.append((dims[1], kernel[1] * groups))
    return found


def _count(model: Any) -> None:
    dims = [dim for info in stated(model.graph) for dim in info.type.tensor_type.shape.dim]
    for channels, count in _channels(model):
        name = channels.dim_param
        for dim in [channels, *(dim for dim in dims if name and dim.dim_param == name)]:
            dim.dim_value = count


# domains -----------------------------------------------------------------------------------------------


def _spelled_out(model: Any) -> list[Any]:
    """Return what names ONNX's domain in full."""
    return [item for item in (*model.opset_import, *nodes_of(model.graph)) if item.domain == "ai.onnx"]


def _shorten(model: Any) -> None:
    for item in _spelled_out(model):
        item.domain = ""
    stated = {entry.domain: entry.version for entry in reversed(model.opset_import)}
    del model.opset_import[:]
    model.opset_import.extend(onnx.helper.make_opsetid(*pair) for pair in reversed(stated.items()))


def _unstated(model: Any) -> list[str]:
    """Return the domains that nodes are of and no version is stated of."""
    used = {node.domain for node in nodes_of(model.graph)}
    return [domain for domain in UNSTATED if domain in used and domain not in versions_of(model)]


def _state(model: Any) -> None:
    model.opset_import.extend(
        onnx.helper.make_opsetid(domain, UNSTATED[domain]) for domain in _unstated(model)
    )


def _own(model: Any) -> list[Any]:
    """Return the nodes whose operator is onnxruntime's in ONNX's domain."""
    version = versions_of(model).get("", 0)
    return [n for n in nodes_of(model.graph) if not n.domain and version < BEFORE.get(n.op_type, 0)]


def _rename(model: Any) -> None:
    for node in _own(model):
        node.domain = MICROSOFT


def _idle(model: Any) -> list[Any]:
    """Return the graphs that have nodes without results."""
    return [graph for graph in graphs_of(model.graph) if not all(any(node.output) for node in graph.node)]


def _drop(model: Any) -> None:
    for graph in reversed(_idle(model)):  # inner ones first: nodes are replaced with the graphs in them
        _replace(graph, [node for node in graph.node if any(node.output)])


def _replace(graph: Any, nodes: list[Any]) -> None:
    kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(kept)


# order -------------------------------------------------------------------------------------------------


def _out_of_order(model: Any) -> list[Any]:
    """Return the graphs in which a node stands before one that makes what it reads."""
    return [
        graph for graph in graphs_of(model.graph) if any(maker >= reader for maker, reader in _edges(graph))
    ]


def _edges(graph: Any) -> Iterator[tuple[int, int]]:
    """Yield the places of nodes and of those that read their results."""
    made = {name: at for at, node in enumerate(graph.node) for name in node.output if name}
    for at, node in enumerate(graph.node):
        yield from ((made[name], at) for name in names_read(node) if name in made)


def _sort(model: Any) -> None:
    for graph in reversed(_out_of_order(model)):
        _sort_graph(graph)


def _sort_graph(graph: Any) -> None:
    """Put each node behind those that it reads from, else as they stand; a ring stays as it is."""
    readers: dict[int, list[int]] = {}
    missing = [0] * len(graph.node)
    for maker, reader in set(_edges(graph)):
        readers.setdefault(maker, []).append(reader)
        missing[reader] += 1
    ready = [at for at, count in enumerate(missing) if not count]
    heapify(ready)
    order: list[int] = []
    while ready:
        order.append(heappop(ready))
        for reader in readers.get(order[-1], ()):
            missing[reader] -= 1
            if not missing[reader]:
                heappush(ready, reader)
    if len(order) == len(graph.node):
        _replace(graph, [graph.node[at] for at in order])


def _name(model: Any) -> None:
    model.graph.name = "graph"


CHANGES: tuple[tuple[Callable[[Any], Any], Callable[[Any], None]], ...] = (
    (lambda model: not model.graph.name, _name),
    (_open, _leave_open),
    (own_names, give_names),
    (_channels, _count),
    (_spelled_out, _shorten),
    (_own, _rename),
    (_unstated, _state),
    (_idle, _drop),
    (_out_of_order, _sort),
)
"""What tells whether a model needs a change -> what changes it, in this order."""


OPSETS = range(1, onnx.defs.onnx_opset_version() + 1)
"""Versions of ONNX's own operators that are known: all of the installed package."""

DOMAIN = "ladder"
"""Domain of operators that are rows of the tile graph's table."""

LIMITS, VALUES = "ladder.limits", "ladder.values"
"""Keys of the sizes' limits, and of the values of types that do not ship, among a model's properties."""


@dataclass(frozen=True)
class OnnxFile:
    """A model and where its external data lies.

    model: The protocol buffer; external data is not loaded.
    folder: Of the file; empty for a model in memory.
    title: For messages.
    """

    model: Any
    folder: str
    title: str

    def array(self, tensor: Any) -> Known:
        """Return a stored tensor.

        Raises ArtifactError if its external data is missing, too short or elsewhere, or its data do not fit
            its shape.
        """
        if tensor.external_data:
            data = external_bytes(tensor, self.folder, self.title)
            tensor = onnx.TensorProto(
                name=tensor.name, dims=tensor.dims, data_type=tensor.data_type, raw_data=data
            )
        try:
            found = onnx.numpy_helper.to_array(tensor)
        except Exception as error:  # of many classes: sizes, types, encodings
            raise ArtifactError(
                f"{self.title}: the data of {tensor.name!r} cannot be read: {error}; export the model again"
            ) from error
        found = np.asarray(found)
        return Known(found.astype(object), text=True) if found.dtype.kind in "OUS" else Known(found)


def open_onnx(source: str | os.PathLike[str] | Any) -> OnnxFile:
    """Open a file, or take a model that is in memory.

    source: Path, `onnx.ModelProto`, or what this returned.
    Raises ArtifactError if the file does not exist, is truncated, or no ONNX model.
    Raises ImportRefused if it uses versions of operators that are not known here.
    """
    if isinstance(source, OnnxFile):
        return source
    if isinstance(source, onnx.ModelProto):
        return _checked(OnnxFile(source, "", "the model"))
    path = Path(os.fspath(source))
    check_size(path)
    try:
        model = onnx.load(str(path), load_external_data=False)
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist") from error
    except Exception as error:  # protobuf's errors have no common public class
        raise ArtifactError(
            f"{path} is truncated or no ONNX model ({error}); export it again or copy it again"
        ) from error
    return _checked(OnnxFile(model, str(path.resolve().parent), str(path)))


def _checked(file: OnnxFile) -> OnnxFile:
    versions = {entry.domain: entry.version for entry in file.model.opset_import}
    if not file.model.HasField("graph") or not versions:
        what = "no graph" if versions else "no version of operators"
        raise ArtifactError(f"{file.title} is truncated or no ONNX model: it states {what}; export it again")
    _check_versions(file.title, versions)
    if file.model.functions:
        file = OnnxFile(inlined(file.model, file.title), file.folder, file.title)
    file = OnnxFile(restated(file.model), file.folder, file.title)
    check_model(file.model, file.title)
    lean = with_lean_loops(with_windows(file.model))
    return OnnxFile(with_float_codes(lean), file.folder, file.title)


def _check_versions(title: str, versions: Mapping[str, int]) -> None:
    version = versions.get("", versions.get("ai.onnx", OPSETS[-1]))
    if version not in OPSETS:
        raise ImportRefused(
            f"{title} uses opset {version}, opsets {OPSETS[0]} to {OPSETS[-1]} are known here (onnx"
            f" {onnx.__version__}); export it for one of them, or install a newer onnx"
        )
    if versions.get(DOMAIN, 1) != 1:
        raise ImportRefused(
            f"{title} uses version {versions[DOMAIN]} of Ladder's operators; version 1 is known here"
        )


def inlined(model: Any, title: str) -> Any:
    """Return a model without functions.

    ONNX's inliner leaves a function that states other versions of operators than the model: versions in which
    none of the operators that are used changed count as the same.

    title: For messages.
    Raises ImportRefused if functions are left; it names one, and what changed between the versions.
    """
    _require_few(model, title)
    try:
        found = onnx.inliner.inline_local_functions(_restated(model))
    except Exception as error:  # of the C++ library
        raise ImportRefused(f"{title}: its functions cannot be inlined: {error}") from error
    if found.functions:
        raise ImportRefused(f"{title}: {_left(found.functions[0], versions_of(found))}")
    return found


def _require_few(model: Any, title: str) -> None:
    """Raise ImportRefused if a model's functions stand for more nodes than a model may have.

    Those that call themselves are left to the inliner, which names them.
    """
    bodies = {(f.domain, f.name, f.overload): list(nodes_of(f)) for f in model.functions}
    counts: dict[Any, int] = {}

    def count(nodes: list[Any]) -> int:
        return sum(counts.get((node.domain, node.op_type, node.overload), 1) for node in nodes)

    for _ in bodies:  # a turn is right of those that call what the turn before was right of
        before, counts = counts, {key: count(nodes) for key, nodes in bodies.items()}
        total = count(list(nodes_of(model.graph)))
        if total > MOST_NODES:
            raise ImportRefused(
                f"{title} has {total} nodes with those of its functions, at most {MOST_NODES} are imported"
            )
        if counts == before:
            break


def _restated(model: Any) -> Any:
    """Return the model with one version per domain, its functions' too, where that changes nothing."""
    scopes = [(versions_of(model), list(nodes_of(model.graph)))]
    scopes += [(versions_of(function), list(nodes_of(function))) for function in model.functions]
    domains = sorted({domain for versions, _ in scopes for domain in versions})
    chosen = {domain: _common(domain, scopes) for domain in domains}
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for holder in (copy, *copy.functions):
        for entry in holder.opset_import:
            entry.version = chosen[entry.domain] or entry.version
    _give_defaults(copy)
    return copy


def _give_defaults(model: Any) -> None:
    """Write the defaults of functions' attributes into calls without them: the inliner does not."""
    defaults = {
        (f.domain, f.name, f.overload): f.attribute_proto for f in model.functions if f.attribute_proto
    }
    if not defaults:
        return
    for holder in (model.graph, *model.functions):
        for node in nodes_of(holder):
            given = {attribute.name for attribute in node.attribute}
            missing = defaults.get((node.domain, node.op_type, node.overload), ())
            node.attribute.extend(default for default in missing if default.name not in given)


def _common(domain: str, scopes: Sequence[tuple[Mapping[str, int], list[Any]]]) -> int | None:
    """Return a version in which all operators of a domain are as in their own; None if there is none."""
    stated = [versions[domain] for versions, _ in scopes if domain in versions]
    for version in dict.fromkeys((stated[0], *sorted(stated, reverse=True))):
        if not any(_changed(domain, nodes, versions, version) for versions, nodes in scopes):
            return version
    return None


def _changed(domain: str, nodes: list[Any], versions: Mapping[str, int], other: int) -> list[str]:
    """Return the operators of nodes that another version of a domain defines in another way."""
    names = {node.op_type for node in nodes if _same_domain(node.domain, domain)}
    own = version_of(domain, versions)
    return sorted(name for name in names if _since(domain, name, own) != _since(domain, name, other))


def _same_domain(a: str, b: str) -> bool:
    return ("" if a == "ai.onnx" else a) == ("" if b == "ai.onnx" else b)


def _since(domain: str, name: str, version: int) -> int | None:
    """Return the version that a definition is of."""
    schema = schema_of(domain, name, version)
    return None if schema is None else int(schema.since_version)


def _left(function: Any, versions: Mapping[str, int]) -> str:
    """Return why a function was not inlined."""
    for entry in function.opset_import:
        version = version_of(entry.domain, versions)
        changed = _changed(entry.domain, list(nodes_of(function)), versions_of(function), version)
        if changed:
            return (
                f"its function {function.name!r} is written for version {entry.version} of"
                f" {entry.domain or 'ai.onnx'}, the model for {version}, and {', '.join(changed)} changed"
                " between them; export both for one version"
            )
    return f"its function {function.name!r} cannot be inlined: it calls itself or what cannot be inlined"
