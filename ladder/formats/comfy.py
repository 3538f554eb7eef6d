"""ComfyUI's quantized layers (comfy-kitchen): a JSON text per layer says how its arrays are to be read.

The text is the array ``layer.comfy_quant``, or an entry of ``_quantization_metadata`` in the header. Scales
of NVFP4 and MXFP8 lie in cuBLAS's tiles, the first code of an NVFP4 byte in its upper half; rows are padded.
Sources: ComfyUI ``QUANTIZATION.md``, comfy-kitchen ``tensor/{fp8,int8,mxfp8,nvfp4}.py``; convert_to_quant,
which also writes fp8 with scales of rows and of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from ladder.formats.compressed import EIGHT_BIT, read_eight_bit
from ladder.formats.files import parse_json
from ladder.formats.layer import Format, Layer, Shape, of_block_type
from ladder.formats.torchao import untiled

if TYPE_CHECKING:
    from tile_types import QuantizedTensor

MARK = ".comfy_quant"
HEADER = "_quantization_metadata"
EXTENTS = "orig_shape"
"""Entry of a description: the extents without padding (convert_to_quant)."""

MOST_PADDING = 32
"""Rows and columns are padded to less than so many more."""


@lru_cache(maxsize=1)
def _of_header(text: str) -> Mapping[str, Any]:
    found = parse_json(text.encode(), HEADER).get("layers")
    return found if isinstance(found, dict) else {}


def description(layer: Layer) -> Mapping[str, Any] | None:
    """Return what is said of a layer; None if nothing is."""
    found = _of_header(layer.metadata.get(HEADER, "{}")).get(layer.name.removesuffix(".weight"))
    layer.require(found is None or isinstance(found, dict), f"{HEADER} says {found!r}")
    if MARK in layer:
        return {**(found or {}), **parse_json(layer.text(MARK), f"{layer.name}: {MARK}")}
    return found


def is_described(layer: Layer) -> bool:
    """Tell a layer that is described.

    Raises CheckpointError if its description is none that is read here.
    """
    described = description(layer)
    if described is None:
        return False
    form, rotated = described.get("format"), described.get("convrot")
    known = ", ".join(READERS)
    layer.require(
        isinstance(form, str) and form in READERS, f"ComfyUI's format {form!r} is not read; known: {known}"
    )
    layer.require(not rotated, "ComfyUI rotates its inputs (convrot), which is not done here")
    return True


def _reader(layer: Layer) -> tuple[Callable[[Layer], Shape], Callable[[Layer], QuantizedTensor]]:
    described = description(layer)
    assert described is not None
    return READERS[described["format"]]


def _plain_shape(layer: Layer) -> Shape:
    return layer.shape(".weight", 2)


def _stored_nvfp4(layer: Layer) -> Shape:
    n, octets = layer.shape(".weight", 2)
    return n, 2 * octets


def _without_padding(layer: Layer, stored: Shape) -> tuple[int, int]:
    """Return the extents of a matrix before it was padded for storage, where its description says them."""
    found = (description(layer) or {}).get(EXTENTS)
    if found is None:
        return stored[0], stored[1]
    pair = isinstance(found, list) and len(found) == 2 and all(type(value) is int for value in found)
    fits = pair and all(held - MOST_PADDING < own <= held for own, held in zip(found, stored, strict=True))
    layer.require(fits and min(found) > 0, f"{EXTENTS} is {str(found)[:80]} for codes of {list(stored)}")
    return found[0], found[1]


def _nvfp4(layer: Layer) -> QuantizedTensor:
    """Read NVFP4: ``q * (scale_2 * scale)``."""
    rows, columns = _stored_nvfp4(layer)
    layer.require(columns % 16 == 0, f"{columns} columns are no multiple of 16")
    layer.require_type(".weight", "uint8")
    layer.require_type(".weight_scale", "float8_e4m3fn")
    n, k = _without_padding(layer, (rows, columns))
    codes = layer.tensor(".weight")[:n, : -(-k // 2)]
    scale = untiled(layer, ".weight_scale", rows, columns // 16)[:n, : -(-k // 16)].contiguous()
    return of_block_type("nvfp4", (n, k), codes << 4 | codes >> 4, scale, layer.number(".weight_scale_2"))


def _mxfp8(layer: Layer) -> QuantizedTensor:
    """Read MXFP8: exponents of 32 columns."""
    import torch

    rows, columns = _plain_shape(layer)
    layer.require(columns % 32 == 0, f"{columns} columns are no multiple of 32")
    layer.require_type(".weight", "float8_e4m3fn", "float8_e5m2")
    layer.require_type(".weight_scale", "float8_e8m0fnu", "uint8")
    element = EIGHT_BIT[layer[".weight"].dtype]
    n, k = _without_padding(layer, (rows, columns))
    scale = untiled(layer, ".weight_scale", rows, columns // 32)[:n, : -(-k // 32)].contiguous()
    codes = layer.tensor(".weight").view(torch.uint8)[:n, :k].contiguous()
    return of_block_type(f"mx{element}", (n, k), codes, scale)


def _eight_bit(*kinds: str) -> Callable[[Layer], QuantizedTensor]:
    def read(layer: Layer) -> QuantizedTensor:
        layer.require_type(".weight", *kinds)
        return read_eight_bit(layer)

    return read


READERS: dict[str, tuple[Callable[[Layer], Shape], Callable[[Layer], QuantizedTensor]]] = {
    "float8_e4m3fn": (_plain_shape, _eight_bit("float8_e4m3fn")),
    "float8_e5m2": (_plain_shape, _eight_bit("float8_e5m2")),
    "float8_e4m3fn_rowwise": (_plain_shape, _eight_bit("float8_e4m3fn")),
    "float8_e4m3fn_blockwise": (_plain_shape, _eight_bit("float8_e4m3fn")),
    "int8_tensorwise": (_plain_shape, _eight_bit("int8")),
    "int8_blockwise": (_plain_shape, _eight_bit("int8")),
    "mxfp8": (lambda layer: _without_padding(layer, _plain_shape(layer)), _mxfp8),
    "nvfp4": (lambda layer: _without_padding(layer, _stored_nvfp4(layer)), _nvfp4),
}
"""ComfyUI's name of a format -> extents, and what reads it."""


def _format(key: str, *parts: str) -> Format:
    return Format(
        "comfy",
        key,
        is_described,
        lambda layer: _reader(layer)[0](layer),
        lambda layer: _reader(layer)[1](layer),
        parts=(".weight", *parts),
        optional=(".weight_scale_2", MARK),
        rounding="scales_first",
        doc="ComfyUI: fp8, int8, MXFP8, NVFP4",
    )


FORMATS = (_format(".weight_scale"), _format(".weight_scale_2", ".weight_scale"))
