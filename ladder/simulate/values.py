"""Numbers as kernels hold them: element types, conversions, and packed halves.

A value of a statement is a Python number where all threads agree, else an array ``[warps, lanes]``
(or ``[warps, 1]`` where the lanes of a warp agree). A vector has its elements on a further axis,
``[warps, lanes, n]``, of which any may be 1; a constant one may be ``[n]``. Conversions round once, to
nearest even.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Value = Any
"""A Python or numpy number, or an array."""

LANES = 32
"""Lanes of an NVIDIA warp; a machine says how many its own have (`Machine.lanes`)."""

RANK_BITS = 24
"""Bits of a shared address below those that say which block of a cluster it lies in, on an H200."""

WITHIN = (1 << RANK_BITS) - 1
"""The bits of a shared address within a block."""


def element_of(dtype: str) -> tuple[str, int]:
    """Return the element type and the count of elements of a TIR type: ``float16x4`` has four."""
    element, _, count = dtype.rpartition("x")
    return (element, int(count)) if element and count.isdigit() else (dtype, 1)


class _Types(dict[str, Any]):
    """Element types by name; a vector's name finds that of its elements."""

    def __missing__(self, dtype: str) -> Any:
        element, count = element_of(dtype)
        if count == 1:
            raise KeyError(dtype)
        return self[element]


NUMPY: dict[str, Any] = _Types(
    {
        "bool": np.dtype(np.bool_),
        "int8": np.dtype(np.int8),
        "int16": np.dtype(np.int16),
        "int32": np.dtype(np.int32),
        "int64": np.dtype(np.int64),
        "uint8": np.dtype(np.uint8),
        "uint16": np.dtype(np.uint16),
        "uint32": np.dtype(np.uint32),
        "uint64": np.dtype(np.uint64),
        "float16": np.dtype(np.float16),
        "bfloat16": np.dtype(ml_dtypes.bfloat16),
        "float32": np.dtype(np.float32),
        "float64": np.dtype(np.float64),
        "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
        "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
        "float8_e4m3fnuz": np.dtype(ml_dtypes.float8_e4m3fnuz),
        "float8_e5m2fnuz": np.dtype(ml_dtypes.float8_e5m2fnuz),
    }
)
"""TIR element types."""

MASKS = {"uint8": 0xFF, "uint16": 0xFFFF, "uint32": 0xFFFFFFFF, "uint64": 0xFFFFFFFFFFFFFFFF}


def is_array(value: Value) -> bool:
    """Return whether threads may disagree about a value."""
    return value.__class__ is np.ndarray


def wrap(value: int, dtype: str) -> int:
    """Bring a Python integer into the range of an integer type, as overflow does."""
    if dtype in MASKS:
        return value & MASKS[dtype]
    bits = int(NUMPY[dtype].itemsize) * 8
    half = 1 << (bits - 1)
    return (value + half) % (1 << bits) - half


def constant(value: Any, dtype: str) -> Value:
    """Return a number as the type holds it: Python integers and bools, else numpy scalars."""
    if dtype == "bool":
        return bool(value)
    if dtype.startswith(("int", "uint")):
        return wrap(int(value), dtype)
    return NUMPY[dtype].type(value)


def cast(value: Value, dtype: str) -> Value:
    """Convert to another type; floats to integers truncate."""
    if is_array(value):
        return value.astype(NUMPY[dtype], copy=False)
    return constant(value, dtype)


def reinterpret(value: Value, source: str, dtype: str) -> Value:
    """Return the same bits as another type of the same width."""
    if source == dtype:
        return value
    counts = element_of(source)[1], element_of(dtype)[1]
    if counts != (1, 1):
        return _recut(value, source, dtype, *counts)
    if is_array(value):
        return np.ascontiguousarray(value.astype(NUMPY[source], copy=False)).view(NUMPY[dtype])
    result = np.array(value, NUMPY[source]).view(NUMPY[dtype])[()]
    return int(result) if dtype.startswith(("int", "uint")) else result


def _recut(value: Value, source: str, dtype: str, before: int, after: int) -> Value:
    """Reinterpret where at least one type is a vector: its elements are the last axis."""
    held = np.asarray(value, NUMPY[source])
    if before == 1:
        held = held[..., None]
    shape = held.shape[:-1] if held.ndim else ()
    parts: Array = np.ascontiguousarray(np.broadcast_to(held, (*shape, before))).view(NUMPY[dtype])
    return parts if after > 1 else parts[..., 0]


def whole(value: Value, warps: int) -> Value:
    """Return a value whose first axis, if it is a vector, counts all warps."""
    if is_array(value) and (value.ndim == 1 or (value.ndim == 3 and value.shape[0] != warps)):
        rest = value.shape[1:] if value.ndim == 3 else (1, *value.shape)
        return np.broadcast_to(value, (warps, *rest))
    return value


def spread(value: Value, warps: int, dtype: Any, lanes: int = LANES) -> Array:
    """Return a value as an array ``[warps, lanes]`` of a type."""
    if is_array(value) and value.shape == (warps, lanes) and value.dtype == dtype:
        return value  # type: ignore[no-any-return]
    return np.broadcast_to(np.asarray(value, dtype), (warps, lanes))


# ---- packed and narrow floats --------------------------------------------------------------------
@lru_cache(maxsize=8)
def table_of(dtype: str) -> Array:
    """Return the float32 value of every bit pattern of an 8- or 16-bit float type."""
    bits = np.uint8 if NUMPY[dtype].itemsize == 1 else np.uint16
    every = np.arange(256 if bits is np.uint8 else 65536, dtype=bits)
    values: Array = every.view(NUMPY[dtype]).astype(np.float32)
    return values


def two_sum(a: Array, b: Array) -> tuple[Array, Array]:
    """Return the rounded float64 sum and its exact error (Knuth)."""
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def odd(total: Array, error: Array) -> Array:
    """Return ``total``, or where it is inexact the neighbour on the error's side if that is odd.

    Rounding the result to fewer bits then rounds ``total + error`` once.
    """
    even = (total.view(np.uint64) & np.uint64(1)) == 0
    inexact = np.isfinite(error) & (error != 0) & even
    if not inexact.any():
        return total
    return np.where(inexact, np.nextafter(total, np.where(error > 0, np.inf, -np.inf)), total)


def to_float16(value: Array) -> Array:
    """Round float32 or float64 to the bits of float16."""
    return value.astype(np.float16).view(np.uint16)


def to_bfloat16(value: Array) -> Array:
    """Round float32 or float64 to the bits of bfloat16, once: to nearest even on the bits of float32."""
    single = value.astype(np.float32)
    bits = single.view(np.uint32)
    if value.dtype == np.float64:
        rest = value - single
        inexact = np.isfinite(rest) & (rest != 0) & (bits & np.uint32(1) == 0)
        towards = np.where(rest > 0, np.float32(np.inf), np.float32(-np.inf))
        bits = np.where(inexact, np.nextafter(single, towards), single).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(single), np.uint32(0x7FFF), rounded).astype(np.uint16)


ROUND: dict[str, Callable[[Array], Array]] = {"float16": to_float16, "bfloat16": to_bfloat16}


def halves_of(word: Value, dtype: str) -> tuple[Array, Array]:
    """Return the low and the high value of a 32-bit register as float32."""
    word = np.asarray(word, np.uint32)
    table = table_of(dtype)
    return table[word & np.uint32(0xFFFF)], table[word >> np.uint32(16)]


def join_halves(low: Array, high: Array) -> Array:
    """Return a register from the bits of its halves."""
    return low.astype(np.uint32) | high.astype(np.uint32) << np.uint32(16)


def to_float8(value: Array, dtype: str) -> Array:
    """Round float32 to the bits of an 8-bit float, saturating to the largest finite number; NaN is 0x7F."""
    kind = NUMPY[dtype]
    limit = np.float32(ml_dtypes.finfo(kind).max)
    bits = np.clip(value, -limit, limit).astype(kind).view(np.uint8)
    return np.where(np.isnan(value), np.uint8(0x7F), bits)
