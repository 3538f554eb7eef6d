"""Opening of ONNX models: errors of a file are reported here, before the import."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs
import onnx.inliner

from ladder.frontend.onnx_check import check_model, check_size, external_bytes, nodes_of
from ladder.frontend.onnx_dialects import restated
from ladder.frontend.onnx_scans import with_lean_loops, with_windows
from ladder.frontend.onnx_values import Known
from ladder.frontend.onnx_wide_codes import with_float_codes
from ladder.runtime.model.program import ImportRefused
from ladder.runtime.onnx_ops.evaluate import schema_of, version_of, versions_of
from tile_types.errors import ArtifactError

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
    try:
        found = onnx.inliner.inline_local_functions(_restated(model))
    except Exception as error:  # of the C++ library
        raise ImportRefused(f"{title}: its functions cannot be inlined: {error}") from error
    if found.functions:
        raise ImportRefused(f"{title}: {_left(found.functions[0], versions_of(found))}")
    return found


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
