"""Shared parts of formats: the arrays of one quantized layer, and how a format reads them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Union

from ladder.formats.files import MOST_TEXT, Stored, require
from tile_types.errors import CheckpointError

if TYPE_CHECKING:
    import torch

    from tile_types import QuantizedTensor

Shape = tuple[int, ...]

Loaded = Union["QuantizedTensor", tuple["QuantizedTensor", ...], "torch.Tensor"]
"""A matrix, one per expert, or what no type here holds, dequantized."""


class TensorInMemory:
    """A tensor in memory, as formats read it: in place of an array of a file."""

    def __init__(self, tensor: torch.Tensor, name: str = "") -> None:
        self.held, self.name = tensor.detach().cpu(), name
        self.shape, self.dtype = tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")
        self.nbytes = self.held.nbytes

    def tensor(self) -> torch.Tensor:
        return self.held


@dataclass(frozen=True, eq=False)
class Layer:
    """The arrays that one quantized tensor is stored in.

    name: Name of the tensor, such as ``model.layers.0.mlp.up_proj.weight``.
    parts: Suffix, such as ``.qweight``, -> array.
    config: The checkpoint's ``quantization_config``; empty if there is none.
    metadata: Texts beside the arrays.
    """

    name: str
    parts: Mapping[str, Stored | TensorInMemory]
    config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, suffix: str) -> bool:
        """Tell whether a part is there."""
        return suffix in self.parts

    def tensor(self, suffix: str) -> torch.Tensor:
        return self[suffix].tensor()

    def __getitem__(self, suffix: str) -> Stored | TensorInMemory:
        found = self.parts.get(suffix)
        if found is None:
            raise CheckpointError(f"{self.name}: its part {suffix!r} is missing")
        return found

    def shape(self, suffix: str, axes: int | None = None) -> Shape:
        """Return the extents of a part, which must be at least 1 each."""
        shape = self[suffix].shape
        fits = (axes is None or len(shape) == axes) and 0 not in shape
        self.require(fits, f"{suffix} has the shape {list(shape)}")
        return shape

    def require(self, condition: bool, message: str) -> None:
        """Raise `CheckpointError`, with the layer's name, unless a condition holds."""
        require(condition, f"{self.name}: {message}")

    def require_type(self, suffix: str, *dtypes: str) -> None:
        """Raise unless a part has one of the element types."""
        found = self[suffix].dtype
        self.require(found in dtypes, f"{suffix} is {found}, expected {' or '.join(dtypes)}")

    def number(self, suffix: str, *dtypes: str) -> float:
        """Return the one number of a part, which must be of one of the types; by default of a scale's."""
        self.require_type(suffix, *(dtypes or SCALES))
        tensor = self.tensor(suffix)
        self.require(tensor.numel() == 1, f"{suffix} must be one number, it has {tensor.numel()}")
        return float(tensor.to(dtype=_float64()).reshape(()))

    def text(self, suffix: str) -> bytes:
        """Return a part that is a short text."""
        self.require_type(suffix, "uint8")
        self.require(self[suffix].nbytes < MOST_TEXT, f"{suffix} is too long")
        return bytes(self.tensor(suffix).flatten().tolist())

    def option(self, name: str, kind: type, default: Any) -> Any:
        """Return an entry of the configuration, of a type."""
        value = self.config.get(name)
        if value is None:
            return default
        fits = isinstance(value, kind) and not (kind is int and isinstance(value, bool))
        self.require(fits, f"the configuration's {name} is {value!r}, expected {kind.__name__}")
        return value


SCALES = ("float16", "bfloat16", "float32")
"""Types of scales that are no codes themselves."""

COUNTS = ("uint8", "int8", "int16", "int32", "int64")
"""Types of numbers that say how something is stored."""

GENERIC = ("", ".weight", ".scale", ".zero", ".shape")
"""Suffixes of parts that other tensors have, too."""

OVERRIDES = ("dynamic", "extra_config", "layer_config")
"""Entries of a configuration by which layers differ from the rest of it (GPTQModel, AutoRound)."""

AUTO_ROUND = ("auto-round", "intel/auto-round")
"""What AutoRound calls its method, whatever format it stores."""


class Rule(NamedTuple):
    """How a tool's own dequantization computes.

    dtype, rounding: `QuantizedTensor.dequantize` with these gives its bits; ``"scale"`` is the type of the
        scales.
    result: What these values are converted to after; empty if they stay.
    """

    dtype: str = "float32"
    rounding: str = "once"
    result: str = ""


@dataclass(frozen=True)
class Format:
    """How a tool stores quantized tensors.

    key: Suffix of the array that marks a quantized tensor.
    methods: Values of the configuration's ``quant_method`` that go with it; empty for any.
    parts, optional: Suffixes of the others.
    result, rename: What replaces the suffix in the tensor's name, or what makes the name of the rest.
    fits: Whether the arrays are of this format, judged by types, shapes and configuration alone.
    shape: Extents of the tensor, from the same.
    read: The tensor.
    dtype, rounding, converted: How the tool's own dequantization computes, see `Rule`.
    tool: What a stored tensor itself says of these, if the format keeps it.
    by_groups: Whether a file does not say how many groups a row has: what is read has one in each row.
    doc: One line.
    """

    name: str
    key: str
    fits: Callable[[Layer], bool]
    shape: Callable[[Layer], Shape]
    read: Callable[[Layer], Loaded]
    methods: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    result: str = ".weight"
    dtype: str = "float32"
    rounding: str = "once"
    converted: str = ""
    rename: Callable[[str], str] | None = None
    tool: Callable[[Layer], Rule] | None = None
    by_groups: bool = False
    doc: str = ""

    def name_of(self, prefix: str) -> str:
        """Return the tensor's name from that of its arrays without the suffix."""
        return self.rename(prefix) if self.rename is not None else prefix + self.result

    def rule(self, layer: Layer) -> Rule:
        """Return how a stored tensor is dequantized."""
        return Rule(self.dtype, self.rounding, self.converted) if self.tool is None else self.tool(layer)


def group_of(layer: Layer, columns: int, groups: int, stated: int | None = None) -> int:
    """Return the columns that share a scale, from the number of groups.

    columns, groups: Extents of the matrix and of its scales.
    stated: Group size of the configuration, which must give that many groups unless layers may differ.
    """
    if stated is not None and stated > 0 and -(-columns // stated) == groups:
        return stated
    agrees = stated is None or stated < 1 or any(layer.config.get(key) for key in OVERRIDES)
    layer.require(agrees, f"{groups} groups of scales for {columns} columns, the configuration says {stated}")
    layer.require(columns % groups == 0, f"{groups} groups of scales do not divide {columns} columns")
    return columns // groups


def of_block_type(
    name: str, shape: tuple[int, int], codes: torch.Tensor, scale: torch.Tensor, factor: float | None = None
) -> QuantizedTensor:
    """Return a matrix of a block type such as ``"nvfp4"``, which says what its codes and scales are.

    codes, scale: Canonical storage of the codes, and the bytes of one scale per block along K.
    factor: What multiplies all scales, where the type has that.
    """
    import torch

    from tile_types import QuantizedTensor, get_type
    from tile_types.library import BLOCK_TYPES

    element, size, kind, _ = BLOCK_TYPES[name]
    return QuantizedTensor(
        get_type(element),
        shape,
        codes,
        (1, size),
        scale=scale.view(torch.float8_e8m0fnu if kind == "e8m0" else torch.float8_e4m3fn),
        tensor_scale=factor,
        scale_type=kind,
        type_name=name,
    )


def _float64() -> torch.dtype:
    import torch

    return torch.float64
