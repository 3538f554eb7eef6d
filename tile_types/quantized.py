"""`QuantizedTensor`: codes in canonical storage with their scales and zero points."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from tile_types.arrays import (
    NUMPY_DTYPES,
    Array,
    arrays_of,
    as_torch,
    from_portable,
    is_torch,
    own_name,
    portable,
    require_array,
)
from tile_types.errors import (
    UNREGISTERED,
    ArtifactError,
    ConversionError,
    DTypeError,
    LadderError,
    ShapeError,
    UnknownNameError,
    ValueRangeError,
    require_kind,
    shown,
    unknown_name,
    whole_number,
)
from tile_types.factored import Factored
from tile_types.identity import VALUES, own_values, require_values
from tile_types.library import get_type, own_types
from tile_types.packing import pack_codes, storage_dtype, storage_extent, unpack_codes, with_constant
from tile_types.scaling import CHUNK_ELEMENTS, FEW_ELEMENTS, block_rows, row_chunks
from tile_types.ttype import TType

FORMAT_VERSION = 1
ARRAYS = ("storage", "scale", "zero", "offset", "columns")

ROUNDINGS = ("once", "each", "scales_first")
"""How `dequantize` rounds: the exact value once, every product and sum, or these with the scales multiplied
together first."""

_Rounded = Callable[[Array], Array]


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A matrix [N, K]: value = (decode(code) - zero) * scale * tensor_scale + offset.

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
        [ceil(N/bn), ceil(K/bk)] in the native dtype of ``scale_type``, or None. Types of one byte may come as
        their bits, uint8.
    zero
        Same shape, or None: int8/uint8 in code space, or the scale's dtype.
    zero_kind
        ``"none"``, ``"integer"`` or ``"float"``.
    tensor_scale
        Factor of the whole tensor (NVFP4), a float32 value.
    scale_type
        Name of the scale's type, by default that of its dtype; ``"none"`` without scales.
    type_name
        Name that was asked for, e.g. ``"mxfp4"``; the element's name by default.
    offset
        Shaped as scale, added after scaling (GGUF's minima), or None.
    columns
        int32 [K], or None: stored column i is column ``columns[i]`` of the matrix (GPTQ's ``desc_act``).
    factors
        ``"scale"`` and ``"offset"`` as products, where they are read so (`factored`). They are not stored.

    Raises
    ------
    ShapeError
        If the arrays do not fit the shape and the block.
    DTypeError
        If codes, scales or zero points are of another type than said above.
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
    offset: Array | None = None
    columns: Array | None = None
    factors: Mapping[str, Factored] = field(default_factory=dict)

    def __post_init__(self) -> None:
        require_kind(self.ttype, TType, "ttype of a quantized matrix is a TType")
        if not self.type_name:
            object.__setattr__(self, "type_name", self.ttype.name)
        if self.ttype.is_block:
            raise ShapeError(
                f"ttype is the element type: give {self.ttype.element!r}, not {self.ttype.name!r}"
            )
        rows, columns = self.shape
        _require_block(self.block)
        self._require("storage", self.storage, (rows, storage_extent(columns, self.ttype.elem_bits)))
        for label in ("scale", "zero", "offset"):
            array = getattr(self, label)
            if array is not None:
                self._require(label, array, self.scale_shape)
        if self.scale is not None:
            self._settle_scale(self.scale)
        if self.columns is not None:
            self._require("columns", self.columns, (columns,))
        if (self.zero is None) != (self.zero_kind == "none"):
            raise ShapeError(
                f"zero_kind is {self.zero_kind!r} but zero is {'absent' if self.zero is None else 'given'}"
            )
        self._require_types()

    def _require_types(self) -> None:
        """Raise DTypeError for codes or zero points of a type that they cannot have."""
        stored, wanted = own_name(self.storage.dtype), storage_dtype(self.ttype.elem_bits)
        if stored != wanted:
            raise DTypeError(f"codes are {stored}, {self.ttype.name} is stored in {wanted}")
        if self.zero is not None:
            scale = own_name(self.scale.dtype) if self.scale is not None else "float32"
            kinds = {"integer": ("int8", "uint8"), "float": (scale,)}
            if self.zero_kind not in kinds:
                raise unknown_name("zero_kind", self.zero_kind, kinds)
            if own_name(self.zero.dtype) not in kinds[self.zero_kind]:
                raise DTypeError(
                    f"zero points of kind {self.zero_kind} are {' or '.join(kinds[self.zero_kind])},"
                    f" not {own_name(self.zero.dtype)}"
                )

    def _settle_scale(self, scale: Array) -> None:
        """Read bits of scales as numbers and name their type; raises DTypeError where that is another."""
        xp = arrays_of(scale)
        if self.scale_type in _ONE_BYTE and xp.dtype_name(scale) == "uint8":
            scale = xp.view(scale, self.scale_type)
            object.__setattr__(self, "scale", scale)
        name = own_name(scale.dtype)
        if not xp.is_float(scale):
            raise DTypeError(f"scales are real numbers, got {name}")
        if self.scale_type == "none":
            object.__setattr__(self, "scale_type", name)
        if self.scale_type != name:
            raise DTypeError(f"scales are {name}, but scale_type is {shown(self.scale_type)}")

    def _require(self, label: str, array: Array, shape: tuple[int, ...]) -> None:
        require_array(array, label)
        if tuple(array.shape) != shape:
            raise ShapeError(
                f"{label} of {self.type_name} [{self.shape[0]}, {self.shape[1]}] with block {self.block} "
                f"must be {list(shape)}, got {list(array.shape)}"
            )

    @classmethod
    def from_codes(
        cls, codes: Array, ttype: TType | str, block: tuple[int, int], **rest: Any
    ) -> QuantizedTensor:
        """Pack codes [N, K]; ``rest`` are the remaining fields.

        Negative codes are those of as many bits in two's complement.

        Raises
        ------
        DTypeError, ShapeError
            As for the class, or if codes are no matrix of whole numbers.
        ValueRangeError
            If a code has more bits than the type.
        """
        element = get_type(ttype).element_type
        shape = _require_codes(codes, element)
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
        arrays = [a for a in (getattr(self, name) for name in ARRAYS) if a is not None]
        total = sum(math.prod(a.shape) * a.dtype.itemsize for a in arrays)
        return int(total) + (4 if self.tensor_scale is not None else 0)

    def factored(self, name: str) -> Factored | None:
        """Return the factors of the scales or offsets, unless these have been replaced since."""
        found = self.factors.get(name)
        return found if found is not None and found.products is getattr(self, name) else None

    def codes(self) -> Array:
        """Return the codes [N, K]: uint8, or uint16 / uint32 for wider types."""
        return unpack_codes(self.storage, self.ttype.elem_bits, self.shape[1])

    def dequantize(self, dtype: Any = "float64", rounding: str = "once") -> Array:
        """Return the values [N, K].

        Parameters
        ----------
        dtype
            ``"float64"``, ``"float32"``, ``"float16"`` or ``"bfloat16"``, or the library's dtype.
        rounding
            ``"once"``: computed in float64 and rounded at the end. ``"each"``: every difference, product and
            sum is rounded to ``dtype``, as a program that computes in it does. ``"scales_first"``: likewise,
            after the product of scale and tensor scale.

        Raises
        ------
        UnknownNameError
            If the dtype or the rounding is none of these.
        """
        name = str(getattr(dtype, "__name__", dtype)).removeprefix("torch.")
        if name not in ("float64", "float32", "float16", "bfloat16"):
            raise unknown_name("dtype", name, ("float64", "float32", "float16", "bfloat16"))
        if rounding not in ROUNDINGS:
            raise unknown_name("rounding", rounding, ROUNDINGS)
        xp = arrays_of(self.storage)

        def rounded(values: Array) -> Array:
            return values if rounding == "once" else xp.cast(xp.cast(values, name), "float64")

        result = xp.empty(self.shape, name, self.storage)
        order = None if self.columns is None else xp.cast(self.columns, "int64")
        for part in row_chunks(*self.shape):
            values = self._dequantize_rows(part, rounded, rounding == "scales_first")
            if order is None:
                result[part] = xp.cast(values, name)
            else:
                result[part][:, order] = xp.cast(values, name)
        return result

    def _dequantize_rows(self, part: slice, rounded: _Rounded, scales_first: bool) -> Array:
        """Return the float64 values of some rows, in the stored order of columns."""
        xp = arrays_of(self.storage)
        codes = unpack_codes(self.storage[part], self.ttype.elem_bits, self.shape[1])
        values = self.ttype.decode_array(codes)
        width = min(self.block[1], self.shape[1])
        groups = xp.pad_last(values, -self.shape[1] % width).reshape(values.shape[0], -1, width)
        if self.zero is not None:
            groups = rounded(groups - self._spread(self.zero, part))
        factors = [] if self.scale is None else [self._spread(self.scale, part)]
        factors += [] if self.tensor_scale is None else [self.tensor_scale]
        if scales_first and len(factors) == 2:
            factors = [rounded(factors[0] * factors[1])]
        for factor in factors:
            groups = rounded(groups * factor)
        if self.offset is not None:
            groups = groups + self._spread(self.offset, part)
        return groups.reshape(values.shape[0], -1)[:, : self.shape[1]]

    def _spread(self, array: Array, part: slice) -> Array:
        """Return one float64 number per group of some rows, [rows, groups, 1]."""
        return block_rows(array, self.block[0], part)[:, :, None]

    def without_offset(self) -> QuantizedTensor:
        """Return the matrix with real zero points in place of an offset: what kernels multiply.

        The zero point of a group is ``-offset / scale`` in float32. A group whose scale is zero gets codes
        of one value and a scale and zero point that give the offset.

        Raises
        ------
        ConversionError
            If there are zero points beside the offset, or no scales.
        """
        if self.offset is None:
            return self
        if self.zero is not None or self.scale is None:
            beside = "no scale" if self.scale is None else "zero points"
            raise ConversionError(
                f"{self.type_name} has an offset beside {beside}: no kernel takes that; dequantize it"
            )
        xp = arrays_of(self.scale)
        flat, storage, scale = self.scale == 0, self.storage, self.scale
        some = bool(flat.any())
        if some:
            constant = int(self.ttype.valid_codes()[0])
            storage = self._with_constant_groups(flat, constant)
            flat = xp.nonzero(flat)  # indices: few, as a rule, are written several times as fast as a mask
            scale = xp.cast(scale, "float32") if scale.dtype.itemsize == 1 else xp.copy(scale)
            scale[flat] = 1.0
        factor = 1.0 if self.tensor_scale is None else self.tensor_scale
        # Quotients and sums of float32 numbers round to the same ones by way of float64.
        narrow = factor == 1.0 and {xp.dtype_name(array) for array in (scale, self.offset)} == {"float32"}
        number, most = ("float32", CHUNK_ELEMENTS) if narrow else ("float64", FEW_ELEMENTS)
        zero = xp.empty(self.scale_shape, "float32", self.storage)
        for part in row_chunks(*self.scale_shape, most):
            divisor, offset = (xp.cast(array[part], number) for array in (scale, self.offset))
            zero[part] = xp.cast(-offset / (divisor if narrow else divisor * factor), "float32")
        if some:
            start = float(self.ttype.decode_codes([constant])[0])
            zero[flat] = xp.cast(start - xp.cast(self.offset[flat], number) / factor, "float32")
        return replace(
            self,
            storage=storage,
            scale=xp.cast(scale, "float32"),
            zero=zero,
            zero_kind="float",
            scale_type="float32",
            offset=None,
        )

    def _with_constant_groups(self, groups: Array, code: int) -> Array:
        """Return the storage in which all codes of some groups, bool of the scale's shape, are one."""
        if self.block[0] > 1:
            xp = arrays_of(groups)
            rows = [row // self.block[0] for row in range(self.shape[0])]
            groups = xp.take(groups, xp.array(rows, "int64", groups))
        width = min(self.block[1], self.shape[1])
        return with_constant(self.storage, self.ttype.elem_bits, self.shape[1], groups, width, code)

    def to(self, device: Any) -> QuantizedTensor:
        """Return the tensor with its arrays as torch tensors on ``device``."""
        return self._mapped(lambda array: as_torch(array).to(device))

    def numpy(self) -> QuantizedTensor:
        """Return the tensor with its arrays as numpy arrays."""
        return self._mapped(_as_numpy)

    def _mapped(self, function: Any) -> QuantizedTensor:
        arrays = {name: getattr(self, name) for name in ARRAYS}
        return replace(self, **{name: function(a) for name, a in arrays.items() if a is not None})

    def to_dict(self) -> dict[str, Any]:
        """Return ``{"arrays": {name: array}, "metadata": JSON-able dict}``, e.g. for safetensors.

        One-byte float scales are given as uint8 bits, since not every file format knows them.
        """
        arrays = {name: getattr(self, name) for name in ARRAYS if getattr(self, name) is not None}
        for name, array in arrays.items():
            xp = arrays_of(array)
            if xp.is_float(array) and array.dtype.itemsize == 1:
                arrays[name] = xp.view(array, "uint8")
        names = [f.name for f in fields(self) if f.name not in (*ARRAYS, "factors")]
        plain = {name: getattr(self, name) for name in names}
        plain |= {"ttype": self.ttype.name, "shape": list(self.shape), "block": list(self.block)}
        own = own_values(self.ttype, *(found for found in own_types() if found.name == self.type_name))
        values = {VALUES: own} if own else {}
        return {"arrays": arrays, "metadata": {"version": FORMAT_VERSION, **plain, **values}}

    def __getstate__(self) -> dict[str, Any]:
        """Copy and pickle arrays as bytes, see `portable`."""
        state = {**vars(self), "factors": {}}
        return {name: portable(each) if _is_array(name, each) else each for name, each in state.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Invert `__getstate__`."""
        vars(self).update(
            {name: from_portable(each) if _is_array(name, each) else each for name, each in state.items()}
        )

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
            _require_metadata(metadata)
            require_values(metadata.pop(VALUES, None))
            metadata |= {"ttype": get_type(metadata["ttype"]), "shape": _pair(metadata["shape"])}
            metadata["block"] = _pair(metadata["block"], 1)
            if metadata["scale_type"] != "none" and "scale" not in arrays:
                raise ArtifactError(f"its scales, of type {metadata['scale_type']}, are missing")
            found = cls(**metadata, **arrays)
            _require_order(found)
            return found
        except ArtifactError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError, LadderError) as error:
            if isinstance(error, UnknownNameError):
                raise ArtifactError(f"{error}; {UNREGISTERED}") from error
            raise ArtifactError(
                f"not a quantized tensor, or a damaged one: {error}; export it again"
            ) from error


def owned(matrix: QuantizedTensor, is_foreign: Callable[[Array], bool]) -> QuantizedTensor:
    """Return a matrix whose arrays have memory of their own, so that a file may be written again.

    is_foreign: Tells whether an array has not.
    """
    return matrix._mapped(lambda array: array.clone() if is_foreign(array) else array)


def _is_array(name: str, value: Any) -> bool:
    return name in ARRAYS and value is not None


_METADATA: dict[str, tuple[type, ...]] = {
    "ttype": (str,),
    "zero_kind": (str,),
    "scale_type": (str,),
    "type_name": (str,),
    "tensor_scale": (int, float, type(None)),
}
"""Entry of `QuantizedTensor.to_dict`'s metadata -> what it may be."""


def _require_metadata(metadata: dict[str, Any]) -> None:
    """Take the version out of metadata, and raise if it or an entry is none that is read."""
    version = metadata.pop("version")
    if version != FORMAT_VERSION:
        raise ArtifactError(f"quantized tensor of version {version}, this Ladder reads {FORMAT_VERSION}")
    for name, kinds in _METADATA.items():
        value = metadata.get(name)
        if not isinstance(value, kinds) or isinstance(value, bool):
            raise TypeError(f"its {name} is {value!r}, not {' or '.join(kind.__name__ for kind in kinds)}")


def _require_order(matrix: QuantizedTensor) -> None:
    """Raise `ArtifactError` unless columns in an order of their own are each there once."""
    if matrix.columns is None:
        return
    order = _as_numpy(matrix.columns)
    if order.dtype.kind not in "iu" or sorted(order.tolist()) != list(range(matrix.shape[1])):
        raise ArtifactError(f"its columns are no order of {matrix.shape[1]} columns")


_ONE_BYTE = tuple(name for name in NUMPY_DTYPES if name.startswith(("e8", "fp8")))


def _require_block(block: object) -> None:
    """Raise ShapeError unless a block is so many rows and columns."""
    extents = block if isinstance(block, tuple) else ()
    if len(extents) != 2 or min(whole_number(extent, "an extent of a block") for extent in extents) < 1:
        raise ShapeError(f"block is (rows, columns) that share a scale, each at least 1, got {shown(block)}")


def _require_codes(codes: Array, element: TType) -> tuple[int, int]:
    """Return the extents of a matrix of codes; raises unless all are codes of the type."""
    xp, bits = require_array(codes, "codes"), element.elem_bits
    if len(codes.shape) != 2:
        raise ShapeError(f"codes must be a matrix [N, K], got {list(codes.shape)}")
    rows, columns = (int(extent) for extent in codes.shape)
    if rows * columns and 8 * codes.dtype.itemsize > bits and not xp.is_float(codes):
        wide = codes if codes.dtype.itemsize == 1 else xp.cast(codes, "int64")
        low, high = int(wide.min()), int(wide.max())
        if low < -(1 << (bits - 1)) or high >> bits > 0:
            raise ValueRangeError(f"codes of {element.name} have {bits} bits, got codes from {low} to {high}")
    return rows, columns


def check_quantized(weight: object) -> None:
    """Raise DTypeError unless a weight is a `QuantizedTensor`."""
    require_kind(weight, QuantizedTensor, "weight must be what ladder.quantize(matrix, type) returned")


def _pair(values: Any, least: int = 0) -> tuple[int, int]:
    """Return two extents; raises ArtifactError if they are none."""
    match values:
        case [int(first), int(second)] if min(first, second) >= least and bool not in map(type, values):
            return first, second
    raise ArtifactError(f"{values!r} are no two extents of at least {least}")


def _as_numpy(array: Array) -> Array:
    if not is_torch(array):
        return array
    import torch

    from tile_types.arrays import numpy_dtype

    width = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}[array.dtype.itemsize]
    return array.detach().cpu().contiguous().view(width).numpy().view(numpy_dtype(own_name(array.dtype)))
