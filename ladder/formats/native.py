"""Our own checkpoints: canonical storage in one safetensors file, read a tensor at a time.

A quantized tensor ``a.weight`` is stored as ``a.weight.storage``, ``a.weight.scale``, ... and
``a.weight.description``, JSON text as bytes: the keys of `ladder.Linear`'s state dict.
The header's metadata say how the dequantization of the tool that made it rounds.
"""

from __future__ import annotations

from typing import Any

from ladder.formats.files import parse_json, require_shape
from ladder.formats.layer import SCALES, Format, Layer, Rule, Shape
from tile_types import QuantizedTensor
from tile_types.quantized import ROUNDINGS

KEY = ".description"
CODES = ".storage"
ARRAYS = (".scale", ".zero", ".offset", ".columns")


def description(layer: Layer) -> dict[str, Any]:
    """Return what a stored tensor says of itself."""
    return parse_json(layer.text(KEY), f"{layer.name}: its description")


def tool(layer: Layer) -> Rule:
    """Return how the tool that made a tensor dequantizes it."""
    text = layer.metadata.get(layer.name, "scale once")
    dtype, _, others = text.partition(" ")
    rounding, _, result = others.partition(" ")
    known = dtype in ("scale", *SCALES) and rounding in ROUNDINGS and result in ("", *SCALES)
    layer.require(known, f"the metadata say that it is dequantized by {text[:80]!r}")
    return Rule(dtype, rounding, result)


def shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    extents = description(layer).get("shape")
    require_shape(extents, layer.name)
    assert isinstance(extents, list)
    layer.require(len(extents) == 2 and 0 not in extents, f"its shape is {extents}")
    return tuple(extents)


def read(layer: Layer) -> QuantizedTensor:
    """Read a tensor that `native_write.write`, or the state dict of a `ladder.Linear`, stored."""
    shape(layer)
    arrays = {suffix[1:]: layer.tensor(suffix) for suffix in layer.parts if suffix != KEY}
    return QuantizedTensor.from_dict({"arrays": arrays, "metadata": description(layer)})


FORMAT = Format(
    "ladder",
    KEY,
    lambda layer: True,
    shape,
    read,
    parts=(CODES,),
    optional=ARRAYS,
    result="",
    tool=tool,
    doc="canonical storage: what `ladder convert` and `ladder.Linear` write",
)
