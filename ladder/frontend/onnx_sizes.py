"""Sizes that an ONNX file names, where shapes of its inputs fix them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tile_types.errors import ShapeError, unknown_name

Shapes = Mapping[str, Sequence[int]]
"""Input -> its shape."""


def fixed_sizes(inputs: Mapping[str, Any], shapes: Shapes) -> dict[str, int]:
    """Return size that a file names -> its extent, by shapes of inputs that are the same in every call.

    Raises ShapeError, UnknownNameError if there is no such input, or its type has no such shape.
    """
    found: dict[str, int] = {}
    for name, shape in shapes.items():
        if name not in inputs:
            raise unknown_name("input", name, inputs)
        dims = inputs[name].tensor_type.shape.dim
        if len(dims) != len(shape) or not all(isinstance(extent, int) and extent >= 0 for extent in shape):
            raise ShapeError(f"input {name!r} has {len(dims)} axes, its shape is to be {tuple(shape)}")
        for dim, extent in zip(dims, shape, strict=True):
            stated = dim.dim_value if dim.HasField("dim_value") and dim.dim_value != -1 else None
            if found.setdefault(dim.dim_param, extent) != extent and dim.dim_param:
                raise ShapeError(f"the size {dim.dim_param!r} cannot be {found[dim.dim_param]} and {extent}")
            if stated not in (None, extent):
                raise ShapeError(f"input {name!r} has {stated} elements along an axis, not {extent}")
    found.pop("", None)
    return found
