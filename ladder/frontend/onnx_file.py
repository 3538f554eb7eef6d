"""Opening of ONNX models: errors of a file are reported here, before the import."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.defs

from ladder.frontend.onnx_check import check_model, check_size, external_bytes
from ladder.frontend.onnx_dialects import restated
from ladder.frontend.onnx_local import inlined
from ladder.frontend.onnx_scans import with_lean_loops, with_windows
from ladder.frontend.onnx_values import Known
from ladder.frontend.onnx_wide_codes import with_float_codes
from ladder.runtime.model.program import ImportRefused
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
