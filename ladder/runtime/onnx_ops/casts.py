"""Conversions between element types, and to codes of few bits and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import torch

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import DTYPES, SUB_BYTE, array_of, code_of, value_of, wide
from tile_types.errors import DTypeError

FRACTIONS = 1 << 23
"""Fractions that a float32 of given sign and exponent can have."""


def cast(x: Any, code: int, saturate: bool = True, round_mode: str = "up") -> Any:
    """Return a tensor in another element type.

    x: The tensor.
    code: ONNX's element type.
    saturate: Whether numbers beyond the range of an 8-bit float become the largest one.
    round_mode: ``up``, ``down`` or ``nearest``, for powers of two (E8M0).
    """
    if code_of(x) == code:
        return x
    if code == onnx.TensorProto.STRING:
        return _as_text(array_of(x))
    if isinstance(x, np.ndarray):
        return cast(_readable(x, code), code, saturate, round_mode)
    if code in SUB_BYTE:
        return array_of(x if x.element_size() > 1 or not x.is_floating_point() else x.float()).astype(
            SUB_BYTE[code]
        )
    dtype = DTYPES.get(code)
    if dtype is None:
        raise DTypeError(f"tensors cannot be cast to {onnx.TensorProto.DataType.Name(code)}")
    if dtype == torch.float8_e8m0fnu:
        return _power_of_two(x.float(), saturate, round_mode)
    if dtype.is_floating_point and dtype.itemsize == 1:
        return _small_float(x, dtype, saturate)
    return _plain(x, dtype)


def _plain(x: Any, dtype: torch.dtype) -> Any:
    if dtype == torch.bool:
        return (wide(x).float() if x.element_size() == 1 else wide(x)) != 0
    if x.dtype in (torch.uint16, torch.uint32):
        x = wide(x)
    if dtype in (torch.uint32, torch.uint64, torch.uint16) and x.is_floating_point():
        x = x.to(torch.int64)
    return x.to(dtype)


def _readable(x: np.ndarray, code: int) -> Any:
    """Return a tensor of numpy's as one that torch computes with."""
    if x.dtype != object:
        return value_of(x.astype(np.int32 if "int" in x.dtype.name else np.float32))
    texts = [item.decode() if isinstance(item, bytes) else str(item) for item in x.reshape(-1)]
    dtype = DTYPES.get(code, torch.float32)
    real = dtype.is_floating_point or code in SUB_BYTE
    if real:
        return value_of(np.array([float(text) for text in texts], np.float64).reshape(x.shape))
    found = np.array([_whole(text) % (1 << 64) for text in texts], np.uint64)
    return value_of(found.reshape(x.shape).view(np.int64))


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(float(text))


def _as_text(x: np.ndarray) -> np.ndarray:
    found = np.empty(x.shape, object)
    found.reshape(-1)[:] = [_text(value) for value in x.reshape(-1)]
    return found


def _text(value: Any) -> str:
    """Write a number as onnxruntime does: conditions as 0 and 1, eight digits, the standard's infinities."""
    if isinstance(value, np.bool_):
        return str(int(value))
    if isinstance(value, np.integer):
        return str(value)
    return "NaN" if value != value else f"{float(value):.8g}".replace("inf", "INF")


def _small_float(x: Any, dtype: torch.dtype, saturate: bool) -> Any:
    """Round to an 8-bit float; unless saturated, what is beyond its range is infinity or NaN."""
    value = x.float() if x.is_floating_point() else wide(x).float()
    if saturate:
        return value.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max).to(dtype)
    name = str(dtype).removeprefix("torch.")
    with np.errstate(over="ignore"):
        return value_of(array_of(value).astype(getattr(ml_dtypes, name))).to(x.device)


def _power_of_two(x: Any, saturate: bool, mode: str) -> Any:
    """Return the exponent of positive numbers; sign and fraction decide how it is rounded."""
    bits = x.abs().contiguous().view(torch.int32)
    exponent, fraction = bits >> 23, bits & (FRACTIONS - 1)
    more = {"up": fraction > 0, "down": fraction < 0}.get(mode, fraction > FRACTIONS // 2)
    if mode == "nearest":
        more = more | ((fraction == FRACTIONS // 2) & (exponent % 2 == 1))
    if mode == "up":
        more = more & ((exponent > 0) | (fraction > FRACTIONS // 2))
    raised = exponent + more.to(torch.int32)
    finite = exponent < 255
    limit = 254 if saturate else 255
    found = torch.where(
        finite | (torch.isinf(x) & saturate), raised.clamp(max=limit), torch.full_like(raised, 255)
    )
    return found.to(torch.uint8).view(torch.float8_e8m0fnu)


def _cast(op: Operation, x: Any) -> Any:
    return cast(x, _target(op.get("to")), bool(op.get("saturate", 1)), op.get("round_mode", "up"))


def _target(stated: Any) -> int:
    """Return an element type: opset 1 has its name."""
    return int(onnx.TensorProto.DataType.Value(stated)) if isinstance(stated, str) else int(stated)


def _cast_like(op: Operation, x: Any, like: Any) -> Any:
    return cast(x, code_of(like), bool(op.get("saturate", 1)), op.get("round_mode", "up"))


def _bit_cast(op: Operation, x: Any) -> Any:
    code = int(op.get("to"))
    if isinstance(x, np.ndarray):
        return x.view(SUB_BYTE[code])
    if code in SUB_BYTE:
        return array_of(x).view(SUB_BYTE[code])
    return x.contiguous().view(DTYPES[code])


# quantisation ----------------------------------------------------------------------------------------


def spread(op: Operation, parameter: Any, x: Any) -> Any:
    """Return a scale or zero point so that it broadcasts: per tensor, per axis, or per block of an axis."""
    if parameter.ndim == 0 or (parameter.ndim == 1 and parameter.numel() == 1):
        return parameter.reshape(())
    axis = op.get("axis", 1) % x.ndim
    if parameter.ndim == 1 and not op.get("block_size", 0):
        return parameter.reshape([-1 if at == axis else 1 for at in range(x.ndim)])
    block = op.get("block_size", 0) or -(-x.shape[axis] // parameter.shape[axis])
    return parameter.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])


def numbers(x: Any) -> Any:
    """Return codes as numbers: float32 for small floats, int32 for integers."""
    if isinstance(x, np.ndarray):
        return _readable(x, 0)
    if x.is_floating_point():
        return x.float() if x.element_size() == 1 else x
    return wide(x).to(torch.int64 if x.element_size() > 2 else torch.int32)


def _range(code: int) -> tuple[int, int]:
    if code in SUB_BYTE:
        info = ml_dtypes.iinfo(SUB_BYTE[code])
        return int(info.min), int(info.max)
    found = torch.iinfo(DTYPES[code])
    return found.min, found.max


def saturated(value: Any, code: int, zero: Any = None) -> Any:
    """Round to the nearest whole number, add a zero point, and clamp to an integer type, in place.

    NaN becomes the type's smallest number.
    """
    low, high = _range(code)
    whole = value.round_()
    whole = (whole if zero is None else whole.add_(zero)).nan_to_num_(nan=low).clamp_(low, high)
    return whole.to(DTYPES[code]) if high <= 255 and code in DTYPES else cast(whole.to(torch.int64), code)


def is_integer(code: int) -> bool:
    """Tell whether an element type is of whole numbers."""
    return "int" in SUB_BYTE[code].name if code in SUB_BYTE else not DTYPES[code].is_floating_point


def _quantize(op: Operation, x: Any, scale: Any, zero: Any = None) -> Any:
    code = code_of(zero) if zero is not None else op.get("output_dtype", 0) or int(onnx.TensorProto.UINT8)
    precision = DTYPES[op.get("precision")] if op.get("precision") else numbers(scale).dtype
    places = numbers(zero) if zero is not None else None
    ratio = numbers(x).to(precision) / spread(op, numbers(scale).to(precision), x)
    if not is_integer(code):
        return cast(ratio, code, bool(op.get("saturate", 1)))
    return saturated(ratio.float(), code, None if places is None else spread(op, places, x))


def _dequantize(op: Operation, x: Any, scale: Any, zero: Any = None) -> Any:
    """Return codes times scales, rounded once to the type of the result."""
    value, target = numbers(x), op.get("output_dtype", 0)
    dtype = DTYPES[target] if target else scale.dtype
    if zero is not None:
        value = value - spread(op, numbers(zero), x)
    scale = numbers(scale)
    scale = scale.float() if scale.element_size() < 4 else scale
    return (value.to(scale.dtype) * spread(op, scale, x)).to(dtype)


CASTS: Mapping[str, Run] = {
    "Cast": _cast,
    "CastLike": _cast_like,
    "BitCast": _bit_cast,
    "QuantizeLinear": _quantize,
    "DequantizeLinear": _dequantize,
    "com.microsoft::QuantizeLinear": _quantize,
    "com.microsoft::DequantizeLinear": _dequantize,
}
"""Conversions between element types, and to codes and back."""
