"""Operators of sequences (lists) and of optional values (a value or None)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import array_of
from tile_types.errors import ShapeError


def _place(sequence: list[Any], position: Any, most: int) -> int:
    """Return a position that counts from the beginning.

    Raises ShapeError if it lies outside.
    """
    at, count = int(position.reshape(())), len(sequence)
    if not -count <= at < most:
        raise ShapeError(f"position {at} of a sequence of {count}")
    return at + count if at < 0 else at


def _insert(op: Operation, sequence: list[Any], value: Any, position: Any = None) -> Any:
    at = len(sequence) if position is None else _place(sequence, position, len(sequence) + 1)
    return [*sequence[:at], value, *sequence[at:]]


def _erase(op: Operation, sequence: list[Any], position: Any = None) -> Any:
    at = len(sequence) - 1 if position is None else _place(sequence, position, len(sequence))
    return [*sequence[:at], *sequence[at + 1 :]]


def _joined(op: Operation, sequence: list[Any]) -> Any:
    axis, new = op.get("axis"), op.get("new_axis", 0)
    if isinstance(sequence[0], np.ndarray):
        return np.stack(sequence, axis) if new else np.concatenate(sequence, axis)
    return torch.stack(sequence, axis) if new else torch.cat(sequence, axis)


def _split(op: Operation, x: Any, sizes: Any = None) -> Any:
    axis, extent = op.get("axis", 0) % x.ndim, x.shape[op.get("axis", 0)]
    if sizes is None:
        parts = _parts(x, [1] * extent, axis)
        return parts if op.get("keepdims", 1) else [part.squeeze(axis) for part in parts]
    return _parts(x, int(sizes) if sizes.ndim == 0 else sizes.tolist(), axis)


def _parts(x: Any, each: int | list[int], axis: int) -> list[Any]:
    if not isinstance(x, np.ndarray):
        return list(torch.split(x, each, axis))
    ends = range(each, x.shape[axis], each) if isinstance(each, int) else np.cumsum(each)[:-1]
    return list(np.split(x, ends, axis))


SEQUENCES: Mapping[str, Run] = {
    "SequenceConstruct": lambda op, *values: list(values),
    "SequenceEmpty": lambda op: [],
    "SequenceAt": lambda op, sequence, position: sequence[_place(sequence, position, len(sequence))],
    "SequenceLength": lambda op, sequence: torch.tensor(len(sequence), dtype=torch.int64),
    "SequenceInsert": _insert,
    "SequenceErase": _erase,
    "ConcatFromSequence": _joined,
    "SplitToSequence": _split,
    "Optional": lambda op, value=None: value,
    "OptionalHasElement": lambda op, value=None: torch.tensor(value is not None),
    "OptionalGetElement": lambda op, value: value,
}
"""Operators of sequences and of optional values."""


# Operators of ``ai.onnx.ml`` on maps (dictionaries of numbers or text), and from text to numbers -----
CAST_TO: Mapping[str, type] = {"TO_FLOAT": np.float32, "TO_INT64": np.int64, "TO_STRING": object}
"""What CastMap makes -> numpy's type."""


def _zipped(op: Operation, values: Any) -> list[dict[Any, Any]]:
    """Return a map of labels to numbers for each row."""
    labels = op.get("classlabels_strings") or op.get("classlabels_int64s") or []
    rows = values.reshape(-1, values.shape[-1]).tolist()
    if values.shape[-1] != len(labels):
        raise ShapeError(f"ZipMap of {values.shape[-1]} numbers a row to {len(labels)} labels")
    return [dict(zip(labels, row, strict=True)) for row in rows]


def _cast_map(op: Operation, given: Mapping[int, Any]) -> Any:
    """Return the values of a map as a row, in the order of their keys or at their keys."""
    kind = CAST_TO[op.get("cast_to", "TO_FLOAT")]
    if op.get("map_form", "DENSE") == "DENSE":
        row = [given[key] for key in sorted(given)]
    else:
        row = ["" if kind is object else 0] * int(op.get("max_map", 1))
        for key, value in given.items():
            if not 0 <= key < len(row):
                raise ShapeError(f"CastMap of key {key} to a row of {len(row)}")
            row[key] = value
    if kind is object:
        texts = [f"{value:f}" if isinstance(value, float) else str(value) for value in row]
        return np.array([texts], object)
    return torch.from_numpy(np.array([[float(value) for value in row]]).astype(kind))


def _categories(op: Operation, x: Any) -> Any:
    """Return numbers for text, or text for numbers."""
    texts, numbers = op.get("cats_strings") or [], op.get("cats_int64s") or []
    array = array_of(x)
    if array.dtype == object:
        by_text, default = dict(zip(texts, numbers, strict=True)), int(op.get("default_int64", -1))
        found = [by_text.get(text, default) for text in array.reshape(-1)]
        return torch.tensor(found, dtype=torch.int64).reshape(array.shape)
    by_number, unknown = dict(zip(numbers, texts, strict=True)), op.get("default_string", "_Unused")
    return np.array([by_number.get(n, unknown) for n in array.reshape(-1).tolist()], object).reshape(
        array.shape
    )


def _vector(op: Operation, given: Mapping[Any, Any]) -> Any:
    """Return the values of a map in the order of a vocabulary; 0 for what it lacks."""
    keys = op.get("string_vocabulary") or op.get("int64_vocabulary") or []
    empty: Any = "" if any(isinstance(value, str) for value in given.values()) else 0
    row = [given.get(key, empty) for key in keys]
    if isinstance(empty, str):
        return np.array([row], object)
    whole = all(isinstance(value, int) for value in given.values())
    return torch.tensor([row], dtype=torch.int64 if whole else torch.float32)


MAPS: Mapping[str, Run] = {
    "ai.onnx.ml::ZipMap": _zipped,
    "ai.onnx.ml::CastMap": _cast_map,
    "ai.onnx.ml::CategoryMapper": _categories,
    "ai.onnx.ml::DictVectorizer": _vector,
}
"""Operators of maps."""
