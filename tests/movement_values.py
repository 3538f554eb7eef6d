"""What a movement graph computes, step by step, in numpy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.ops import get_operator
from ladder.movement.graph import Compute, Move, MovementGraph, Sync
from ladder.movement.pattern import apply

Array = npt.NDArray[Any]

COMBINE: Mapping[str, Callable[..., Array]] = {"reduce_sum": np.sum, "reduce_max": np.max}
NEUTRAL = {"reduce_sum": 0.0, "reduce_max": -np.inf}


def run(graph: MovementGraph, inputs: Sequence[Any]) -> tuple[Array, ...]:
    """Execute a movement graph in float64.

    Parameters
    ----------
    inputs
        One array per input, in order.
    """
    values: dict[str, Array] = {
        name: np.asarray(array, np.float64) for name, array in zip(graph.inputs, inputs, strict=True)
    }
    for step in graph.steps:
        if isinstance(step, Sync):
            continue
        found = _moved(step, values) if isinstance(step, Move) else _computed(step, values)
        assert found.shape == graph.tensors[step.result].shape, (step, found.shape)
        values[step.result] = found
    return tuple(values[name] for name in graph.outputs)


def _moved(step: Move, values: Mapping[str, Array]) -> Array:
    return np.asarray(apply(step.pattern, values[step.source]))


def _computed(step: Compute, values: Mapping[str, Array]) -> Array:
    operands = [values[name] for name in step.inputs]
    if step.kind == "broadcast":
        return np.asarray(apply(step.pattern, operands[0]))
    if step.kind == "partial":
        return _partial(step, operands[0])
    operator = get_operator(step.operator)
    return np.asarray(operator.reference(operands, operator.complete(dict(step.attributes))))


def _partial(step: Compute, operand: Array) -> Array:
    """Reduce what each lane has: vector v of a row belongs to lane ``v % lanes``."""
    attributes: dict[str, Any] = dict(step.attributes)
    lanes, width, axis = attributes["lanes"], attributes["width"], attributes["axis"]
    moved = np.moveaxis(operand, axis, -1)
    short = -moved.shape[-1] % (lanes * width)
    wide = [(0, 0)] * (moved.ndim - 1) + [(0, short)]
    padded = np.pad(moved, wide, constant_values=NEUTRAL[step.operator])
    split = padded.reshape(*moved.shape[:-1], -1, lanes, width)
    return np.moveaxis(COMBINE[step.operator](split, axis=(-3, -1)), -1, axis)
