"""Operators of sequences (lists) and of optional values (a value or None)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ladder.runtime.onnx_ops.operation import Operation, Run
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
        parts = [x.narrow(axis, at, 1) for at in range(extent)]
        return parts if op.get("keepdims", 1) else [part.squeeze(axis) for part in parts]
    each = int(sizes) if sizes.ndim == 0 else sizes.tolist()
    return list(torch.split(x, each, axis))


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
