"""A quantized operand taken apart: codes' values and metadata, in any number domain."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tile_types.errors import ConversionError, DTypeError
from tile_types.quantized import QuantizedTensor


@dataclass(frozen=True, eq=False)
class Components:
    """``value = (elements - zero) * scale * tensor_scale`` with block metadata [rows, blocks].

    elements: Values of the codes [..., K], before scaling.
    metadata: Arrays by name; those of scope ``block`` are [..., ceil(K / group)].
    group: Elements along the last axis that share metadata.
    """

    elements: Any
    metadata: Mapping[str, Any]
    group: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the elements."""
        return tuple(self.elements.shape)


def spread(array: npt.NDArray[Any], group: int, extent: int) -> npt.NDArray[Any]:
    """Repeat the last axis ``group`` times and cut it to ``extent``."""
    return np.repeat(array, group, axis=-1)[..., :extent]


def components_of(tensor: QuantizedTensor) -> Components:
    """Take a `QuantizedTensor` (numpy or torch) apart in float64; 2-D blocks become rows.

    Raises ConversionError if its columns are in an order of their own.
    """
    if tensor.columns is not None:
        raise ConversionError("a matrix with its columns in an order of their own has no components")
    tensor = tensor.without_offset()
    rows, columns = tensor.shape
    metadata: dict[str, Any] = {}
    for name in ("scale", "zero"):
        array = getattr(tensor, name)
        if array is not None:
            values = np.asarray(_float64(array))
            metadata[name] = np.repeat(values, min(tensor.block[0], rows), axis=0)[:rows]
    if tensor.tensor_scale is not None:
        metadata["tensor_scale"] = np.float64(tensor.tensor_scale)
    elements = np.asarray(_float64(tensor.ttype.decode_array(tensor.codes())))
    return Components(elements, metadata, min(tensor.block[1], columns))


def _float64(array: Any) -> Any:
    """Convert numpy (ml_dtypes included) or torch to float64 numpy."""
    return array.detach().double().cpu().numpy() if hasattr(array, "detach") else array.astype(np.float64)


def assemble(
    value: Components,
    subtract: Callable[[Any, Any], Any],
    multiply: Callable[[Any, Any], Any],
    stretch: Callable[[Any, int, int], Any],
) -> Any:
    """Compute the values of a quantized operand with the arithmetic of a number domain."""
    result, extent = value.elements, value.shape[-1]
    if "zero" in value.metadata:
        result = subtract(result, stretch(value.metadata["zero"], value.group, extent))
    if "scale" in value.metadata:
        result = multiply(result, stretch(value.metadata["scale"], value.group, extent))
    if "tensor_scale" in value.metadata:
        result = multiply(result, value.metadata["tensor_scale"])
    return result


def require_components(value: Any, what: str) -> Components:
    """Return ``value`` if it is taken apart; raises DTypeError."""
    if not isinstance(value, Components):
        raise DTypeError(f"{what} needs a quantized operand (a QuantizedTensor), got {type(value).__name__}")
    return value
