"""ModelOpt's 4-bit weights: NVFP4, MXFP4, and integers that are packed along outputs.

Its 8-bit weights are stored as compressed-tensors' are. Sources: ModelOpt ``qtensor/nvfp4_tensor.py``,
``qtensor/mxfp4_tensor.py``, ``export/quant_utils.py`` (``pack_int4_in_uint8``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.formats.compressed import is_mx, mx_scales, nvfp4_tensor, scales_of
from ladder.formats.layer import Format, Layer, Shape
from tile_types.packing import pack_codes

if TYPE_CHECKING:
    from tile_types import QuantizedTensor

METHODS = ("modelopt", "modelopt_fp4")


def along_columns(layer: Layer) -> Shape:
    """Return [N, K] of two codes a byte along K."""
    n, octets = layer.shape(".weight", 2)
    return n, 2 * octets


def along_rows(layer: Layer) -> Shape:
    """Return [N, K] of two codes a byte along N."""
    octets, k = layer.shape(".weight", 2)
    return 2 * octets, k


def is_mxfp4(layer: Layer) -> bool:
    """Tell two e2m1 codes a byte beside an exponent per 32."""
    weight, scale = layer[".weight"], layer[".weight_scale"]
    fits = weight.dtype == "uint8" and is_mx(layer) and ".weight_scale_2" not in layer
    return fits and weight.shape == (*scale.shape[:1], 16 * scale.shape[-1])


def is_int4(layer: Layer) -> bool:
    """Tell two integers a byte, of neighbouring outputs."""
    weight, scale = layer[".weight"], layer[".weight_scale"]
    fits = weight.dtype == "uint8" and not is_mx(layer) and ".weight_scale_2" not in layer
    return fits and len(scale.shape) == 2 and weight.shape[:1] == (scale.shape[0] // 2,)


def read_nvfp4(layer: Layer) -> QuantizedTensor:
    """Read NVFP4: ``q * (scale * scale_2)``."""
    return nvfp4_tensor(layer, ".weight", layer.number(".weight_scale_2"))


def read_mxfp4(layer: Layer) -> QuantizedTensor:
    """Read MXFP4."""
    from tile_types import QuantizedTensor, get_type

    n, k = along_columns(layer)
    scale, block = mx_scales(layer, n, k)
    codes = layer.tensor(".weight")
    fields = {"scale": scale, "scale_type": "e8m0", "type_name": "mxfp4"}
    return QuantizedTensor(get_type("fp4_e2m1"), (n, k), codes, block, **fields)  # type: ignore[arg-type]


def read_int4(layer: Layer) -> QuantizedTensor:
    """Read integers of 4 bits; the lower half of a byte is the output of even number."""
    import torch

    from tile_types import QuantizedTensor, get_type

    n, k = along_rows(layer)
    scale, block = scales_of(layer, n, k)
    octets = layer.tensor(".weight")
    codes = torch.stack([octets & 15, octets >> 4], 1).reshape(n, k)
    name = str(scale.dtype).removeprefix("torch.")
    return QuantizedTensor(
        get_type("int4"), (n, k), pack_codes(codes, 4), block, scale=scale, scale_type=name
    )


NVFP4 = Format(
    "modelopt-nvfp4",
    ".weight_scale_2",
    lambda layer: layer[".weight"].dtype == "uint8",
    along_columns,
    read_nvfp4,
    methods=METHODS,
    parts=(".weight", ".weight_scale"),
    rounding="scales_first",
    doc="ModelOpt NVFP4",
)
MXFP4 = Format(
    "modelopt-mxfp4",
    ".weight_scale",
    is_mxfp4,
    along_columns,
    read_mxfp4,
    methods=METHODS,
    parts=(".weight",),
    optional=(".weight_scale_2",),
    doc="ModelOpt MXFP4",
)
INT4 = Format(
    "modelopt-int4",
    ".weight_scale",
    is_int4,
    along_rows,
    read_int4,
    methods=METHODS,
    parts=(".weight",),
    optional=(".weight_scale_2",),
    dtype="scale",
    doc="ModelOpt integers of 4 bits in groups",
)
