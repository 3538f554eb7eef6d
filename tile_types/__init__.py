"""Low-bit types: values, packing, quantization and what a core can represent.

The lowest layer: it imports numpy and ml_dtypes at most (torch and TVM only inside calls).
Every other package may import it; users get what is public from ``ladder``.
"""

from __future__ import annotations

from tile_types.library import get_type, group_scaled, list_types, register_type, type_names
from tile_types.ops import NumpyOps, TirOps, TorchOps
from tile_types.packing import pack_codes, unpack_codes
from tile_types.quantize import quantize
from tile_types.quantized import QuantizedTensor
from tile_types.representable import (
    CORES,
    core_values,
    representable,
    representable_cores,
    require_representable,
)
from tile_types.tile import Tile
from tile_types.ttype import Metadata, TType

__all__ = [
    "CORES",
    "Metadata",
    "NumpyOps",
    "QuantizedTensor",
    "TType",
    "Tile",
    "TirOps",
    "TorchOps",
    "core_values",
    "get_type",
    "group_scaled",
    "list_types",
    "pack_codes",
    "quantize",
    "register_type",
    "representable",
    "representable_cores",
    "require_representable",
    "type_names",
    "unpack_codes",
]
