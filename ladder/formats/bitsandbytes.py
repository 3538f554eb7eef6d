"""bitsandbytes: nf4 and fp4 in blocks of the flattened matrix, with nested statistics, and row-wise int8.

Sources: bitsandbytes ``functional.py`` (QuantState), ``backends/default/ops.py``, ``nn/modules.py``.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from ladder.formats.bits import swapped_nibbles
from ladder.formats.files import parse_json, require_shape
from ladder.formats.layer import COUNTS, SCALES, Format, Layer, Rule, Shape
from tile_types import QuantizedTensor, get_type
from tile_types.packing import pack_codes, unpack_codes

if TYPE_CHECKING:
    import torch


STATES = {".weight.quant_state.bitsandbytes__nf4": "nf4", ".weight.quant_state.bitsandbytes__fp4": "bnb_fp4"}
"""Suffix of the JSON text -> our name of the codebook."""

CODES = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")
"""Types as which two codes a byte are stored: ``bnb_4bit_quant_storage``."""

RECIPROCAL = 0.007874015718698502
"""1/127 in float32, by which int8 products are scaled."""


def state_of(layer: Layer) -> tuple[str, dict[str, Any]]:
    """Return the codebook and the JSON object that describes a layer."""
    suffix = next((suffix for suffix in STATES if suffix in layer), None)
    layer.require(suffix is not None, "its quant_state is missing")
    assert suffix is not None
    return STATES[suffix], parse_json(layer.text(suffix), f"{layer.name}: quant_state")


def four_bit_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    _, state = state_of(layer)
    shape = state.get("shape")
    require_shape(shape, layer.name)
    assert isinstance(shape, list)
    octets = layer[".weight"].nbytes
    layer.require(
        len(shape) == 2 and 0 not in shape and -(-math.prod(shape) // 2) == octets,
        f"{octets} bytes do not hold codes of {shape}",
    )
    return tuple(shape)


def blocks_of_flat(layer: Layer, values: torch.Tensor, size: int, n: int, k: int) -> tuple[Any, int]:
    """Return per-block numbers of a flattened matrix as [N, K / width], and the width.

    Blocks that cross rows are cut into the largest pieces that do not.
    """
    import torch

    layer.require(values.numel() == -(-n * k // size), f"{values.numel()} scales for blocks of {size}")
    width = math.gcd(k, size)
    if width == size:
        return values.reshape(n, k // size), width
    layer.require(n * (k // width) < 1 << 34, "its blocks cross rows and are too many to cut")
    return values.flatten()[torch.arange(n * (k // width)) * width // size].reshape(n, k // width), width


def read_four_bit(layer: Layer) -> QuantizedTensor:
    """Read nf4 or fp4."""
    import torch

    name, state = state_of(layer)
    n, k = four_bit_shape(layer)
    size = state.get("blocksize")
    layer.require(isinstance(size, int) and 1 <= size <= 1 << 20, f"its block size is {size!r}")
    assert isinstance(size, int)
    ttype = get_type(name)
    layer.require_type(".weight", *CODES)
    _require_table(layer, ".weight.quant_map", torch.from_numpy(ttype.values().copy()))
    scale, width = blocks_of_flat(layer, statistics(layer, state), size, n, k)
    octets = swapped_nibbles(layer.tensor(".weight").contiguous().view(torch.uint8).flatten())
    if k % 2:
        octets = pack_codes(unpack_codes(octets, 4, 2 * len(octets))[: n * k].view(n, k), 4)
    fields = {"scale": scale, "scale_type": "float32"}
    return QuantizedTensor(ttype, (n, k), octets.view(n, -1), (1, width), **fields)


def four_bit_rule(layer: Layer) -> Rule:
    """Return the type that the tool decodes to, which is that of the weight that was quantized."""
    stated = state_of(layer)[1].get("dtype")
    return Rule(stated) if stated in SCALES else Rule()


def _require_table(layer: Layer, suffix: str, expected: torch.Tensor) -> None:
    """Raise unless a table of the file is the one that its name stands for."""
    found = layer.tensor(suffix).flatten().double()
    same = found.shape == expected.shape and bool((found == expected).all())
    layer.require(same, f"{suffix} is another table than the quantization type's own")


def statistics(layer: Layer, state: dict[str, Any]) -> torch.Tensor:
    """Return the largest magnitudes of blocks, float32: decoded first if they are quantized themselves."""
    absmax = layer.tensor(".weight.absmax").flatten()
    if ".weight.nested_absmax" not in layer:
        layer.require_type(".weight.absmax", "float32")
        return absmax
    layer.require_type(".weight.absmax", "uint8")
    layer.require_type(".weight.nested_absmax", "float32")
    size, offset = state.get("nested_blocksize"), state.get("nested_offset")
    layer.require(isinstance(size, int) and 1 <= size <= 1 << 20, f"its nested block size is {size!r}")
    layer.require(isinstance(offset, float | int), f"its nested offset is {offset!r}")
    assert isinstance(size, int)
    assert isinstance(offset, float | int)
    outer = layer.tensor(".weight.nested_absmax").flatten()
    layer.require(len(outer) == -(-len(absmax) // size), f"{len(outer)} nested scales for {len(absmax)}")
    layer.require_type(".weight.nested_quant_map", "float32")
    table = layer.tensor(".weight.nested_quant_map").flatten()
    layer.require(len(table) == 256, f"nested_quant_map has {len(table)} entries")
    spread = outer.repeat_interleave(size)[: len(absmax)]
    total: torch.Tensor = table[absmax.long()] * spread + float(offset)
    return total


def read_int8(layer: Layer) -> QuantizedTensor:
    """Read LLM.int8: ``q * SCB / 127``."""
    import torch

    n, k = layer.shape(".weight", 2)
    layer.require(layer[".SCB"].shape == (n,), f"SCB has the shape {list(layer['.SCB'].shape)}")
    layer.require_type(".SCB", "float32")
    if ".weight_format" in layer:
        layer.require(
            layer.number(".weight_format", *COUNTS) == 0, "its rows are rearranged for a GPU; save it again"
        )
    return QuantizedTensor(
        get_type("int8"),
        (n, k),
        layer.tensor(".weight").view(torch.uint8),
        (1, k),
        scale=layer.tensor(".SCB")[:, None],
        tensor_scale=RECIPROCAL,
        scale_type="float32",
    )


METHOD = ("bitsandbytes",)

FOUR = Format(
    "bitsandbytes-4bit",
    ".weight.quant_map",
    lambda layer: any(suffix in layer for suffix in STATES),
    four_bit_shape,
    read_four_bit,
    methods=METHOD,
    parts=(".weight", ".weight.absmax"),
    optional=(*STATES, ".weight.nested_absmax", ".weight.nested_quant_map"),
    tool=four_bit_rule,
    doc="bitsandbytes nf4 and fp4, with nested statistics",
)
EIGHT = Format(
    "bitsandbytes-int8",
    ".SCB",
    lambda layer: layer[".weight"].dtype == "int8",
    lambda layer: layer.shape(".weight", 2),
    read_int8,
    methods=METHOD,
    parts=(".weight",),
    optional=(".weight_format",),
    rounding="each",
    doc="bitsandbytes LLM.int8",
)
