"""HQQ: real zero points; codes packed along the first axis of the grouped matrix.

``w = (q - zero) * scale`` in the type of the scales. Sources: hqq ``core/quantize.py``, ``core/bitpack.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ladder.faults import warn_once
from ladder.formats.bitsandbytes import blocks_of_flat
from ladder.formats.layer import COUNTS, SCALES, Format, Layer, Shape
from tile_types import QuantizedTensor

if TYPE_CHECKING:
    import torch


PACKING = {
    **dict.fromkeys((8, 6, 5), ("uint8", 1)),
    4: ("uint8", 2),
    3: ("int32", 10),
    2: ("uint8", 4),
    1: ("uint8", 8),
}
"""Bits of a code -> storage type, codes in one; the first code has the highest bits."""

TERNARY = 1.58
"""What is stored as the bits of three values, packed as those of 2 bits are."""

NAMES = ("scale", "zero", "shape", "nbits", "group_size", "axis", "view_as_float", "packing", "channel_wise")
FURTHER = ("unpack_view_dtype", "quant_scale", "quant_zero", "compute_dtype", "offload_meta", "optimize")
FLAGS = ("encoded_state_dict", "stores_quant_config", "round_zero")


def shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    extents = [int(extent) for extent in layer.tensor(".shape").flatten()[:8].tolist()]
    layer.require(len(extents) == 2 and min(extents) >= 1, f"shape is {extents}")
    octets = layer[".W_q"].nbytes
    layer.require(math.prod(extents) <= 8 * octets, f"{octets} bytes do not hold codes of {extents}")
    return tuple(extents)


def read(layer: Layer) -> QuantizedTensor | torch.Tensor:
    """Read a layer; groups along the first axis have no form in kernels, so it is dequantized then."""
    n, k = shape(layer)
    stated = round(layer.number(".nbits", *COUNTS, "float32"), 2)
    layer.require(stated in (*PACKING, TERNARY), f"{stated:g} bits")
    bits, axis = math.ceil(stated), int(layer.number(".axis", *COUNTS)) if ".axis" in layer else 1
    layer.require(axis in (0, 1), f"axis {axis}")
    layer.require_type(".scale", *SCALES)
    layer.require_type(".zero", layer[".scale"].dtype)
    scale, zero = layer.tensor(".scale"), layer.tensor(".zero")
    layer.require(scale.shape == zero.shape and scale.numel() >= 1, "zero points do not fit scales")
    groups = scale.numel()
    layer.require(n * k % groups == 0, f"{groups} groups do not divide {n} x {k} codes")
    size = n * k // groups
    codes = unpacked(layer, bits, (size, groups) if axis == 0 else (groups, size))
    if axis == 0:
        warn_once("hqq axis 0", "HQQ groups along axis 0 are dequantized: no type here has such groups")
        return ((codes - zero.flatten()) * scale.flatten()).reshape(n, k)
    scales, width = blocks_of_flat(layer, scale, size, n, k)
    zeros, _ = blocks_of_flat(layer, zero, size, n, k)
    return QuantizedTensor.from_codes(
        codes.reshape(n, k),
        f"uint{bits}",
        (1, width),
        scale=scales,
        zero=zeros,
        zero_kind="float",
        scale_type=layer[".scale"].dtype,
    )


def unpacked(layer: Layer, bits: int, extents: tuple[int, int]) -> torch.Tensor:
    """Return uint8 codes of the grouped matrix: slot i of all words is the i-th part of its rows."""
    import torch

    dtype, slots = PACKING[bits]
    viewed = ".view_as_float" not in layer or bool(layer.number(".view_as_float", *COUNTS))
    layer.require_type(".W_q", dtype, *(SCALES if viewed else ()))
    words = layer.tensor(".W_q")
    if layer[".W_q"].dtype != dtype:
        words = words.contiguous().view(getattr(torch, dtype))
    rows, columns = extents
    layer.require(
        words.ndim == 2 and words.shape[1] == columns and words.shape[0] == -(-rows // slots),
        f"W_q has the shape {list(words.shape)} for {rows} x {columns} codes of {bits} bits",
    )
    wide = slots == 1 and bool((words >> bits).any())
    layer.require(not wide, f"codes of more than {bits} bits")
    parts = [words >> bits * (slots - 1 - slot) & (1 << bits) - 1 for slot in range(slots)]
    return torch.cat(parts)[:rows].to(torch.uint8)


FORMAT = Format(
    "hqq",
    ".W_q",
    lambda layer: True,
    shape,
    read,
    methods=("hqq",),
    parts=(".scale", ".zero", ".shape", ".nbits"),
    optional=tuple(f".{name}" for name in (*NAMES, *FURTHER, *FLAGS)),
    dtype="scale",
    rounding="each",
    doc="HQQ, 1 to 8 bits",
)
