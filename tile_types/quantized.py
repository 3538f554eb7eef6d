"""`QuantizedTensor`: codes in canonical storage with their scales and zero points."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from tile_types.arrays import NUMPY_DTYPES, Array, arrays_of, as_torch, is_torch
from tile_types.errors import ArtifactError, LadderError, ShapeError, unknown_name
from tile_types.library import get_type
from tile_types.packing import pack_codes, storage_extent, unpack_codes
from tile_types.scaling import block_rows, row_chunks
from tile_types.ttype import TType

FORMAT_VERSION = 1
_ARRAYS = ("storage", "scale", "zero")


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix [N, K]: value = (decode(code) - zero) * scale * tensor_scale.

    Parameters
    ----------
    ttype
        Element type (never a block type).
    shape
        (N, K).
    storage
        Canonical packed codes, see `tile_types.packing`; numpy or torch, as are scale and zero.
    block
        (bn, bk): rows and columns that share a scale; (1, K) per channel, (N, K) per tensor.
    scale
        [ceil(N/bn), ceil(K/bk)] in the native dtype of ``scale_type``, or None.
    zero
        Same shape, or None: int8/uint8 in code space, or the scale's dtype.
    zero_kind
        ``"none"``, ``"integer"`` or ``"float"``.
    tensor_scale
        Factor of the whole tensor (NVFP4), a float32 value.
    scale_type
        Name of the scale's type, ``"none"`` without scales.
    type_name
        Name that was asked for, e.g. ``"mxfp4"``; the element's name by default.

    Raises
    ------
    ShapeError
        If the arrays do not fit the shape and the block.
    """

    ttype: TType
    shape: tuple[int, int]
    storage: Array
    block: tuple[int, int]
    scale: Array | None = None
    zero: Array | None = None
    zero_kind: str = "none"
    tensor_scale: float | None = None
    scale_type: str = "none"
    type_name: str = ""

    def __post_init__(self) -> None:
        if not self.type_name:
            object.__setattr__(self, "type_name", self.ttype.name)
        if self.ttype.is_block:
            raise ShapeError(
                f"ttype is the element type: give {self.ttype.element!r}, not {self.ttype.name!r}"
            )
        rows, columns = self.shape
        self._require("storage", self.storage, (rows, storage_extent(columns, self.ttype.elem_bits)))
        for label in ("scale", "zero"):
            array = getattr(self, label)
            if array is not None:
                self._require(label, array, self.scale_shape)
        if (self.zero is None) != (self.zero_kind == "none"):
            raise ShapeError(
                f"zero_kind is {self.zero_kind!r} but zero is {'absent' if self.zero is None else 'given'}"
            )

    def _require(self, label: str, array: Array, shape: tuple[int, int]) -> None:
        if tuple(array.shape) != shape:
            raise ShapeError(
                f"{label} of {self.type_name} [{self.shape[0]}, {self.shape[1]}] with block {self.block} "
                f"must be {list(shape)}, got {list(array.shape)}"
            )

    @classmethod
    def from_codes(
        cls, codes: Array, ttype: TType | str, block: tuple[int, int], **rest: Any
    ) -> QuantizedTensor:
        """Pack codes [N, K]; ``rest`` are the remaining fields."""
        element = get_type(ttype).element_type
        shape = (int(codes.shape[0]), int(codes.shape[1]))
        return cls(element, shape, pack_codes(codes, element.elem_bits), block, **rest)

    @property
    def group_size(self) -> int:
        """Columns that share a scale."""
        return self.block[1]

    @property
    def scale_shape(self) -> tuple[int, int]:
        """Shape of scale and zero: [ceil(N/bn), ceil(K/bk)]."""
        return -(-self.shape[0] // self.block[0]), -(-self.shape[1] // self.block[1])

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points (4 more for a tensor scale)."""
        arrays = [a for a in (self.storage, self.scale, self.zero) if a is not None]
        total = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        return int(total) + (4 if self.tensor_scale is not None else 0)

    def codes(self) -> Array:
        """Return the codes [N, K]: uint8, or uint16 / uint32 for wider types."""
        return unpack_codes(self.storage, self.ttype.elem_bits, self.shape[1])

    def dequantize(self, dtype: Any = "float64") -> Array:
        """Return the values [N, K], computed in float64 and rounded once.

        Parameters
        ----------
        dtype
            ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``, or the library's dtype.

        Raises
        ------
        UnknownNameError
            If the dtype is none of these.
        """
        name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        if name not in ("float64", "float32", "float16", "bfloat16"):
            raise unknown_name("dtype", name, ("float64", "float32", "float16", "bfloat16"))
        xp = arrays_of(self.storage)
        result = xp.empty(self.shape, name, self.storage)
        for part in row_chunks(*self.shape):
            result[part] = xp.cast(self._dequantize_rows(part), name)
        return result

    def _dequantize_rows(self, part: slice) -> Array:
        """Return the float64 values of some rows."""
        xp = arrays_of(self.storage)
        codes = unpack_codes(self.storage[part], self.ttype.elem_bits, self.shape[1])
        values = self.ttype.decode_array(codes)
        width = min(self.block[1], self.shape[1])
        groups = xp.pad_last(values, -self.shape[1] % width).reshape(values.shape[0], -1, width)
        if self.zero is not None:
            groups = groups - block_rows(self.zero, self.block[0], part)[:, :, None]
        if self.scale is not None:
            groups = groups * block_rows(self.scale, self.block[0], part)[:, :, None]
        values = groups.reshape(values.shape[0], -1)[:, : self.shape[1]]
        return values if self.tensor_scale is None else values * self.tensor_scale

    def to(self, device: Any) -> QuantizedTensor:
        """Return the tensor with its arrays as torch tensors on ``device``."""
        return self._mapped(lambda array: as_torch(array).to(device))

    def numpy(self) -> QuantizedTensor:
        """Return the tensor with its arrays as numpy arrays."""
        return self._mapped(_as_numpy)

    def _mapped(self, function: Any) -> QuantizedTensor:
        arrays = {name: getattr(self, name) for name in _ARRAYS}
        return replace(self, **{name: function(a) for name, a in arrays.items() if a is not None})

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"arrays": {name: array}, "metadata": JSON-able dict}``, e.g. for safetensors.

        One-byte float scales are given as uint8 bits, since not every file format knows them.
        """
        arrays = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
        for name, array in arrays.items():
            xp = arrays_of(array)
            if xp.is_float(array) and array.dtype.itemsize == 1:
                arrays[name] = xp.view(array, "uint8")
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _ARRAYS}
        plain |= {"ttype": self.ttype.name, "shape": list(self.shape), "block": list(self.block)}
        return {"arrays": arrays, "metadata": {"version": FORMAT_VERSION, **plain}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> QuantizedTensor:
        """Invert `to_dict`.

        Raises
        ------
        ArtifactError
            If something is missing, does not fit, or is of another version.
        """
        try:
            metadata, arrays = dict(data["metadata"]), dict(data["arrays"])
            version = metadata.pop("version")
            if version != FORMAT_VERSION:
                raise ArtifactError(
                    f"quantized tensor of version {version}, this Ladder reads {FORMAT_VERSION}"
                )
            metadata |= {"ttype": get_type(metadata["ttype"]), "shape": _pair(metadata["shape"])}
            metadata["block"] = _pair(metadata["block"])
            for name, array in arrays.items():
                if name != "storage" and metadata["scale_type"] in _ONE_BYTE and array.dtype.itemsize == 1:
                    arrays[name] = arrays_of(array).view(array, metadata["scale_type"])
            return cls(**metadata, **arrays)
        except ArtifactError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, LadderError) as error:
            raise ArtifactError(
                f"not a quantized tensor, or a damaged one: {error}; export it again"
            ) from error


_ONE_BYTE = tuple(name for name in NUMPY_DTYPES if name.startswith(("e8", "fp8")))


def _pair(values: Any) -> tuple[int, int]:
    first, second = values
    return int(first), int(second)


def _as_numpy(array: Array) -> Array:
    if not is_torch(array):
        return array
    import torch

    from tile_types.arrays import TORCH_NAMES, numpy_dtype

    torch_name = str(array.dtype).removeprefix("torch.")
    name = next((ours for ours, theirs in TORCH_NAMES.items() if theirs == torch_name), torch_name)
    width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[array.dtype.itemsize]
    return array.detach().cpu().contiguous().view(width).numpy().view(numpy_dtype(name))
