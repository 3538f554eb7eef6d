"""GPTQModel's own names of others' codes: GGUF's blocks as ``qweight``, bitsandbytes' parts as buffers.

Sources: GPTQModel ``nn_modules/qlinear/gguf.py``, ``nn_modules/qlinear/bitsandbytes.py``.
"""

from __future__ import annotations

from collections.abc import Mapping

from ladder.formats import bitsandbytes, gguf
from ladder.formats.files import Stored, parse_json
from ladder.formats.gguf_blocks import BLOCKS, BlockType
from ladder.formats.layer import OVERRIDES, Format, Layer, Loaded, Rule, Shape, TensorInMemory
from tile_types import QuantizedTensor, get_type

GGUF = "gguf"
VARIANTS = ("_s", "_m", "_l", "_g128")
"""How llama.cpp's mixtures of types end, of which the tool takes one type for all layers."""

TYPES: Mapping[str, BlockType] = {row.name: row for row in BLOCKS.values()}

PARTS = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
TABLE, STATE = ".weight_quant_map", ".weight_quant_state"


def block_type(layer: Layer) -> BlockType:
    """Return the type of GGUF's blocks, of which the configuration alone tells.

    Raises CheckpointError if it does not, or layers may differ.
    """
    bits = layer.option("bits", int, 0)
    variant = layer.option("format", str, layer.option("checkpoint_format", str, ""))
    kind, _, of = variant.partition("_")
    name = f"{kind}{bits}_{of}"
    for ending in VARIANTS:
        name = name.removesuffix(ending)
    row = TYPES.get(name)
    told = row is not None and not any(layer.config.get(key) for key in OVERRIDES)
    layer.require(told, f"the configuration has no one type of GGUF for it: {bits} bits of {variant!r}")
    assert row is not None
    octets = layer.shape(".qweight", 2)[1]
    layer.require(octets % row.nbytes == 0, f"rows of {octets} bytes are not made of {row.name} blocks")
    return row


def _blocks(layer: Layer) -> Layer:
    return Layer(layer.name, {"": layer[".qweight"]}, layer.config)


def blocks_shape(layer: Layer) -> Shape:
    """Return [N, K]; the tool fills K up to whole blocks."""
    return gguf.shape_of(block_type(layer), _blocks(layer))


def read_blocks(layer: Layer) -> Loaded:
    """Read blocks of GGUF."""
    return gguf.read(block_type(layer), _blocks(layer))


def own_names(layer: Layer) -> Layer:
    """Return the parts of nf4 or fp4 by the names that bitsandbytes gives them."""
    kind = parse_json(layer.text(STATE), f"{layer.name}: quant_state").get("quant_type")
    state = f".weight.quant_state.bitsandbytes__{kind}"
    layer.require(state in bitsandbytes.STATES, f"its type is {kind!r}")
    parts: dict[str, Stored | TensorInMemory] = {".weight": layer[".weight"], state: layer[STATE]}
    parts |= {f".weight.{part}": layer[f".weight_{part}"] for part in PARTS if f".weight_{part}" in layer}
    return Layer(layer.name, parts, layer.config)


def four_bit_rule(layer: Layer) -> Rule:
    """Return the type that the tool decodes to."""
    return bitsandbytes.four_bit_rule(own_names(layer))


def read_int8(layer: Layer) -> QuantizedTensor:
    """Read ``q * (scb / 127)``."""
    import torch

    n, k = layer.shape(".weight", 2)
    layer.require(layer[".weight_scb"].shape == (n,), f"scb has the shape {list(layer['.weight_scb'].shape)}")
    layer.require_type(".weight_scb", "float32")
    codes, scale = layer.tensor(".weight").view(torch.uint8), layer.tensor(".weight_scb")[:, None] / 127.0
    return QuantizedTensor(get_type("int8"), (n, k), codes, (1, k), scale=scale, scale_type="float32")


FORMATS = (
    Format(
        "gptqmodel-gguf",
        ".qweight",
        lambda layer: layer.config.get("quant_method") == GGUF and layer[".qweight"].dtype == "uint8",
        blocks_shape,
        read_blocks,
        methods=(GGUF,),
        doc="GPTQModel's blocks of GGUF",
    ),
    Format(
        "gptqmodel-4bit",
        TABLE,
        lambda layer: True,
        lambda layer: bitsandbytes.four_bit_shape(own_names(layer)),
        lambda layer: bitsandbytes.read_four_bit(own_names(layer)),
        methods=bitsandbytes.METHOD,
        parts=(".weight", ".weight_absmax", STATE),
        optional=(".weight_nested_absmax", ".weight_nested_quant_map"),
        tool=four_bit_rule,
        doc="GPTQModel's nf4 and fp4 of bitsandbytes, with nested statistics",
    ),
    Format(
        "gptqmodel-int8",
        ".weight_scb",
        lambda layer: layer[".weight"].dtype == "int8",
        lambda layer: layer.shape(".weight", 2),
        read_int8,
        methods=bitsandbytes.METHOD,
        parts=(".weight",),
        doc="GPTQModel's int8 of bitsandbytes",
    ),
)
