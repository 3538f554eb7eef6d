"""Gemma's own quantized checkpoints (transformers' method ``gemma``): integers of 2, 4 and 8 bits by rows.

``w = q * scale``. Codes of 2 and 4 bits lie in bytes along a row, lowest bits first, plus the middle one;
those of 8 bits are int8. Widths are told by the configuration alone: the first pattern that is found in the
name of a layer, else ``num_bits``. Tables of embeddings may have scales of blocks. Source: transformers
``integrations/gemma_quant.py``.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from ladder.formats.bits import flipped
from ladder.formats.layer import Format, Layer, Shape, group_of
from tile_types import QuantizedTensor, get_type
from tile_types.errors import CheckpointError

METHOD = "gemma"
WIDTHS = {2: "uint8", 4: "uint8", 8: "int8"}
"""Bits of a code -> type of the array that holds them."""

LONGEST, MOST_REPEATS = 256, 8
"""Characters of a pattern, and repeats in it."""

REPEATED_GROUP = re.compile(r"(?<!\\)\)[*+{]")
"""What takes patterns exponential time."""


@lru_cache
def compiled(pattern: str) -> re.Pattern[str]:
    """Return a pattern of a file.

    Raises CheckpointError if it is none, or may take long.
    """
    simple = len(pattern) <= LONGEST and len(re.findall(r"[*+{]", pattern)) <= MOST_REPEATS
    try:
        if simple and not REPEATED_GROUP.search(pattern):
            return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise CheckpointError(f"the configuration's pattern {pattern[:80]!r} is none: {error}") from error
    raise CheckpointError(f"the configuration's pattern {pattern[:80]!r} is longer than those that are read")


def width(layer: Layer) -> int:
    """Return the bits of a layer's codes."""
    module = layer.name.removesuffix(".weight")
    own = layer.option("module_quant_configs", dict, {})
    found = next((told for pattern, told in own.items() if compiled(pattern).search(module)), None)
    layer.require(isinstance(found, dict | None), f"the configuration says {found!r} of it")
    bits: Any = (found or {}).get("num_bits", layer.option("num_bits", int, 4))
    layer.require(type(bits) is int and bits in WIDTHS, f"codes of {bits!r} bits are not read")
    width: int = bits
    return width


def is_gemma(layer: Layer) -> bool:
    """Tell it by the configuration."""
    return layer.config.get("quant_method") == METHOD


def formed(codes: str, scales: str, name: str, doc: str) -> Format:
    """Return the format of one kind of layer.

    codes, scales: Suffixes of its arrays.
    """

    def shape(layer: Layer) -> Shape:
        n, wide = layer.shape(codes, 2)
        bits = width(layer)
        layer.require_type(codes, WIDTHS[bits])
        return n, wide * 8 // bits

    def read(layer: Layer) -> QuantizedTensor:
        import torch

        (n, k), bits = shape(layer), width(layer)
        layer.require_type(scales, "float32", "float16", "bfloat16")
        rows, groups = layer.shape(scales, 2)
        layer.require(rows == n, f"{rows} rows of scales for {n} of codes")
        octets, scale = layer.tensor(codes).view(torch.uint8), layer.tensor(scales)
        return QuantizedTensor(
            get_type(f"int{bits}"),
            (n, k),
            octets if bits == 8 else flipped(octets, bits),
            (1, group_of(layer, k, groups)),
            scale=scale,
            scale_type=str(scale.dtype).removeprefix("torch."),
        )

    return Format(name, scales, is_gemma, shape, read, methods=(METHOD,), parts=(codes,), doc=doc)


LAYERS = formed(".weight", ".weight_scale", "gemma", "Gemma's linear layers")
TABLES = formed(".embedding_quantized", ".embedding_scale", "gemma-embedding", "Gemma's tables of embeddings")
FORMATS = (LAYERS, TABLES)
