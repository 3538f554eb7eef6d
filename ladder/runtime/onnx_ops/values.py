"""Values of ONNX models at run time, and their element types.

A tensor is a `torch.Tensor`; tensors of types in which torch cannot compute (6, 4 and 2 bits, text) are numpy
arrays. A sequence is a list, a map a dictionary of Python's numbers or text; an optional value is the value
itself or None.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch

from tile_types.errors import DTypeError

_ARRAYS = {
    code: onnx.helper.tensor_dtype_to_np_dtype(code)
    for code in onnx.TensorProto.DataType.values()
    if code not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
}
_SUB_BYTE = ("uint4", "int4", "uint2", "int2", "float4_e2m1fn", "float6_e2m3fn", "float6_e3m2fn")

DTYPES: dict[int, torch.dtype] = {
    code: getattr(torch, dtype.name)
    for code, dtype in _ARRAYS.items()
    if dtype.name not in _SUB_BYTE and hasattr(torch, dtype.name)
}
"""ONNX element type -> torch's."""

SUB_BYTE: dict[int, np.dtype] = {code: dtype for code, dtype in _ARRAYS.items() if dtype.name in _SUB_BYTE}
"""ONNX's types of less than a byte -> numpy's; torch does not compute with them."""

NAMES: dict[Any, int] = {dtype: code for codes in (DTYPES, SUB_BYTE) for code, dtype in codes.items()}
"""Element type of a value -> ONNX's."""

WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
"""Types in which torch does not compute -> types that it computes in; uint64 keeps its bits in int64."""

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> an integer type of that size that torch can move."""


def value_of(array: Any) -> Any:
    """Return an array of numpy (of any element type) as a value."""
    array = np.asarray(array)
    if array.dtype.kind in "OUS":
        return array.astype(object)
    if array.dtype in NAMES:  # of 6, 4 or 2 bits
        return array.copy()
    if array.dtype.isbuiltin == 1:
        return torch.from_numpy(np.array(array, order="C", copy=True))
    bits = torch.from_numpy(np.array(array.view(f"u{array.dtype.itemsize}"), order="C", copy=True))
    return bits.view(getattr(torch, array.dtype.name))


def array_of(value: Any) -> np.ndarray:
    """Return a tensor as an array of numpy, of the same element type."""
    if isinstance(value, np.ndarray):
        return value
    value = value.detach().cpu().resolve_conj()
    name = str(value.dtype).removeprefix("torch.")
    if hasattr(np, name):
        return np.asarray(value.numpy())
    bits = value.contiguous().view(torch.uint16 if value.element_size() == 2 else torch.uint8)
    return np.asarray(bits.numpy()).view(getattr(ml_dtypes, name))


def given_value(value: Any) -> Any:
    """Return an argument of a call as a value: torch's tensors of 4 and 2 bits become arrays."""
    if isinstance(value, torch.Tensor):
        if value.dtype in NAMES:
            return value
        name = str(value.dtype).removeprefix("torch.")
        if hasattr(ml_dtypes, name) and np.dtype(getattr(ml_dtypes, name)) in NAMES:
            return value.view(torch.uint8).cpu().numpy().view(getattr(ml_dtypes, name))
        return value
    if isinstance(value, np.ndarray | np.generic):
        return value_of(value)
    if isinstance(value, list | tuple):
        return [given_value(item) for item in value]
    return value


def code_of(value: Any) -> int:
    """Return the ONNX element type of a tensor.

    Raises DTypeError if ONNX has none.
    """
    if isinstance(value, np.ndarray) and value.dtype == object:
        return int(onnx.TensorProto.STRING)
    found = NAMES.get(value.dtype)
    if found is None:
        raise DTypeError(f"ONNX has no tensors of {value.dtype}")
    return int(found)


SIGN = torch.iinfo(torch.int64).min
"""Mask that turns the order of uint64 bits into that of int64."""


def wide(value: Any) -> Any:
    """Return a tensor in a type that torch computes in."""
    target = WIDER.get(value.dtype) if isinstance(value, torch.Tensor) else None
    if target is None:
        return value
    return value.view(torch.int64) if value.dtype == torch.uint64 else value.to(target)


def narrow(value: Any, dtype: torch.dtype) -> Any:
    """Return what was computed in the type of `wide` in the type itself; integers wrap around."""
    if dtype == torch.uint64 and value.dtype == torch.int64:
        return value.contiguous().view(torch.uint64)
    return value if value.dtype == dtype else value.to(dtype)


def ordered(x: Any) -> Any:
    """Return a tensor in a signed type that keeps the order."""
    return wide(x) ^ SIGN if x.dtype == torch.uint64 else wide(x)


def restored(x: Any, dtype: Any) -> Any:
    """Return what `ordered` gave, in the type that it was."""
    return narrow(x ^ SIGN if dtype == torch.uint64 else x, dtype)


def integers(value: Any) -> list[int]:
    """Return the elements of a tensor of integers."""
    return [int(item) for item in value.reshape(-1).tolist()]
