"""What the quantizers of transformers and diffusers share: settings, choice of layers, checkpoints' files."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ladder.api.linear import LINEAR_OPTIONS, Linear
from ladder.api.linear_modules import is_linear
from ladder.api.saved_settings import METHOD
from ladder.api.stored_weight import TYPES
from ladder.formats.checkpoint import Checkpoint, assign, load_checkpoint
from ladder.formats.files import Arrays, read_json, read_safetensors
from ladder.formats.folders import config_of
from ladder.formats.quanto import regrouped
from ladder.formats.torchao import Names
from tile_types import QuantizedTensor, TType
from tile_types.errors import CheckpointError, DTypeError, unknown_name

MOST_NAMED = 8
"""Tensors that an error names."""


QUANTIZE_OPTIONS = ("group_size", "block", "scale_type", "zero", "scaling", "granularity")
OPTIONS = (*QUANTIZE_OPTIONS, *LINEAR_OPTIONS)


class Settings:
    """How to quantize a model while it is loaded.

    weight: Type of the weights, or its name.
    modules_to_not_convert: Names of modules that stay as they are.
    **options: For `ladder.quantize` (``group_size``, ``zero``, ``scaling``, ...) and `ladder.Linear`
        (``activation``).
    Raises UnknownNameError for other options.
    Raises DTypeError if ``weight`` is no type or name, or ``modules_to_not_convert`` no list of names.
    """

    quant_method: str = METHOD

    def __init__(
        self, weight: str = "int4", *, modules_to_not_convert: list[str] | None = None, **options: Any
    ) -> None:
        options.pop("quant_method", None)
        if not isinstance(weight, str | TType):
            raise DTypeError(f"weight must be a type or its name, got {weight!r}")
        kept: Any = modules_to_not_convert
        if kept is not None and (isinstance(kept, str) or not all(isinstance(name, str) for name in kept)):
            raise DTypeError(f"modules_to_not_convert must be a list of names, got {kept!r}")
        for name in options:
            if name not in OPTIONS:
                raise unknown_name("option", name, OPTIONS)
        self.weight = weight
        self.modules_to_not_convert = modules_to_not_convert
        self.options = options

    def to_dict(self) -> dict[str, Any]:
        """Return what ``config.json`` holds."""
        kept = {"weight": self.weight, "modules_to_not_convert": self.modules_to_not_convert}
        return {"quant_method": METHOD, **kept, **self.options}

    def split(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the options of `ladder.quantize` and those of `ladder.Linear`."""
        ours = {name: value for name, value in self.options.items() if name in LINEAR_OPTIONS}
        return {name: value for name, value in self.options.items() if name not in ours}, ours

    def settle(self, given: Settings) -> None:
        """Take what is given for a model that was saved with these settings: options of layers, no others.

        Raises CheckpointError if its weights are said to be other than they are stored.
        """
        stored, wanted = self.to_dict(), given.to_dict()
        for name, value in wanted.items():
            if name in LINEAR_OPTIONS:
                self.options[name] = value
            elif value is not None and value != stored.get(name):
                raise CheckpointError(
                    f"the model was saved with {name} = {stored.get(name)!r}, {value!r} is asked for: load it"
                    " without a quantization_config, or quantize the model that it was made of"
                )

    @property
    def has_gradients(self) -> bool:
        """Tell whether linear layers have gradients for their inputs: those that quantize these have none."""
        return self.options.get("activation") in (None, *TYPES.values())


def settling(merge: Callable[..., Any]) -> Callable[..., Any]:
    """Return a library's function that joins a saved configuration and a given one, so that ours agree.

    Without it, the library warns that the given one is passed over.
    """

    def merged(stored: Any, given: Any) -> Any:
        found = merge(stored, given)
        if isinstance(given, Settings):
            if not isinstance(found, Settings):
                raise CheckpointError(
                    f"the model was saved with {type(found).__name__}, which is no {METHOD!r}"
                )
            found.settle(given)
        return found

    return merged


def linear_layers(model: torch.nn.Module, skipped: Iterable[str]) -> set[str]:
    """Return the names of linear layers but those that are, or lie within, the skipped ones."""
    names = {name for name, module in model.named_modules() if is_linear(module)}
    return {name for name in names if not is_within(name, skipped)}


def is_within(name: str, modules: Iterable[str]) -> bool:
    """Tell whether a module is one of some, or lies within one, by parts of its name."""
    return any(f".{part.strip('.')}." in f".{name}." for part in modules)


def opened(files: list[Path], folder: str = "", rename: Names | None = None) -> Checkpoint:
    """Open the files that a loader found for a model, by the index that names them if there are several.

    folder: Where the model lies, if it is a folder.
    rename: For `load_checkpoint`.
    Raises CheckpointError if there are none, one lies outside of the folder, no index names just them, or
        they cannot be read.
    """
    if not files:
        raise CheckpointError("a quantized model is loaded from files, none was found")
    for file in files if os.path.isdir(folder) else ():
        if not Path(os.path.abspath(file)).is_relative_to(os.path.abspath(folder)):
            raise CheckpointError(f"{folder}: its index names {file}, which lies outside of it")
    if len(files) == 1:
        return load_checkpoint(files[0], names=rename)
    names = {file.name for file in files}
    for index in sorted(files[0].parent.glob("*.index*.json")):
        shards = read_json(index).get("weight_map")
        if isinstance(shards, dict) and set(map(str, shards.values())) == names:
            return load_checkpoint(index, names=rename)
    raise CheckpointError(f"{files[0].parent}: no index names just {', '.join(sorted(names))}")


def require_unquantized(files: Iterable[str | os.PathLike[str]]) -> None:
    """Raise `CheckpointError` if weights that are to be quantized are codes already.

    Libraries pass over methods of quantization that they do not know, and read codes as if they were values.

    files: Of the model; those of safetensors are looked at, and the configuration beside them.
    """
    safe = [Path(file) for file in files if os.fspath(file).endswith(".safetensors")]
    if not safe:
        return
    read = [read_safetensors(file) for file in safe]
    arrays = Arrays(
        {name: stored for each in read for name, stored in each.items()},
        {key: text for each in read for key, text in each.metadata.items()},
    )
    folder = safe[0].parent
    try:
        layers, _ = assign(arrays, config_of(folder))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if layers:
        formats = ", ".join(sorted({form.name for form, _ in layers.values()}))
        raise CheckpointError(
            f"{folder}: its weights are quantized already ({formats}):"
            " load them as they are (load_pretrained), or quantize the model that they were made of"
        )


@dataclass(frozen=True, eq=False)
class StoredMatrix:
    """The weight of a layer in a checkpoint, read when the layer is made.

    name: Of the layer.
    extents: N and K of the layer; of experts, those of all of them below each other.
    checkpoint, sources: Where it is stored, and by which names.
    join: Makes the matrix of what is stored.
    """

    name: str
    extents: tuple[int, int]
    checkpoint: Checkpoint
    sources: Sequence[str]
    join: Callable[[list[Any]], QuantizedTensor]

    def read(self) -> QuantizedTensor:
        """Return the matrix, which may lie in the file.

        Raises CheckpointError if it is of other extents than the layer.
        """
        matrix = self.join([self.checkpoint[source] for source in self.sources])
        if any(self.checkpoint.layers[source][0].by_groups for source in self.sources):
            matrix = regrouped(matrix, self.extents)
        require_shape(self.name, self.extents, matrix)
        return matrix

    def settle(self, layer: Linear) -> None:
        """Let a layer that was made of it have memory of its own, and give the file's pages back."""
        files = self.checkpoint.files(self.sources)
        layer.keep_own(lambda tensor: any(file.holds(tensor) for file in files))
        self.checkpoint.release(self.sources)


def matrix_and(held: QuantizedTensor | StoredMatrix) -> tuple[QuantizedTensor, Callable[[Linear], None]]:
    """Return a matrix, and what is to be done with the layer that is made of it."""
    if isinstance(held, StoredMatrix):
        return held.read(), held.settle
    return held, lambda layer: None


def require_shape(name: str, extents: tuple[int, int], matrix: QuantizedTensor | torch.Tensor) -> None:
    """Raise `CheckpointError` unless a stored matrix ``[N, K]`` is the weight of a linear layer."""
    if tuple(matrix.shape) != extents:
        n, k = extents
        raise CheckpointError(
            f"{name}.weight has the shape {list(matrix.shape)},"
            f" the layer is in_features={k}, out_features={n}"
        )


def require_whole(where: str, model: torch.nn.Module, missing: Iterable[str]) -> None:
    """Raise `CheckpointError` that names the tensors of a model which its checkpoint lacks.

    where: The checkpoint.
    model: What was to be loaded.
    missing: Names of tensors that were neither found nor tied to one that was; they would hold random
        numbers.
    """
    names = sorted(missing)
    if names:
        named = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "")
        count = f"{len(names)} tensor{'s' if len(names) > 1 else ''}"
        raise CheckpointError(f"{where} lacks {count} of {type(model).__name__}: {named}")


def dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Return the type that a model of transformers computes in."""
    found: torch.dtype = getattr(getattr(model, "config", None), "dtype", None) or torch.get_default_dtype()
    return found


def require_computed(dtype: torch.dtype, layers: Iterable[str]) -> None:
    """Raise DTypeError, before weights are read, if layers would compute in a type that they do not have."""
    if dtype not in TYPES and (named := sorted(layers)):
        others = "" if len(named) == 1 else f" and {len(named) - 1} other layers"
        raise DTypeError(
            f"{named[0]}{others} would compute in {dtype}; quantized ones compute in"
            f" {', '.join(map(str, TYPES))}: load the model with one of these as `dtype`"
        )


def device_of(device_map: Mapping[str, Any] | None, name: str) -> torch.device:
    """Return where a module goes: what the longest prefix of its name in a map says, else the CPU."""
    fitting = [key for key in device_map or {} if not key or f"{name}.".startswith(f"{key}.")]
    if not fitting or device_map is None:
        return torch.device("cpu")
    return torch.device(device_map[max(fitting, key=len)])
