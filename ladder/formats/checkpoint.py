"""`load_checkpoint`: a file or folder of another tool as a mapping from names to tensors."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ladder.formats import (
    awq,
    bitnet,
    bitsandbytes,
    blocks,
    comfy,
    compressed,
    gemma,
    gptq,
    gptqmodel,
    hqq,
    mlx,
    modelopt,
    native,
    quanto,
    quark,
    sdnq,
    torchao,
)
from ladder.formats.beside import (
    CODE_NAMES,
    HARMLESS,
    INTEGERS,
    UNREAD,
    by_module,
    require_no_transforms,
    require_nothing_else,
    scaled_by,
)
from ladder.formats.files import Arrays, MappedFile, Stored, require
from ladder.formats.folders import METHOD, arrays_of, config_of, file_of
from ladder.formats.gguf import read_gguf
from ladder.formats.layer import GENERIC, SCALES, Format, Layer, Loaded, Rule, Shape
from ladder.runtime.threads import kernels_alone
from tile_types.errors import (
    CacheError,
    CheckpointError,
    CompilerError,
    LadderError,
    MissingToolError,
    TypeValuesError,
    path_of,
)

if TYPE_CHECKING:
    import torch

    from tile_types import QuantizedTensor

FORMATS = (
    gptq.FORMAT,
    awq.FAST,
    awq.GEMM,
    awq.GEMV,
    compressed.PACKED,
    compressed.MX,
    compressed.NVFP4,
    *comfy.FORMATS,
    *gemma.FORMATS,
    *quark.FORMATS,
    *quanto.FORMATS,
    sdnq.FORMAT,
    modelopt.NVFP4,
    modelopt.MXFP4,
    modelopt.INT4,
    *blocks.FP8,
    compressed.EIGHT,
    blocks.MXFP4,
    bitsandbytes.FOUR,
    bitsandbytes.EIGHT,
    *gptqmodel.FORMATS,
    hqq.FORMAT,
    mlx.FORMAT,
    bitnet.FORMAT,
    torchao.FORMAT,
    torchao.TILES,
    native.FORMAT,
)
"""In the order in which they are tried."""

DAMAGE = (LadderError, ValueError, TypeError, KeyError, IndexError, RuntimeError, OverflowError, MemoryError)
"""Exceptions of a contradiction that no check foresaw."""


T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """Description of a tensor, known without reading it.

    name: Of the tensor.
    format: Name of the format that it is stored in; empty if it is not quantized.
    shape: In elements.
    nbytes: In the file, scales included.
    dtype: torch's name of the element type of a tensor that is not quantized.
    """

    name: str
    format: str
    shape: Shape
    nbytes: int
    dtype: str = ""


@dataclass(frozen=True, eq=False)
class Checkpoint(Mapping[str, "Loaded"]):
    """Tensors by name, read when they are asked for.

    A quantized one is a `QuantizedTensor` (a tuple of them for stacked experts), bit for bit what the tool
    stored; the others are tensors that share the file's mapped memory. The file must not change meanwhile.

    Parameters
    ----------
    path
        Where it lies.
    layers
        Format and arrays of each quantized tensor.
    plain
        The other tensors.
    config
        What the checkpoint says of its quantization.
    metadata
        What else the files say.
    """

    path: Path
    layers: Mapping[str, tuple[Format, Layer]]
    plain: Mapping[str, Stored]
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.layers) + len(self.plain)

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        yield from self.layers
        yield from self.plain

    def __contains__(self, name: object) -> bool:
        """Tell whether there is a tensor of that name, without reading it."""
        return name in self.layers or name in self.plain

    def __getitem__(self, name: str) -> Loaded:
        """Read a tensor.

        Raises KeyError if there is none of that name.
        Raises CheckpointError if its arrays contradict each other.
        """
        import torch

        # The default device may be meta while a model is built.
        with torch.device("cpu"), kernels_alone():
            if name in self.layers:
                form, layer = self.layers[name]
                return self._guarded(name, lambda: form.read(layer))
            return self._guarded(name, self.plain[name].tensor)

    def files(self, names: Iterable[str]) -> set[MappedFile]:
        """Return the files that the arrays of some quantized tensors lie in."""
        return {part.file for part in self._parts(names)}

    def release(self, names: Iterable[str]) -> None:
        """Give the memory back that pages of some quantized tensors take, of which no array is used now."""
        for part in self._parts(names):
            part.file.release(part.begin, part.nbytes)

    def _parts(self, names: Iterable[str]) -> list[Stored]:
        parts = [part for name in names for part in self.layers[name][1].parts.values()]
        return [part for part in parts if isinstance(part, Stored)]

    def entry(self, name: str) -> Entry:
        """Describe a tensor from the headers alone."""
        if name in self.plain:
            stored = self.plain[name]
            return Entry(name, "", stored.shape, stored.nbytes, stored.dtype)
        form, layer = self.layers[name]
        shape = self._guarded(name, lambda: form.shape(layer))
        return Entry(name, form.name, shape, sum(part.nbytes for part in layer.parts.values()))

    def entries(self) -> Iterator[Entry]:
        return (self.entry(name) for name in self)

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the formats that occur."""
        return tuple(sorted({form.name for form, _ in self.layers.values()}))

    def dequantize(self, name: str, dtype: Any = None) -> torch.Tensor:
        """Return a tensor's values as the tool's own dequantization rounds them.

        name: Of the tensor. Stacked experts give ``[E, N, K]``.
        dtype: torch's type of the result, to which the tool's is converted; by default the tool's.
        """
        import torch

        loaded = self[name]
        if isinstance(loaded, torch.Tensor):
            return loaded if dtype is None else loaded.to(dtype)
        matrices = loaded if isinstance(loaded, tuple) else (loaded,)
        values = self._guarded(name, lambda: [_as_tool(self.rule(name), matrix) for matrix in matrices])
        result = (torch.stack(values) if len(values) > 1 else values[0]).view(self.entry(name).shape)
        return result if dtype is None else result.to(dtype)

    def rule(self, name: str) -> Rule:
        """Return how the tool itself dequantizes a quantized tensor."""
        form, layer = self.layers[name]
        return form.rule(layer)

    def _guarded(self, name: str, read: Callable[[], T]) -> T:
        """Read, and give what damage raises as one error."""
        try:
            return read()
        except (MissingToolError, CompilerError, CacheError):
            raise  # what takes codes apart could not be built: nothing is wrong with the file
        except (CheckpointError, TypeValuesError) as error:
            text = str(error) if name in str(error) else f"{name}: {error}"
            raise CheckpointError(text if str(self.path) in text else f"{self.path}: {text}") from error
        except DAMAGE as error:
            text = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise CheckpointError(
                f"{self.path}: tensor {name!r} is damaged or of an unknown form: {text}"
            ) from error


def _as_tool(rule: Rule, matrix: QuantizedTensor) -> torch.Tensor:
    import torch

    own = matrix.scale_type if matrix.scale_type in ("float16", "bfloat16", "float32") else "bfloat16"
    found: torch.Tensor = matrix.dequantize(own if rule.dtype == "scale" else rule.dtype, rule.rounding)
    return found.to(getattr(torch, rule.result)) if rule.result else found


def load_checkpoint(path: str | os.PathLike[str], *, names: torchao.Names | None = None) -> Checkpoint:
    """Open a checkpoint of another tool.

    Parameters
    ----------
    path
        A folder with ``model.safetensors``, one other file or an index of shards, an index itself,
        or one file: ``.safetensors``, ``.gguf`` (of a split model, any of its files), or ``.pt`` and ``.bin``
        of tensors, which are unpickled as data only.
    names
        Of names in the files, those in the model -> them, by which transformers describes torchao's tensors.

    Returns
    -------
    Tensors by name; nothing but headers is read before a tensor is asked for.

    Raises
    ------
    CheckpointError
        If it cannot be read: missing, truncated, damaged, or of a form that is not known.
    """
    found = path_of(path, "a checkpoint")
    require(os.fspath(path) != "" and os.path.exists(found), f"there is no checkpoint at {path}")
    file = file_of(found) if found.is_dir() else found
    if file.suffix == ".gguf":
        model = read_gguf(file)
        return Checkpoint(found, model.layers, model.plain, metadata=model.metadata)
    arrays = arrays_of(file) if names is None else torchao.described(arrays_of(file), names)
    config = config_of(found if found.is_dir() else found.parent)
    try:
        layers, plain = assign(arrays, config)
    except CheckpointError as error:
        raise CheckpointError(f"{found}: {error}") from error
    return Checkpoint(found, layers, plain, config, arrays.metadata)


def assign(
    arrays: Arrays, config: Mapping[str, Any]
) -> tuple[dict[str, tuple[Format, Layer]], dict[str, Stored]]:
    """Divide arrays into quantized tensors with their formats, and plain ones.

    Raises CheckpointError if parts of a quantized tensor are missing, or its format is not what the
        configuration says.
    """
    layers: dict[str, tuple[Format, Layer]] = {}
    taken: set[str] = set()
    unfit: dict[str, str] = {}
    for name in arrays:
        if name in taken:
            continue
        for suffix in {form.key for form in FORMATS if name.endswith(form.key)}:
            prefix = name.removesuffix(suffix)
            found = _recognised(arrays, prefix, suffix, config)
            if isinstance(found, str):
                unfit[name] = found
                continue
            _, layer = found
            require(layer.name not in layers, f"{layer.name} is stored in two formats")
            layers[layer.name] = found
            taken.update(prefix + part for part in layer.parts)
    rest = {name: stored for name, stored in arrays.items() if name not in taken}
    method = config.get(METHOD)
    if _is_known(method):
        _require_read(rest)
    for name, why in unfit.items():
        why = why + _called(config) if _is_known(method) else f"the method {method!r} is not read"
        require(name in taken or not _is_claimed(name, config), f"{name}: {why}")
    _require_plain(rest, arrays, config)
    require_no_transforms(config)
    require_nothing_else(layers, rest)
    smoothed = next((name for name in arrays if _is_smoothed(name, arrays, layers)), None)
    require(smoothed is None, f"{smoothed}: inputs that are multiplied before a product are not read yet")
    clash = next((name for name in layers if name in arrays and name not in taken), None)
    require(clash is None, f"{clash} is there both quantized and as it is")
    return layers, rest


def _called(config: Mapping[str, Any]) -> str:
    """Return what a configuration calls its form, for an error."""
    names = [config[key] for key in (*gptq.FORMS, "quant_algo") if isinstance(config.get(key), str)]
    return f"; the configuration calls its form {names[0][:80]!r}" if names else ""


def _require_read(rest: Iterable[str]) -> None:
    """Raise if an array is known to be of a form that is not read."""
    for name in rest:
        form = next((form for suffix, form in UNREAD.items() if name.endswith(suffix)), None)
        require(form is None, f"{name}: codes of {form}, a form that is not read")


def _is_claimed(name: str, config: Mapping[str, Any]) -> bool:
    """Tell whether an array must be part of a quantized tensor, by its name or by the configuration."""
    forms = [form for form in FORMATS if name.endswith(form.key) and form.key not in GENERIC]
    return name.endswith(DISTINCT) or any(config.get(METHOD) in form.methods for form in forms)


def _is_known(method: Any) -> bool:
    """Tell whether a configuration's method is one of those that are read, or is not said."""
    return method in (None, *OWN_METHODS) or any(method in form.methods for form in FORMATS)


def _require_plain(rest: Mapping[str, Stored], arrays: Arrays, config: Mapping[str, Any]) -> None:
    """Raise if what belongs to no quantized tensor, by its name, type or the configuration, should do so."""
    method = config.get(METHOD)
    stated = [form for form in FORMATS if method in form.methods]
    lost = (*BESIDE_CODES, *(part for form in stated for part in form.parts if part not in GENERIC))
    known = _is_known(method)
    described = bool(stated) or (method is None and bool(config))  # MLX names no method
    modules = by_module(arrays)
    for name, stored in rest.items():
        require(not _is_lost(name, arrays), f"{name} is there without its description")
        renamed = torchao.is_undescribed(name, arrays)
        require(not renamed, f"{name} is described by another name, its model's: load_pretrained finds that")
        require(not name.endswith(lost), f"{name} is there without the codes that it belongs to")
        code = _is_code(stored) if known else stored.dtype not in PLAIN
        require(
            not (code and described), f"{name} is {stored.dtype}, and the scales of such codes are missing"
        )
        require(known or not code, f"{name} is {stored.dtype}; the method {method!r} is not read")
        beside = scaled_by(name, modules[name.rpartition(".")[0]]) if code else None
        require(beside is None, f"{name} is {stored.dtype} beside {beside}: a form that is not read")
    for name in torchao.part_names(arrays.metadata):
        require(name not in rest, f"{name} is there without the rest of its tensor")


def _is_lost(name: str, arrays: Arrays) -> bool:
    """Tell codes of our own format that nothing describes."""
    prefix = name.removesuffix(native.CODES)
    return prefix != name and any(prefix + suffix in arrays for suffix in native.ARRAYS)


def _is_code(stored: Stored) -> bool:
    """Tell a matrix of what a method that quantizes stores as codes only: fp8, and integers by their name.

    Zero points of inputs and of attention's operands, which compressed-tensors stores as fp8, are none.
    """
    integers = stored.dtype in INTEGERS and stored.name.endswith(CODE_NAMES)
    floats = stored.dtype in blocks.FP8_TYPES and HARMLESS.fullmatch(stored.name.rpartition(".")[2]) is None
    return len(stored.shape) >= 2 and (integers or floats)


def _is_smoothed(name: str, arrays: Arrays, layers: Mapping[str, Any]) -> bool:
    """Tell factors of a quantized layer's inputs (AWQ, SmoothQuant) which are not all 1."""
    prefix = name.removesuffix(SMOOTHING)
    return prefix != name and prefix + ".weight" in layers and bool((arrays[name].tensor() != 1).any())


def _recognised(
    arrays: Arrays, prefix: str, key: str, config: Mapping[str, Any]
) -> tuple[Format, Layer] | str:
    """Return the format of arrays that share a prefix, or why they are of none."""
    fitting: list[tuple[Format, Layer]] = []
    reasons: list[str] = []
    others: list[str] = []
    method = config.get(METHOD)
    for form in (form for form in FORMATS if form.key == key):
        wanted = (key, *form.parts)
        missing = [prefix + part for part in wanted if prefix + part not in arrays]
        if missing:
            reasons.append(f"{form.name} needs {', '.join(map(repr, missing))}")
            continue
        named = {part: arrays[prefix + part] for part in (*wanted, *form.optional) if prefix + part in arrays}
        layer = Layer(form.name_of(prefix), named, config, arrays.metadata)
        if form.fits(layer):
            fitting.append((form, layer))
        elif method is None or not form.methods or method in form.methods:
            others.append(form.name)
    if others:
        reasons.append(f"its extents and types are not those of {', '.join(others)}")
    stated = [found for found in fitting if not found[0].methods or method in (None, *found[0].methods)]
    if fitting and not stated:
        raise CheckpointError(
            f"{fitting[0][1].name} is stored as {fitting[0][0].name}, the configuration says {method!r}"
        )
    return stated[0] if stated else "; ".join(reasons)


SMOOTHING = ".pre_quant_scale"
"""Suffix of what ModelOpt multiplies a layer's inputs by."""

OWN_METHODS = ("ladder", "torchao")
"""Methods whose tensors are told without them."""

PLAIN = (*SCALES, "float64")
"""Types of arrays beside which a method that is not read stores others as codes."""

BESIDE_CODES = (
    *(".qzeros", ".nbits", ".weight_shape", ".weight_zero_point", ".weight_g_idx", ".weight_global_scale"),
    comfy.MARK,
    *(".weight.absmax", ".weight.nested_absmax", ".weight.nested_quant_map", *bitsandbytes.STATES),
    *(".weight_absmax", ".weight_nested_absmax", ".weight_nested_quant_map", gptqmodel.STATE),
)
"""Suffixes that no array has which does not describe codes beside it."""

DISTINCT = (
    *(".qweight", ".weight_packed", ".W_q", ".weight.quant_map", ".SCB", ".weight_scale_2"),
    *(gptqmodel.TABLE, ".weight_scb"),
)
"""Suffixes that no array has which is not part of a quantized tensor."""
