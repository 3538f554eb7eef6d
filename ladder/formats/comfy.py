"""ComfyUI's quantized layers (comfy-kitchen): a JSON text per layer says how its arrays are to be read.

The text is the array ``layer.comfy_quant``, or an entry of ``_quantization_metadata`` in the header. Scales
of NVFP4 and MXFP8 lie in cuBLAS's tiles, the first code of an NVFP4 byte in its upper half; rows are padded.
Sources: ComfyUI ``QUANTIZATION.md``, comfy-kitchen ``tensor/{fp8,int8,mxfp8,nvfp4}.py``.
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


@lru_cache(maxsize=1)
def _of_header(text: str) -> Mapping[str, Any]:
    found = parse_json(text.encode(), HEADER).get("layers")
    return found if isinstance(found, dict) else {}


def description(layer: Layer) -> Mapping[str, Any] | None:
    """Return what is said of a layer; None if nothing is."""
    if MARK in layer:
        return parse_json(layer.text(MARK), f"{layer.name}: {MARK}")
    found = _of_header(layer.metadata.get(HEADER, "{}")).get(layer.name.removesuffix(".weight"))
    layer.require(found is None or isinstance(found, dict), f"{HEADER} says {found!r}")
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


def _nvfp4_shape(layer: Layer) -> Shape:
    n, octets = layer.shape(".weight", 2)
    return n, 2 * octets


def _nvfp4(layer: Layer) -> QuantizedTensor:
    """Read NVFP4: ``q * (scale_2 * scale)``."""
    n, k = _nvfp4_shape(layer)
    layer.require(k % 16 == 0, f"{k} columns are no multiple of 16")
    layer.require_type(".weight", "uint8")
    layer.require_type(".weight_scale", "float8_e4m3fn")
    codes = layer.tensor(".weight")
    scale, factor = untiled(layer, ".weight_scale", n, k // 16), layer.number(".weight_scale_2")
    return of_block_type("nvfp4", (n, k), codes << 4 | codes >> 4, scale, factor)


def _mxfp8(layer: Layer) -> QuantizedTensor:
    """Read MXFP8: exponents of 32 columns."""
    import torch

    n, k = _plain_shape(layer)
    layer.require(k % 32 == 0, f"{k} columns are no multiple of 32")
    layer.require_type(".weight", "float8_e4m3fn", "float8_e5m2")
    layer.require_type(".weight_scale", "float8_e8m0fnu", "uint8")
    element = EIGHT_BIT[layer[".weight"].dtype]
    scale = untiled(layer, ".weight_scale", n, k // 32)
    return of_block_type(f"mx{element}", (n, k), layer.tensor(".weight").view(torch.uint8), scale)


def _eight_bit(*kinds: str) -> Callable[[Layer], QuantizedTensor]:
    def read(layer: Layer) -> QuantizedTensor:
        layer.require_type(".weight", *kinds)
        return read_eight_bit(layer)

    return read


READERS: dict[str, tuple[Callable[[Layer], Shape], Callable[[Layer], QuantizedTensor]]] = {
    "float8_e4m3fn": (_plain_shape, _eight_bit("float8_e4m3fn")),
    "float8_e5m2": (_plain_shape, _eight_bit("float8_e5m2")),
    "int8_tensorwise": (_plain_shape, _eight_bit("int8")),
    "int8_blockwise": (_plain_shape, _eight_bit("int8")),
    "mxfp8": (_plain_shape, _mxfp8),
    "nvfp4": (_nvfp4_shape, _nvfp4),
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
