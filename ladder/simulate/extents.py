"""Extents of a kernel's buffers, from the arrays of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ladder.simulate.values import NUMPY, Array
from tile_types.errors import LadderError


class SimulationError(LadderError):
    """A launch that cannot be simulated as asked."""


def bind_extents(function: Any, arrays: Sequence[Array | int]) -> dict[Any, int]:
    """Return the extents that arrays give to the symbols of a function's buffers, and its integers."""
    if len(arrays) != len(function.params):
        raise SimulationError(f"the kernel takes {len(function.params)} arrays, got {len(arrays)}")
    values: dict[Any, int] = {}
    for position, (buffer, array) in enumerate(zip(function.params, arrays, strict=True)):
        if isinstance(array, int):
            values[buffer] = array
            continue
        if len(buffer.shape) != array.ndim:
            raise SimulationError(f"argument {position} has {len(buffer.shape)} axes, got {array.shape}")
        if array.dtype != NUMPY[str(buffer.dtype)]:
            raise SimulationError(f"argument {position} is {array.dtype} where {buffer.dtype} is expected")
        for extent, size in zip(buffer.shape, array.shape, strict=True):
            known = (
                values.setdefault(extent, size) if type(extent).__name__ == "Var" else _bound(extent, values)
            )
            if known != size:
                raise SimulationError(f"argument {position}: extent {size} where {known} is expected")
    return values


def _bound(extent: Any, values: dict[Any, int]) -> int:
    """Return a buffer's extent, an expression of integers that the kernel takes before."""
    from tvm import tirx
    from tvm.sym import Analyzer

    analyzer = Analyzer()
    for variable, value in values.items():
        if type(variable).__name__ == "Var":
            analyzer.bind(variable, tirx.IntImm("int32", value))
    return int(analyzer.simplify(extent))
