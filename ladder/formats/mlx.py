"""MLX (mlx-lm), and transformers' ``metal``: words of codes along K, scales and offsets of groups.

``w[n, k] = q[n, k] * scales[n, g] + biases[n, g]``; the modes of `MODES` have no offsets. Sources: MLX
``ops.cpp`` (``quantize``, ``dequantize``), mlx-lm ``utils.py``, transformers ``metal_quantization.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ladder.formats.bits import octets_of, storage_of_words
from ladder.formats.layer import SCALES, Format, Layer, Shape, of_block_type
from tile_types import QuantizedTensor, get_type

if TYPE_CHECKING:
    import torch


AFFINE = "affine"
WIDTHS = (2, 3, 4, 5, 6, 8)
MODES = {
    "mxfp4": (4, 32, "mxfp4"),
    "mxfp8": (8, 32, "mxfp8_e4m3"),
    "nvfp4": (4, 16, "nvfp4"),
}
"""Mode -> bits of an element, columns that share a scale, the block type."""

OFFSETS = (".biases", ".qbiases")
"""Suffix of the offsets: MLX's, transformers'."""


def options_of(layer: Layer) -> tuple[str, int, int]:
    """Return mode, bits and group size: those that the configuration gives the layer itself, or all."""
    own = layer.config.get(layer.name.removesuffix(".weight"))
    stated: Mapping[str, Any] = own if isinstance(own, dict) else layer.config
    mode, bits, group = (stated.get(key) for key in ("mode", "bits", "group_size"))
    mode = AFFINE if mode is None else mode
    layer.require(mode == AFFINE or mode in MODES, f"the mode {mode!r} is not read")
    if mode in MODES:
        bits, group = MODES[mode][:2]
    fits = bits in WIDTHS and type(group) is int and group >= 1
    layer.require(fits, f"the configuration says {bits!r} bits in groups of {group!r}")
    return mode, bits, group  # type: ignore[return-value]


def shape(layer: Layer) -> Shape:
    """Return [N, K] or, of experts, [E, N, K]."""
    _, bits, group = options_of(layer)
    *others, words = layer.shape(".weight")
    k = words * 32 // bits
    layer.require(
        len(others) in (1, 2) and words * 32 == k * bits, f"{words} words hold no codes of {bits} bits"
    )
    wanted = (*others, k // group)
    found = [part for part in (".scales", *OFFSETS) if part in layer]
    fits = k % group == 0 and all(layer[part].shape == wanted for part in found)
    layer.require(fits, f"{' and '.join(found)} are not {list(wanted)}, as groups of {group} columns demand")
    return *others, k


def read(layer: Layer) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """Read a matrix, or one per expert."""
    extents, (mode, _, _) = shape(layer), options_of(layer)
    offset = next((layer.tensor(part) for part in OFFSETS if part in layer), None)
    layer.require((offset is None) == (mode != AFFINE), f"offsets do not go with the mode {mode!r}")
    layer.require_type(".scales", *(SCALES if mode == AFFINE else ("uint8",)))
    words, scale = layer.tensor(".weight"), layer.tensor(".scales")
    layer.require(offset is None or offset.dtype == scale.dtype, "offsets are of another type than scales")
    if len(extents) == 2:
        return _matrix(layer, words, scale, offset)
    offsets = [None] * len(words) if offset is None else offset
    return tuple(_matrix(layer, *parts) for parts in zip(words, scale, offsets, strict=True))


def _matrix(
    layer: Layer, words: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor | None
) -> QuantizedTensor:
    import torch

    mode, bits, group = options_of(layer)
    n, k = len(words), words.shape[1] * 32 // bits
    if offset is not None:
        stored, kind = storage_of_words(words.view(torch.int32), bits, k), layer[".scales"].dtype
        element = get_type(f"uint{bits}")
        return QuantizedTensor(element, (n, k), stored, (1, group), scale, scale_type=kind, offset=offset)
    return of_block_type(MODES[mode][2], (n, k), octets_of(words), scale)


FORMAT = Format(
    "mlx",
    ".scales",
    lambda layer: layer[".weight"].dtype == "uint32",
    shape,
    read,
    methods=("metal",),
    parts=(".weight",),
    optional=OFFSETS,
    dtype="scale",
    rounding="each",
    doc="MLX of 2 to 8 bits with offsets, mxfp4, mxfp8, nvfp4",
)
