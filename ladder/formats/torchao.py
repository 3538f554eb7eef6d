"""torchao's tensor subclasses as its safetensors support flattens them.

``layer._weight_qdata`` and the like beside a JSON text per tensor in the header. Sources: torchao
``prototype/safetensors``, ``quantization/quantize_/workflows``, ``prototype/mx_formats``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ladder.formats.bits import by_rows
from ladder.formats.files import Arrays, parse_json
from ladder.formats.layer import COUNTS, SCALES, Format, Layer, Rule, Shape, of_block_type
from tile_types import QuantizedTensor, get_type
from tile_types.errors import CheckpointError
from tile_types.packing import pack_codes

if TYPE_CHECKING:
    import torch


EIGHT_BIT = {"int8": "int8", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}


Names = Callable[[Iterable[str]], Mapping[str, str]]


def rename(prefix: str) -> str:
    """Return the tensor's name: ``a._weight`` is ``a.weight``."""
    module, _, name = prefix.rpartition(".")
    return f"{module}.{name.removeprefix('_')}" if module else name.removeprefix("_")


def attributes(layer: Layer) -> tuple[str, dict[str, Any]]:
    """Return the class of a tensor and its attributes."""
    text = layer.metadata.get(layer.name)
    layer.require(text is not None, "the header does not describe it")
    assert text is not None
    described = parse_json(text.encode(), f"{layer.name}: its description")
    kind, data = described.get("_type"), described.get("_data")
    layer.require(isinstance(kind, str) and isinstance(data, dict), "its description has no class")
    parts = described.get("_tensor_data_names")
    for part in parts if isinstance(parts, list) else ():
        layer.require(f"_{part}" in layer, f"its part '_{part}' is missing, or not known")
    assert isinstance(kind, str)
    assert isinstance(data, dict)
    return kind, data


def described(arrays: Arrays, names: Names) -> Arrays:
    """Describe tensors by the names of their arrays, where the header has others.

    transformers describes the tensors of a model by the model's names, and stores their arrays by those that
    the model's files always had.

    names: Of names in the file, those in the model -> them.
    """
    found = (rename(name.removesuffix(FORMAT.key)) for name in arrays if name.endswith(FORMAT.key))
    others = names([name for name in found if name not in arrays.metadata])
    texts = {others.get(name, name): text for name, text in arrays.metadata.items()}
    return Arrays(arrays.stored, texts)


def is_undescribed(name: str, arrays: Arrays) -> bool:
    """Tell codes beside scales that the header does not describe by the name that they have."""
    prefix = name.removesuffix(FORMAT.key)
    return prefix != name and prefix.endswith("_weight") and prefix + FORMAT.parts[0] in arrays


def part_names(metadata: Mapping[str, str]) -> Iterator[str]:
    """Yield the names that the arrays of all quantized tensors have which a header describes."""
    for name, text in metadata.items():
        if '"_tensor_data_names"' in text:
            module, _, own = name.rpartition(".")
            prefix = f"{module}._{own}" if module else f"_{own}"
            yield from (prefix + part for part in (FORMAT.key, *FORMAT.parts, *TILES.parts, *FORMAT.optional))


def named(value: Any) -> str:
    """Return the name of an encoded dtype."""
    return str(value.get("_data")) if isinstance(value, dict) else ""


def shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    n, k = layer.shape("_qdata", 2)
    kind, data = attributes(layer)
    return n, 2 * k if kind in ("Int4Tensor", "NVFP4Tensor") or _is_fp4(kind, data) else k


def _is_fp4(kind: str, data: dict[str, Any]) -> bool:
    return kind == "MXTensor" and "float4" in named(data.get("elem_dtype"))


KNOWN = (
    *("block_size", "shape", "elem_dtype", "target_dtype", "is_swizzled_scales", "reduce_range"),
    *("dtype", "orig_dtype", "activation_dtype", "activation_quantization", "act_quant_kwargs"),
    *("mm_config", "kernel_preference", "use_triton_kernel"),
)
"""Attributes of tensors: the first line's say how they are stored, the others nothing of their values."""


def read(layer: Layer) -> QuantizedTensor:
    """Read a tensor of any class of `READERS`."""
    kind, data = attributes(layer)
    reader = READERS.get(kind)
    if reader is None or (reader is tiles) != (TILES.parts[0] in layer):
        raise CheckpointError(f"{layer.name}: torchao's {kind} is not read; known: {', '.join(READERS)}")
    layer.require("_act_pre_scale" not in layer, "it scales activations first, which no kernel here does")
    others = [name for name, value in data.items() if name not in KNOWN and value not in (None, False)]
    layer.require(not others, f"its {', '.join(others)[:80]}: what a {kind} does with it is not known")
    return reader(layer, data)


def affine(layer: Layer, data: dict[str, Any], *, fp8: bool = False) -> QuantizedTensor:
    """Read integers in bytes, or fp8: ``(q - zero) * scale``."""
    import torch

    n, k = layer.shape("_qdata", 2)
    kinds = (name for name in EIGHT_BIT if name.startswith("float8") == fp8)
    layer.require_type("_qdata", *kinds)
    layer.require_type("_scale", *SCALES)
    scale = layer.tensor("_scale")
    block = block_of(layer, data, scale, n, k)
    groups = -(-n // block[0]), -(-k // block[1])
    layer.require(_long(scale.shape) == _long(groups), f"scales have the shape {list(scale.shape)}")
    scale = scale.reshape(groups)
    target = named(data.get("target_dtype")) or EIGHT_BIT[layer["_qdata"].dtype]
    ttype = get_type(target)
    layer.require(target in EIGHT_BIT.values() or ttype.is_integer, f"target_dtype is {target}")
    codes = layer.tensor("_qdata").view(torch.uint8)
    zero = zero_of(layer, scale) if ttype.is_integer else None
    return QuantizedTensor.from_codes(
        codes & ((1 << ttype.elem_bits) - 1),
        ttype,
        block,
        scale=scale,
        zero=zero,
        zero_kind="none" if zero is None else "float" if zero.is_floating_point() else "integer",
        scale_type=layer["_scale"].dtype,
    )


def zero_of(layer: Layer, scale: torch.Tensor) -> torch.Tensor | None:
    """Return zero points, shaped as scales, if there are any but 0."""
    import torch

    if "_zero_point" not in layer:
        return None
    layer.require_type("_zero_point", *COUNTS, *SCALES)
    zero = layer.tensor("_zero_point")
    layer.require(_long(zero.shape) == _long(scale.shape), "zero points do not fit scales")
    zero = zero.reshape(scale.shape)
    if not bool((zero != 0).any()):
        return None
    if zero.is_floating_point():
        return zero.to(scale.dtype)
    layer.require(int(zero.min()) >= -128 and int(zero.max()) <= 127, "zero points exceed a byte")
    return zero.to(torch.int8)


def _long(shape: Sequence[int]) -> list[int]:
    """Return the extents other than 1."""
    return [extent for extent in shape if extent != 1]


def block_of(layer: Layer, data: dict[str, Any], scale: torch.Tensor, n: int, k: int) -> tuple[int, int]:
    """Return the rows and columns that share a scale."""
    match data.get("block_size"):
        case [int(height), int(width)] if height >= 1 and width >= 1:
            block = min(height, n), min(width, k)
        case int(width) if width >= 1:
            block = 1, min(width, k)
        case other:
            raise CheckpointError(f"{layer.name}: block_size is {other!r}")
    groups = -(-n // block[0]) * -(-k // block[1])
    layer.require(scale.numel() == groups, f"{scale.numel()} scales for {groups} blocks")
    return block


def int4(layer: Layer, data: dict[str, Any]) -> QuantizedTensor:
    """Read signed nibbles, low first: ``q * scale + zero``, both stored [K / g, N]."""
    n, octets = layer.shape("_qdata", 2)
    layer.require_type("_qdata", "uint8", "int8")
    layer.require_type("_scale", *SCALES)
    layer.require_type("_zero_point", layer["_scale"].dtype)
    scale, zero = layer.tensor("_scale"), layer.tensor("_zero_point")
    block = block_of(layer, data, scale, n, 2 * octets)
    fits = block[0] == 1 and tuple(scale.shape) == (-(-2 * octets // block[1]), n) == tuple(zero.shape)
    layer.require(fits, f"scales have the shape {list(scale.shape)}")
    import torch

    offset = zero.t().contiguous() if bool((zero != 0).any()) else None
    return QuantizedTensor(
        get_type("int4"),
        (n, 2 * octets),
        layer.tensor("_qdata").view(torch.uint8),
        block,
        scale=scale.t().contiguous(),
        scale_type=layer["_scale"].dtype,
        offset=offset,
    )


TILE = 8
"""Rows of a tile of tinygemm."""

TILE_GROUPS = "_scale_and_zero"
"""Part that marks tiles: the scale and the zero of each group, side by side, [K / g, N, 2]."""


def tiles_shape(layer: Layer) -> Shape:
    """Return [N, K], from the description: tiles are padded, to multiples of 8 and 1024."""
    high, wide, lanes, words = layer.shape("_qdata", 4)
    match attributes(layer)[1].get("shape"):
        case [int(n), int(k)] if 1 <= n <= TILE * high and 1 <= k <= 32 * words * wide and lanes == 32:
            return n, k
        case other:
            shape = list(layer["_qdata"].shape)
            raise CheckpointError(f"{layer.name}: its shape is {str(other)[:80]}, and its tiles are {shape}")


def tiles(layer: Layer, data: dict[str, Any]) -> QuantizedTensor:
    """Read the tiles of tinygemm, which are stored as tensor cores hold them: ``(q - 8) * scale + zero``."""
    import torch

    n, k = tiles_shape(layer)
    layer.require_type("_qdata", "int32")
    layer.require_type(TILE_GROUPS, "bfloat16")
    words = layer.tensor("_qdata")
    padded = 32 * words.shape[3] * words.shape[1]
    pair = layer.tensor(TILE_GROUPS)
    match data.get("block_size"):
        case [1, int(group)] if group >= 1 and padded % group == 0:
            pass
        case other:
            raise CheckpointError(f"{layer.name}: block_size is {str(other)[:80]}")
    fits = tuple(pair.shape) == (padded // group, TILE * len(words), 2)
    layer.require(fits, f"scales and zeros have the shape {list(pair.shape)}")
    scale, zero = pair[: -(-k // group), :n].permute(2, 1, 0).contiguous()

    def some_tiles(part: torch.Tensor) -> torch.Tensor:
        octets = part.contiguous().view(torch.uint8).view(*part.shape[:2], TILE, 4, -1, 4)
        nibbles = torch.stack([octets & 15, octets >> 4], -1)
        # a lane's word holds the odd column of each pair above the even ones; two tiles of 16; their halves
        ordered = nibbles.reshape(*nibbles.shape[:5], 2, 2, 2).permute(0, 2, 1, 4, 6, 7, 3, 5)
        packed: torch.Tensor = pack_codes(ordered.reshape(-1, padded)[:, :k] ^ 8, 4)
        return packed

    return QuantizedTensor(
        get_type("int4"),
        (n, k),
        by_rows(some_tiles, words, TILE * padded)[:n],
        (1, min(group, k)),
        scale=scale,
        scale_type="bfloat16",
        offset=zero if bool((zero != 0).any()) else None,
    )


def unswizzled(layer: Layer, data: dict[str, Any], rows: int, columns: int) -> torch.Tensor:
    """Return the bytes of scales [N, K / b]."""
    import torch

    if data.get("is_swizzled_scales"):
        return untiled(layer, "_scale", rows, columns)
    octets = layer.tensor("_scale").contiguous().view(torch.uint8)
    fits = _long(octets.shape) == _long((rows, columns))
    layer.require(fits, f"scales {list(octets.shape)} for {rows} x {columns} blocks")
    return octets.reshape(rows, columns)


def untiled(layer: Layer, part: str, rows: int, columns: int) -> torch.Tensor:
    """Return the bytes of scales that lie in cuBLAS's layout, in which tiles of 128 x 4 are 32 x 4 x 4."""
    import torch

    octets = layer.tensor(part).contiguous().view(torch.uint8)
    high, wide = -(-rows // 128), -(-columns // 4)
    layer.require(octets.numel() == high * wide * 512, f"{octets.numel()} swizzled scales")
    tiles = octets.reshape(high, wide, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * 128, wide * 4)[:rows, :columns].contiguous()


def mx(layer: Layer, data: dict[str, Any]) -> QuantizedTensor:
    """Read MX types with exponents per 32 columns."""
    import torch

    n, k = shape(layer)
    name = named(data.get("elem_dtype"))
    element = "fp4_e2m1" if "float4" in name else EIGHT_BIT.get(name)
    layer.require(element is not None and data.get("block_size") == 32, f"elements {name!r} are not read")
    assert element is not None
    layer.require(k % 32 == 0, f"{k} columns are no multiple of 32")
    layer.require_type("_qdata", "uint8" if element == "fp4_e2m1" else name)
    layer.require_type("_scale", "float8_e8m0fnu", "uint8")
    scale = unswizzled(layer, data, n, k // 32)
    name = "mxfp4" if element == "fp4_e2m1" else f"mx{element}"
    return of_block_type(name, (n, k), layer.tensor("_qdata").view(torch.uint8), scale)


def nvfp4(layer: Layer, data: dict[str, Any]) -> QuantizedTensor:
    """Read NVFP4: ``q * (per_tensor_scale * scale)``."""
    import torch

    n, k = shape(layer)
    layer.require(data.get("block_size") == 16 and k % 16 == 0, "blocks of other than 16 columns")
    layer.require_type("_qdata", "uint8")
    layer.require_type("_scale", "float8_e4m3fn")
    factor = layer.number("_per_tensor_scale") if "_per_tensor_scale" in layer else None
    scale = unswizzled(layer, data, n, k // 16)
    return of_block_type("nvfp4", (n, k), layer.tensor("_qdata").view(torch.uint8), scale, factor)


def rule(layer: Layer) -> Rule:
    """Return how a tensor is dequantized: to the type of the weight that was quantized."""
    data = attributes(layer)[1]
    stated = named(data.get("dtype")) or named(data.get("orig_dtype"))
    return Rule("float32", "scales_first", stated if stated in SCALES else "")


ACTIVATIONS = (
    *("_act_scale", "_act_zero_point", "_act_quant_scale", "_act_quant_zero_point"),
    *("_act_per_tensor_scale", "_output_act_quant_scale"),
)
"""How activations are quantized: nothing of the weight depends on it."""

READERS: dict[str, Callable[[Layer, dict[str, Any]], QuantizedTensor]] = {
    "IntxUnpackedToInt8Tensor": affine,
    "Int8Tensor": affine,
    "Float8Tensor": partial(affine, fp8=True),
    "Int4Tensor": int4,
    "Int4TilePackedTo4dTensor": tiles,
    "MXTensor": mx,
    "NVFP4Tensor": nvfp4,
}
"""torchao's class -> what reads it."""

FORMAT = Format(
    "torchao",
    "_qdata",
    lambda layer: layer.name in layer.metadata,
    shape,
    read,
    parts=("_scale",),
    optional=("_zero_point", "_per_tensor_scale", "_act_pre_scale", *ACTIVATIONS),
    rename=rename,
    tool=rule,
    doc="torchao's safetensors: Int8, IntxUnpackedToInt8, Int4, Float8, MX, NVFP4",
)

TILES = Format(
    "torchao_tiles",
    "_qdata",
    FORMAT.fits,
    tiles_shape,
    read,
    parts=(TILE_GROUPS,),
    optional=FORMAT.optional,
    rename=rename,
    dtype="bfloat16",
    doc="torchao's safetensors: Int4 in tinygemm's tiles",
)
