"""One set of array operations over numpy and torch, so that each algorithm is written once.

Only what packing and quantization need. All real arithmetic runs in float64, where both
libraries round alike, so both give the same codes. torch is imported on first use.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np

from tile_types.errors import DTypeError

if TYPE_CHECKING:
    import torch

Array = Any
"""A numpy array or a torch tensor."""

NUMPY_DTYPES: dict[str, Any] = {
    "float64": np.float64,
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "fp8_e4m3": ml_dtypes.float8_e4m3fn,
    "fp8_e5m2": ml_dtypes.float8_e5m2,
    "fp8_e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "fp8_e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
"""Types that numpy (with ml_dtypes) and torch hold natively, by our name: what scales may be stored in."""

TORCH_NAMES = {
    "e8m0": "float8_e8m0fnu",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
}
"""Our names that torch and ml_dtypes spell otherwise."""


class NumpyArrays:
    """The operations on numpy arrays."""

    def is_float(self, x: Array) -> bool:
        """Tell whether the elements are real numbers (bfloat16 and fp8 included)."""
        return np.issubdtype(x.dtype, np.floating) or x.dtype.type in NUMPY_DTYPES.values()

    def dtype_name(self, x: Array) -> str:
        """Return the element type's name."""
        return str(x.dtype)

    def array(self, values: Any, dtype: str, like: Array) -> Array:
        """Make an array of ``values`` where ``like`` lives."""
        return np.asarray(values).astype(numpy_dtype(dtype))

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        """Allocate."""
        return np.empty(shape, numpy_dtype(dtype))

    def cast(self, x: Array, dtype: str) -> Array:
        """Convert the values; integers wrap."""
        return x.astype(numpy_dtype(dtype), copy=False)

    def view(self, x: Array, dtype: str) -> Array:
        """Reinterpret the bits; the last axis scales with the width."""
        return np.ascontiguousarray(x).view(numpy_dtype(dtype))

    def copy(self, x: Array) -> Array:
        """Return a copy in memory of its own."""
        return x.copy()

    def nonzero(self, x: Array) -> tuple[Array, ...]:
        """Return where elements are not zero: indices along each axis."""
        return tuple(x.nonzero())

    def concatenate(self, arrays: list[Array]) -> Array:
        """Join arrays along the first axis."""
        return np.concatenate(arrays)

    def pad_last(self, x: Array, count: int) -> Array:
        """Append ``count`` zeros to the last axis."""
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)]) if count else x

    def pad_edge(self, x: Array, count: int) -> Array:
        """Repeat the last element of the last axis ``count`` times."""
        return np.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, count)], mode="edge") if count else x

    def searchsorted(self, sorted_values: Array, x: Array) -> Array:
        """Count the entries of ``sorted_values`` that are <= x."""
        return np.searchsorted(sorted_values, x, side="right")

    def take(self, table: Array, index: Array, axis: int = 0) -> Array:
        """Index one axis."""
        return table.take(index, axis)

    def where(self, condition: Array, then: Array, otherwise: Array) -> Array:
        """Choose by condition."""
        return np.where(condition, then, otherwise)

    def rint(self, x: Array) -> Array:
        """Round to the nearest integer, ties to even."""
        return np.rint(x)

    def clip(self, x: Array, low: float, high: float) -> Array:
        """Limit to [low, high]."""
        return np.clip(x, low, high)

    def exponent(self, x: Array) -> Array:
        """Return floor(log2 x) of positive x as int64."""
        return np.frexp(x)[1].astype(np.int64) - 1

    def pow2(self, exponent: Array) -> Array:
        """Return the exact float64 2**exponent, -1022 <= exponent <= 1023."""
        return ((exponent.astype(np.int64) + 1023) << 52).view(np.float64)

    def amin(self, x: Array, axis: int) -> Array:
        """Return the minimum along an axis."""
        return x.min(axis=axis)

    def amax(self, x: Array, axis: int) -> Array:
        """Return the maximum along an axis."""
        return x.max(axis=axis)

    def sum(self, x: Array, axis: int) -> Array:
        """Return the sum along an axis."""
        return x.sum(axis=axis)

    def sign(self, x: Array) -> Array:
        """Return -1, 0 or 1."""
        return np.sign(x)

    def first_nonfinite(self, x: Array) -> tuple[int, ...] | None:
        """Return the position of the first NaN or infinity."""
        finite = np.isfinite(x)
        if finite.all():
            return None
        return tuple(int(i) for i in np.unravel_index(int(np.argmin(finite)), x.shape))


class TorchArrays:
    """The operations of `NumpyArrays` on torch tensors of any device."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        self._signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

    def is_float(self, x: Array) -> bool:
        """Tell whether the elements are real numbers."""
        return bool(x.is_floating_point())

    def dtype_name(self, x: Array) -> str:
        return str(x.dtype).removeprefix("torch.")

    def array(self, values: Any, dtype: str, like: Array) -> Array:
        """Make a tensor of ``values`` where ``like`` lives."""
        if not isinstance(values, self.torch.Tensor):
            values = self.torch.from_numpy(np.array(values))
        return self.cast(values.to(like.device), dtype)

    def empty(self, shape: tuple[int, ...], dtype: str, like: Array) -> Array:
        return self.torch.empty(shape, dtype=torch_dtype(dtype), device=like.device)

    def cast(self, x: Array, dtype: str) -> Array:
        target = torch_dtype(dtype)
        if dtype in ("uint16", "uint32") and x.dtype != target:
            return x.to(self._signed[target.itemsize]).view(target)
        return x.to(target)

    def view(self, x: Array, dtype: str) -> Array:
        target = torch_dtype(dtype)
        if x.numel() == 0:  # strides of empty tensors are arbitrary and fail torch's check
            last = x.shape[-1] * x.dtype.itemsize // target.itemsize
            return x.new_empty((*x.shape[:-1], last), dtype=target)
        return x.contiguous().view(target)

    def copy(self, x: Array) -> Array:
        return x.clone()

    def nonzero(self, x: Array) -> tuple[Array, ...]:
        return tuple(x.nonzero(as_tuple=True))

    def concatenate(self, arrays: list[Array]) -> Array:
        """Join tensors along the first axis."""
        return self.torch.cat(arrays)

    def pad_last(self, x: Array, count: int) -> Array:
        return self.torch.nn.functional.pad(x, (0, count)) if count else x

    def pad_edge(self, x: Array, count: int) -> Array:
        if not count:
            return x
        return self.torch.cat([x, x[..., -1:].expand(*x.shape[:-1], count)], dim=-1)

    def searchsorted(self, sorted_values: Array, x: Array) -> Array:
        return self.torch.bucketize(x.contiguous(), sorted_values, right=True, out_int32=True)

    def take(self, table: Array, index: Array, axis: int = 0) -> Array:
        """Index one axis (torch indexes by int32 or int64 only, and on GPUs no words without a sign)."""
        wide = index.dtype in (self.torch.int32, self.torch.int64)
        flat = (index if wide else index.to(self.torch.int32)).reshape(-1)
        found = table.view(self._signed[table.dtype.itemsize]).index_select(axis, flat).view(table.dtype)
        return found.reshape(*table.shape[:axis], *index.shape, *table.shape[axis + 1 :])

    def where(self, condition: Array, then: Array, otherwise: Array) -> Array:
        return self.torch.where(condition, then, otherwise)

    def rint(self, x: Array) -> Array:
        return self.torch.round(x)

    def clip(self, x: Array, low: float, high: float) -> Array:
        return x.clamp(low, high)

    def exponent(self, x: Array) -> Array:
        return self.torch.frexp(x)[1].to(self.torch.int64) - 1

    def pow2(self, exponent: Array) -> Array:
        return ((exponent.to(self.torch.int64) + 1023) << 52).view(self.torch.float64)

    def amin(self, x: Array, axis: int) -> Array:
        return x.amin(dim=axis)

    def amax(self, x: Array, axis: int) -> Array:
        return x.amax(dim=axis)

    def sum(self, x: Array, axis: int) -> Array:
        return x.sum(dim=axis)

    def sign(self, x: Array) -> Array:
        return self.torch.sign(x)

    def first_nonfinite(self, x: Array) -> tuple[int, ...] | None:
        torch = self.torch
        if not x.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(x.detach()))).all()):
            return None  # extremes of numbers with a NaN among them are NaN
        flat = int((~torch.isfinite(x)).flatten().to(torch.int8).argmax())
        return tuple(int(i) for i in np.unravel_index(flat, tuple(x.shape)))


Arrays = NumpyArrays | TorchArrays
"""Either library; both have the same methods."""

_BACKENDS: dict[str, Arrays] = {}


def is_torch(x: Array) -> bool:
    """Tell whether ``x`` is a torch tensor, without importing torch."""
    tensor = getattr(sys.modules.get("torch"), "Tensor", None)  # none either while a thread imports torch
    return tensor is not None and isinstance(x, tensor)


def as_torch(x: Array) -> torch.Tensor:
    """Return a tensor as it is and a numpy array as a tensor in host memory.

    Unlike ``torch.as_tensor``, it does not move tensors to torch's default device.
    """
    import torch

    if isinstance(x, torch.Tensor):
        return x

    array = np.asarray(x)
    bits = torch.from_numpy(array.view(f"uint{8 * array.dtype.itemsize}").copy())
    return bits.view(torch_dtype(own_name(array.dtype)))


def arrays_of(x: Array) -> Arrays:
    """Return the operations for the library that ``x`` belongs to.

    Raises DTypeError if ``x`` is neither a numpy array nor a torch tensor.
    """
    return require_array(x)


def require_array(x: object, label: str = "") -> Arrays:
    """Return the same of a named argument; raises DTypeError with the name."""
    if not is_torch(x) and not isinstance(x, (np.ndarray, np.generic)):
        what = f"{label} must be" if label else "expected"
        raise DTypeError(f"{what} a numpy array or a torch tensor, got {type(x).__name__}")
    name = "torch" if is_torch(x) else "numpy"
    if name not in _BACKENDS:
        _BACKENDS[name] = TorchArrays() if name == "torch" else NumpyArrays()
    return _BACKENDS[name]


def numpy_dtype(name: str) -> Any:
    """Return the numpy dtype of one of our names or of numpy's own names."""
    return np.dtype(NUMPY_DTYPES.get(name, name))


def ldexp(x: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return ``x * 2**exponent``: torch launches its own on the current GPU, wherever the tensors lie."""
    import torch

    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        return torch.ldexp(x, exponent)


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of one of our names.

    Raises DTypeError if torch has none.
    """
    import torch

    dtype = getattr(torch, TORCH_NAMES.get(name, name), None)
    if not isinstance(dtype, torch.dtype):
        raise DTypeError(f"torch has no dtype for {name!r}")
    return dtype


def own_name(dtype: Any) -> str:
    """Return our name of a dtype of torch or numpy."""
    name = str(dtype).removeprefix("torch.")
    return next((ours for ours, theirs in TORCH_NAMES.items() if theirs == name), name)


def portable(array: Array) -> tuple[Array, Any]:
    """Return an array's bytes and dtype: torch cannot read its pickles of unsigned words and 8-bit floats."""
    return arrays_of(array).view(array, "uint8"), array.dtype


def from_portable(held: tuple[Array, Any]) -> Array:
    """Invert `portable`."""
    return held[0].view(held[1])
