"""Arrangement semantics: operators that move elements, exact in every number domain.

These act on any numpy array (float64, int64, object), so the float64 reference and the
finite-field interpreter share them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ladder.ir.operator import Attributes
from ladder.ir.quantized_values import Components, spread

Values = Sequence[Any]


def identity(values: Values, attributes: Attributes) -> Any:
    """Return the operand."""
    return values[0]


def broadcast(values: Values, attributes: Attributes) -> Any:
    """Stretch to ``shape``."""
    return np.broadcast_to(values[0], attributes["shape"])


def reshape(values: Values, attributes: Attributes) -> Any:
    """Reshape in row-major order."""
    return np.reshape(values[0], attributes["shape"])


def transpose(values: Values, attributes: Attributes) -> Any:
    """Permute axes."""
    return np.transpose(values[0], attributes["permutation"])


def concat(values: Values, attributes: Attributes) -> Any:
    """Join along ``axis``."""
    return np.concatenate(list(values), axis=attributes["axis"])


def repeat(values: Values, attributes: Attributes) -> Any:
    """Repeat elements along ``axis``, cut to ``extent``."""
    axis, times = attributes["axis"], attributes["times"]
    moved = np.moveaxis(np.asarray(values[0]), axis, -1)
    extent = attributes["extent"] or moved.shape[-1] * times
    return np.moveaxis(spread(moved, times, extent), -1, axis)


def slice_(values: Values, attributes: Attributes) -> Any:
    """Take a strided box."""
    begin, shape = attributes["begin"], attributes["shape"]
    step = attributes["step"] or (1,) * len(shape)
    box = tuple(slice(b, b + n * s, s) for b, n, s in zip(begin, shape, step, strict=True))
    return values[0][box]


def pad(values: Values, attributes: Attributes) -> Any:
    """Surround with ``value``."""
    array = np.asarray(values[0])
    width = list(zip(attributes["low"], attributes["high"], strict=True))
    return np.pad(array, width, constant_values=array.dtype.type(attributes["value"]))


def load(values: Values, attributes: Attributes) -> Any:
    """Take the tile at ``begin``; zeros lie outside. A quantized operand keeps its parts."""
    value, begin, shape = values[0], attributes["begin"], attributes["shape"]
    if not isinstance(value, Components):
        return box(value, begin, shape)
    extent = value.shape[-1]
    parts = {}
    for name, array in value.metadata.items():
        per_element = spread(array, value.group, extent) if np.ndim(array) else array
        parts[name] = box(per_element, begin, shape) if np.ndim(array) else array
    aligned = begin[-1] % value.group == 0 and shape[-1] % value.group == 0
    if aligned:
        parts = {name: part[..., :: value.group] if np.ndim(part) else part for name, part in parts.items()}
    return Components(box(value.elements, begin, shape), parts, value.group if aligned else 1)


def box(array: Any, begin: Sequence[int], shape: Sequence[int]) -> Any:
    """Take ``shape`` elements from ``begin``, zero where outside."""
    array = np.asarray(array)
    inside = array[tuple(slice(b, b + n) for b, n in zip(begin, shape, strict=True))]
    if inside.shape == tuple(shape):
        return inside
    result = np.zeros(shape, array.dtype)
    result[tuple(slice(0, n) for n in inside.shape)] = inside
    return result


def store(values: Values, attributes: Attributes) -> Any:
    """Return the whole tensor ``values[0]`` with the tile ``values[1]`` written at ``begin``."""
    whole, tile = values
    target = tuple(slice(b, b + n) for b, n in zip(attributes["begin"], tile.shape, strict=True))
    part = whole[target]
    part[...] = tile[tuple(slice(0, n) for n in part.shape)]
    return whole
