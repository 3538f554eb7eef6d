"""Values of ONNX models with data-dependent shapes, and the standard's shape inference of one node.

A `Late` value is computed between plans, or is an input of a type that plans have no tensors of. Its extents
that no rule gives are sizes of their own: what follows is compiled for any.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import onnx

from ladder.frontend.onnx_check import MOST_CHECKED, infer_node
from ladder.frontend.onnx_values import TENSOR_TYPES, Known, type_name
from ladder.ir.extents import canonical
from tile_types.errors import DTypeError, LadderError
from tile_types.library import get_type
from tile_types.tile import Extent, Tile


@dataclass(frozen=True, eq=False)
class Late:
    """A value that is there when a model runs.

    name: Among the values of a call.
    info: ``onnx.TypeProto``, symbolic extents as parameters; None where nothing is known of it.
    """

    name: str
    info: Any = None

    @property
    def tile(self) -> Tile | None:
        """The tile, if it is a tensor of a type that plans have and its rank is known."""
        return tile_of(self.info)


def tile_of(info: Any) -> Tile | None:
    """Return the tile of an ONNX type; None if plans cannot have it."""
    shape = shape_of(info)
    if shape is None or any(extent is None for extent in shape):
        return None
    try:
        name = type_name(onnx.helper.tensor_dtype_to_np_dtype(info.tensor_type.elem_type))
    except (KeyError, DTypeError):
        return None
    return Tile(get_type(name), tuple(extent for extent in shape if extent is not None))


def shape_of(info: Any) -> tuple[Extent | None, ...] | None:
    """Return the extents of an ONNX tensor type, None for those that are open; None if the rank is."""
    if info is None or not info.HasField("tensor_type") or not info.tensor_type.HasField("shape"):
        return None
    return tuple(_extent(dim) for dim in info.tensor_type.shape.dim)


def _extent(dim: Any) -> Extent | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    if not dim.dim_param:
        return None
    try:
        return canonical(dim.dim_param)
    except LadderError:
        return None


def info_of_tile(tile: Tile) -> Any:
    """Return a tile as an ONNX type."""
    return tensor_info(_CODES[tile.ttype.name], tile.shape)


def info_of_known(value: Known) -> Any:
    """Return the ONNX type of a known value."""
    if value.text:
        return tensor_info(onnx.TensorProto.STRING, value.shape)
    if value.symbolic:
        return tensor_info(_CODES[value.ttype], value.shape)
    return tensor_info(onnx.helper.np_dtype_to_tensor_dtype(value.array.dtype), value.shape)


def tensor_info(code: int, shape: Sequence[Extent]) -> Any:
    """Return an ONNX tensor type."""
    return onnx.helper.make_tensor_type_proto(code, list(shape))


_CODES = {
    type_name(onnx.helper.tensor_dtype_to_np_dtype(code)): code
    for code in onnx.TensorProto.DataType.values()
    if code not in (onnx.TensorProto.UNDEFINED, onnx.TensorProto.STRING)
    and onnx.helper.tensor_dtype_to_np_dtype(code).name in (*TENSOR_TYPES, "float8_e4m3fn", "float8_e5m2")
}
"""Name of a type that plans have -> ONNX's element type."""


def inferred(
    node: Any, operands: Mapping[str, Any], known: Mapping[str, Known], opsets: Any, what: str
) -> dict[str, Any]:
    """Return the types of a node's results by the standard's rules.

    operands: Name of a value that it reads -> ONNX type; None where nothing is known.
    known: Name of one that is known -> value; shapes follow from small ones.
    opsets: Of the model.
    what: For messages.
    Raises ImportRefused if the rules refuse the operands.
    """
    small = {
        name: value
        for name, value in known.items()
        if not value.symbolic and prod(value.shape) <= MOST_CHECKED
    }
    tensors = [onnx.numpy_helper.from_array(value.array, name) for name, value in small.items()]
    infos = [
        onnx.helper.make_value_info(name, info)
        for name, info in operands.items()
        if name not in small and info is not None
    ]
    if len(infos) + len(tensors) < len(operands):
        return {}
    return infer_node(node, infos, tensors, opsets, what)
