"""What a movement graph computes, step by step, in numpy, and whether it is well formed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ladder.ir.build import node_attributes
from ladder.ir.ops import get_operator
from ladder.movement.graph import LEVELS, Compute, Move, MovementGraph, Sync
from ladder.movement.pattern import Pattern
from tile_types.errors import VerificationError

Array = npt.NDArray[Any]

COMBINE: Mapping[str, Callable[..., Array]] = {"reduce_sum": np.sum, "reduce_max": np.max}
NEUTRAL = {"reduce_sum": 0.0, "reduce_max": -np.inf}


def apply(pattern: Pattern, array: Any) -> Any:
    """Return what is read: the table's reference of every view."""
    for node in pattern:
        array = get_operator(node.operator).reference([array], node_attributes(node))
    return array


def verify(graph: MovementGraph) -> None:
    """Check that every read finds what was written, and that a sync of its level lies between.

    Raises VerificationError: Names the tensor.
    """
    written: dict[str, int] = {}
    for at, step in enumerate(graph.steps):
        for name in step.inputs:
            if name not in graph.inputs and name not in written:
                raise VerificationError(f"step {at} reads %{name}, which nothing has written")
            if name in written and not _visible(graph, name, written[name], at):
                raise VerificationError(f"step {at} reads %{name} of the {graph.level(name)} without a sync")
        if not isinstance(step, Sync):
            written[step.result] = at
    for name in graph.outputs:
        if name not in written and name not in graph.inputs:
            raise VerificationError(f"the result %{name} is not written")


def _visible(graph: MovementGraph, name: str, written: int, read: int) -> bool:
    """Tell whether a sync lies between a write and a read of what lanes share."""
    level = LEVELS.index(graph.level(name))
    if level <= LEVELS.index("lane"):
        return True
    between = graph.steps[written + 1 : read]
    return any(isinstance(step, Sync) and LEVELS.index(step.scope) >= level for step in between)


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
