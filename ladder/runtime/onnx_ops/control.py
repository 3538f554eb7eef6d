"""Operators that run graphs: If, Loop and Scan.

A row takes ``(operation, scope, *operands)``; ``scope`` has the values around the node, which its graphs may
read. Graphs are attributes that are called with ``(operands, scope)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from ladder.runtime.onnx_ops.operation import Operation

Scope = Mapping[str, Any]
ControlRun = Callable[..., Any]


def _if(op: Operation, scope: Scope, condition: Any) -> Any:
    branch = op.given["then_branch" if bool(condition.reshape(())) else "else_branch"]
    return tuple(branch((), scope))


def _loop(op: Operation, scope: Scope, most: Any = None, condition: Any = None, *state: Any) -> Any:
    """Run the body until its first result is false, or a number of times."""
    body, values = op.given["body"], list(state)
    limit = None if most is None else int(most.reshape(()))
    going = condition is None or bool(condition.reshape(()))
    scanned: list[list[Any]] = [[] for _ in range(len(body.outputs) - 1 - len(values))]
    at = 0
    while going and (limit is None or at < limit):
        now = condition if condition is not None else torch.tensor(True)
        found = body((torch.tensor(at, dtype=torch.int64), now, *values), scope)
        going, condition = bool(found[0]), found[0]
        values = list(found[1 : 1 + len(state)])
        for all_, value in zip(scanned, found[1 + len(state) :], strict=True):
            all_.append(value)
        at += 1
    first = 1 + len(state)
    return *values, *(_stacked(all_, body, first + n) for n, all_ in enumerate(scanned))


def _stacked(values: Sequence[Any], body: Any, at: int, axis: int = 0) -> Any:
    """Return scanned values as one tensor; of no iterations, one of the stated type without elements."""
    if not values:
        dtype, shape = body.stated(at)
        return torch.zeros((0, *shape), dtype=dtype).movedim(0, axis)
    if isinstance(values[0], np.ndarray):
        return np.stack(values, axis)
    return torch.stack(list(values), axis)


def _scan(op: Operation, scope: Scope, *operands: Any) -> Any:
    return _scan_batches(op, scope, *operands) if op.version < 9 else _scan_once(op, scope, operands)


def _scan_once(op: Operation, scope: Scope, operands: Sequence[Any]) -> tuple[Any, ...]:
    """Run the body for each slice of the scanned operands."""
    body, count = op.given["body"], op.get("num_scan_inputs")
    values, scanned = list(operands[: len(operands) - count]), operands[len(operands) - count :]
    axes = op.get("scan_input_axes") or [0] * count
    turned = op.get("scan_input_directions") or [0] * count
    parts = [
        (x.flip(axis) if back else x).unbind(axis)
        for x, axis, back in zip(scanned, axes, turned, strict=True)
    ]
    results = len(body.outputs) - len(values)
    found: list[list[Any]] = [[] for _ in range(results)]
    for slices in zip(*parts, strict=True):
        now = body((*values, *slices), scope)
        values, rest = list(now[: len(values)]), now[len(values) :]
        for all_, value in zip(found, rest, strict=True):
            all_.append(value)
    axes = op.get("scan_output_axes") or [0] * results
    turned = op.get("scan_output_directions") or [0] * results
    stacked = [
        _stacked(all_[::-1] if back else all_, body, len(values) + at, axis)
        for at, (all_, axis, back) in enumerate(zip(found, axes, turned, strict=True))
    ]
    return *values, *stacked


def _scan_batches(op: Operation, scope: Scope, lengths: Any, *operands: Any) -> tuple[Any, ...]:
    """Version 8: the first axis of all operands is a batch, the second is scanned."""
    turned = op.get("directions")
    given = {"body": op.given["body"], "num_scan_inputs": op.get("num_scan_inputs")}
    inner = Operation(op.name, 9, {**given, "scan_input_directions": turned}, op.count)
    count, batch = op.get("num_scan_inputs"), operands[0].shape[0]
    found = []
    for at in range(batch):
        rows = [x[at] for x in operands]
        if lengths is not None:
            rows[-count:] = [x[: int(lengths[at])] for x in rows[-count:]]
        found.append(_scan_once(inner, scope, rows))
    return tuple(torch.stack(parts) for parts in zip(*found, strict=True))


CONTROL: Mapping[str, ControlRun] = {"If": _if, "Loop": _loop, "Scan": _scan}
"""Operators that run graphs."""
