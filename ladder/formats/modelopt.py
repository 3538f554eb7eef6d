"""ModelOpt's 4-bit weights: NVFP4, MXFP4, and integers that are packed along outputs.

Its 8-bit weights are stored as compressed-tensors' are. Sources: ModelOpt ``qtensor/nvfp4_tensor.py``,
``qtensor/mxfp4_tensor.py``, ``export/quant_utils.py`` (``pack_int4_in_uint8``).
"""

from __future__ import annotations

from ladder.formats.compressed import (
    is_mx,
    mx_shape,
    mx_type,
    nvfp4_shape,
    nvfp4_tensor,
    read_mx,
    scale_name,
    scales_of,
)
from ladder.formats.layer import Format, Layer, Shape
from tile_types import QuantizedTensor, get_type
from tile_types.packing import pack_codes, unpack_codes

METHODS = ("modelopt", "modelopt_fp4")


CODES = ".weight"
"""Suffix of the packed codes."""


def along_rows(layer: Layer) -> Shape:
    """Return [N, K] of two codes a byte along N."""
    octets, k = layer.shape(".weight", 2)
    return 2 * octets, k


def is_mxfp4(layer: Layer) -> bool:
    """Tell two e2m1 codes a byte beside an exponent per 32."""
    found = mx_type(layer, CODES)
    return found is not None and found[1] == "mxfp4" and ".weight_scale_2" not in layer


def is_int4(layer: Layer) -> bool:
    """Tell two integers a byte, of neighbouring outputs."""
    weight, scale = layer[".weight"], layer[".weight_scale"]
    fits = weight.dtype == "uint8" and not is_mx(layer) and ".weight_scale_2" not in layer
    return fits and len(scale.shape) == 2 and weight.shape[:1] == (scale.shape[0] // 2,)


def read_nvfp4(layer: Layer) -> QuantizedTensor:
    """Read NVFP4: ``q * (scale * scale_2)``."""
    return nvfp4_tensor(layer, CODES, layer.number(".weight_scale_2"))


def read_int4(layer: Layer) -> QuantizedTensor:
    """Read integers of 4 bits; the lower half of a byte is the output of even number."""
    n, k = along_rows(layer)
    scale, block = scales_of(layer, n, k)
    codes = unpack_codes(layer.tensor(CODES).t().contiguous(), 4, n).t().contiguous()
    fields = {"scale": scale, "scale_type": scale_name(scale)}
    return QuantizedTensor(get_type("int4"), (n, k), pack_codes(codes, 4), block, **fields)  # type: ignore[arg-type]


NVFP4 = Format(
    "modelopt-nvfp4",
    ".weight_scale_2",
    lambda layer: (layer[".weight"].dtype, layer[".weight_scale"].dtype) == ("uint8", "float8_e4m3fn"),
    lambda layer: nvfp4_shape(layer, CODES),
    read_nvfp4,
    methods=(*METHODS, "quark"),
    parts=(".weight", ".weight_scale"),
    rounding="scales_first",
    doc="ModelOpt and Quark NVFP4",
)
MXFP4 = Format(
    "modelopt-mxfp4",
    ".weight_scale",
    is_mxfp4,
    lambda layer: mx_shape(layer, CODES),
    lambda layer: read_mx(layer, CODES),
    methods=(*METHODS, "quark"),
    parts=(".weight",),
    optional=(".weight_scale_2",),
    doc="ModelOpt and Quark MXFP4",
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
