"""BitNet b1.58: ternary weights, four to a byte, and one scale of a matrix.

Byte ``[r, k]`` has outputs r, r + N/4, r + N/2 and r + 3N/4, lowest bits first, each plus 1. The scale
divides in ``bitlinear`` and multiplies in ``autobitlinear``. Source: transformers ``integrations/bitnet.py``.
"""

from __future__ import annotations

from ladder.formats.layer import Format, Layer, Shape
from tile_types import QuantizedTensor, get_type
from tile_types.packing import pack_codes

PER_BYTE = 4
DIVIDES = {"bitlinear": True, "autobitlinear": False}
"""``linear_class`` -> whether the weight is divided by its scale."""


def shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    rows, k = layer.shape(".weight", 2)
    return PER_BYTE * rows, k


def read(layer: Layer) -> QuantizedTensor:
    """Read a matrix as int2."""
    import torch

    n, k = shape(layer)
    kind = layer.option("linear_class", str, "bitlinear")
    layer.require(kind in DIVIDES, f"linear_class {kind!r} is not read")
    normed = layer.option("use_rms_norm", bool, False)
    layer.require(not normed, "its inputs are normalized first, which no layer here does")
    scale = layer.number(".weight_scale")
    layer.require(scale > 0, f"its scale is {scale}")
    octets = layer.tensor(".weight")
    codes = torch.cat([octets >> 2 * slot & 3 for slot in range(PER_BYTE)])
    layer.require(int(codes.max()) < 3, "it has codes beyond -1, 0 and 1")
    factor = torch.full((1, 1), 1 / scale if DIVIDES[kind] else scale, dtype=torch.float32)
    stored = pack_codes(codes + 3 & 3, 2)
    return QuantizedTensor(get_type("int2"), (n, k), stored, (n, k), factor, scale_type="float32")


FORMAT = Format(
    "bitnet",
    ".weight_scale",
    lambda layer: layer[".weight"].dtype == "uint8" and layer.config.get("quant_method") == "bitnet",
    shape,
    read,
    methods=("bitnet",),
    parts=(".weight",),
    doc="BitNet b1.58 of transformers",
)
