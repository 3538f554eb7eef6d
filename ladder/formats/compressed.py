"""compressed-tensors (llm-compressor): packed integers, and 8-bit, MX and NVFP4 weights beside scales.

Also what others store alike: per-tensor fp8 of ModelOpt and FBGEMM. Sources: compressed-tensors
``compressors/{pack_quantized,naive_quantized,mxfp4,mxfp6,mxfp8,nvfp4}``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypeGuard

from ladder.formats.bits import by_rows, flipped, repacked, storage_of_words, words_to_codes
from ladder.formats.layer import AUTO_ROUND, SCALES, Format, Layer, Shape, group_of, of_block_type
from tile_types import QuantizedTensor, get_type
from tile_types.packing import is_dense, pack_codes

if TYPE_CHECKING:
    import torch


EIGHT_BIT = {"int8": "int8", "float8_e4m3fn": "fp8_e4m3", "float8_e5m2": "fp8_e5m2"}
"""torch's name of a weight's element -> ours."""

DENSE_SINCE = (0, 17)
"""The version of compressed-tensors since which codes cross words."""


def weight_options(layer: Layer) -> Iterator[dict[str, Any]]:
    """Yield the options of weights of each group of the configuration."""
    groups = layer.config.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        options = group.get("weights") if isinstance(group, dict) else None
        if isinstance(options, dict):
            yield options


def require_described(layer: Layer, kind: str, bits: int, zeros: bool, least: int | None = None) -> None:
    """Raise unless the configuration, if it describes weights, describes such codes.

    least: Of the bits that the configuration may say, where narrower codes are stored in wider ones.
    """
    described = [option for option in weight_options(layer) if option.get("strategy")]
    fitting = (
        option.get("type", kind) == kind
        and (bits if least is None else least) <= option.get("num_bits", bits) <= bits
        and (zeros or option.get("symmetric") is not False)
        for option in described
    )
    text = f"{kind}{bits} {'with' if zeros else 'without'} zero points"
    layer.require(not described or any(fitting), f"its codes are {text}, the configuration says otherwise")


def packed_form(layer: Layer) -> tuple[int, int, int, bool]:
    """Return (N, K, bits, whether codes cross words) of packed integers, from extents and configuration."""
    n, words = layer.shape(".weight_packed", 2)
    extents = layer.tensor(".weight_shape").flatten().tolist()
    layer.require(len(extents) == 2 and extents[0] == n, f"weight_shape is {extents[:8]}, with {n} rows")
    k = int(extents[1])
    layer.require(1 <= k <= 32 * words, f"weight_shape is {extents}, with {words} words per row")
    stated = {options.get("num_bits") for options in weight_options(layer)}
    widths = [(bits, -(-k * bits // 32), True) for bits in range(1, 9)]
    widths += [(bits, -(-k // (32 // bits)), False) for bits in (3, 5, 6, 7)]
    fitting = [(bits, dense) for bits, extent, dense in widths if extent == words]
    chosen = [found for found in fitting if not stated or found[0] in stated]
    layer.require(bool(chosen), f"{words} words per row for {k} codes fit no width")
    if len(chosen) > 1 and (crossing := crosses_words(layer)) is not None:
        chosen = [found for found in chosen if found[1] is crossing] or chosen
    layer.require(
        len({bits for bits, _ in chosen}) == 1, f"{words} words per row fit several widths: {chosen}"
    )
    return n, k, *chosen[0]


def crosses_words(layer: Layer) -> bool | None:
    """Tell whether codes cross words in the version that wrote a layer; None if that is not said."""
    found = re.match(r"(\d{1,9})\.(\d{1,9})", str(layer.config.get("version")))
    return None if found is None else (int(found[1]), int(found[2])) >= DENSE_SINCE


def packed_shape(layer: Layer) -> Shape:
    """Return [N, K]."""
    return packed_form(layer)[:2]


def read_packed(layer: Layer) -> QuantizedTensor:
    """Read packed integers; codes are biased by the middle one."""
    import torch

    layer.require_type(".weight_packed", "int32")
    n, k, bits, dense = packed_form(layer)
    scale, block = scales_of(layer, n, k)
    words = layer.tensor(".weight_packed")
    stored = storage_of_words(words, bits, k, dense=dense)
    order, index = columns_of(layer, k, scale)
    if order is not None:
        moved = order.long()
        stored = repacked(stored, bits, k, lambda codes: codes[:, moved])
        scale, block = scale[:, index], (1, block_of(index))
        scale = scale[:, :: block[1]].contiguous()
    zero = None
    if ".weight_zero_point" in layer:
        packed = block[0] == 1 and len(layer.shape(".weight_zero_point")) == 2
        if packed and layer[".weight_zero_point"].dtype == "int32":
            zero = packed_zeros(layer, n, bits, dense=dense)
        else:
            zero = zeros_of(layer, n, k, bits) + (1 << (bits - 1))
        zero = zero.to(torch.uint8)
        if order is not None:
            layer.require(int(index.max()) < zero.shape[1], "weight_g_idx names a group without zero point")
            zero = zero[:, index][:, :: block[1]].contiguous()
    elif is_dense(bits):
        stored = flipped(stored, bits)
    else:
        stored = repacked(stored, bits, k, lambda codes: codes ^ (1 << (bits - 1)))
    layer.require(zero is None or zero.shape == scale.shape, "zero points do not fit scales")
    require_described(layer, "int", bits, zero is not None)
    return QuantizedTensor(
        get_type(f"{'int' if zero is None else 'uint'}{bits}"),
        (n, k),
        stored,
        block,
        scale=scale,
        zero=zero,
        zero_kind="none" if zero is None else "integer",
        scale_type=scale_name(scale),
        columns=None if order is None else order.to(torch.int32),
    )


def packed_zeros(layer: Layer, n: int, bits: int, *, dense: bool) -> torch.Tensor:
    """Return zero points that are packed along outputs as codes, a matrix."""
    zero = layer.tensor(".weight_zero_point")
    layer.require(
        zero.shape[0] * (32 if dense else 32 // bits * bits) >= n * bits,
        f"{zero.shape[0]} words of zero points for {n} outputs",
    )
    return words_to_codes(zero.t(), bits, n, dense=dense).t().contiguous()


def zeros_of(layer: Layer, n: int, k: int, bits: int) -> torch.Tensor:
    """Return zero points that are stored as they are: one per scale, signed, in int16."""
    import torch

    layer.require_type(".weight_zero_point", "int8", "int32")
    zero, _ = blocks_of(layer, ".weight_zero_point", n, k)
    middle = 1 << (bits - 1)
    within = -middle <= int(zero.min()) and int(zero.max()) < middle
    layer.require(within, f"weight_zero_point is no number of {bits} bits")
    return zero.to(torch.int16)


def columns_of(layer: Layer, k: int, scale: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the order of columns that sorts them by group, if they are not sorted, and their groups."""
    import torch

    if ".weight_g_idx" not in layer:
        return None, torch.empty(0, dtype=torch.int64)
    layer.require_type(".weight_g_idx", "int32", "int64")
    index = layer.tensor(".weight_g_idx").long()
    layer.require(tuple(index.shape) == (k,), f"weight_g_idx has the shape {list(index.shape)}")
    if bool((index == -1).all()):
        return None, index
    within = int(index.min()) >= 0 and int(index.max()) < scale.shape[1]
    layer.require(within, f"weight_g_idx names a group beyond the {scale.shape[1]} that there are")
    order = torch.argsort(index, stable=True)
    return order, index[order]


def block_of(index: torch.Tensor) -> int:
    """Return the largest run length that divides all runs of equal numbers but the last."""
    import torch

    counts = torch.unique_consecutive(index, return_counts=True)[1].tolist()
    return math.gcd(*counts[:-1]) or counts[-1]


def scales_of(layer: Layer, n: int, k: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return the scales as a matrix, and the block that each serves."""
    layer.require_type(".weight_scale", *SCALES)
    return blocks_of(layer, ".weight_scale", n, k)


def blocks_of(layer: Layer, suffix: str, n: int, k: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return per-block numbers as a matrix [ceil(N/bn), ceil(K/bk)], and (bn, bk)."""
    scale = layer.tensor(suffix)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    if scale.ndim == 1:
        scale = scale[:, None]
    if scale.ndim == 4 and scale.shape[1] == scale.shape[3] == 1:  # ModelOpt's of blocks
        scale = scale[:, 0, :, 0]
    layer.require(scale.ndim == 2 and 0 not in scale.shape, f"{suffix} has the shape {list(scale.shape)}")
    rows, columns = scale.shape
    block = stated_block(layer, n, k, rows, columns)
    if block is not None:
        return scale.contiguous(), block
    layer.require(n % rows == 0, f"{rows} rows of {suffix} do not divide {n} outputs")
    return scale.contiguous(), (n // rows, group_of(layer, k, columns))


def stated_block(layer: Layer, n: int, k: int, rows: int, columns: int) -> tuple[int, int] | None:
    """Return the block of the configuration that gives so many scales; None if it says nothing certain.

    Raises CheckpointError if a configuration that says how weights are divided allows no such number.
    """
    certain = [*divisions(layer, n, k)]
    for height, width in (*certain, *stated_blocks(layer)):
        if (-(-n // height), -(-k // width)) == (rows, columns):
            return height, width
    text = f"{rows} x {columns} scales for [{n}, {k}], the configuration says blocks of {certain[:4]}"
    layer.require(not certain, text)
    return None


def divisions(layer: Layer, n: int, k: int) -> Iterator[tuple[int, int]]:
    """Yield the blocks of the configuration's strategies, or of ``weight_block_size``."""
    if _is_block(block := layer.config.get("weight_block_size")):
        yield block[0], block[1]
    for options in weight_options(layer):
        group, structure = options.get("group_size"), options.get("block_structure")
        match options.get("strategy"):
            case "tensor":
                yield n, k
            case "channel":
                yield 1, k
            case "group" | "tensor_group" if isinstance(group, int) and group >= 1:
                yield 1, group
            case "block" if _is_block(structure):
                yield structure[0], structure[1]


def _is_block(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is int and x >= 1 for x in value)


def stated_blocks(layer: Layer) -> Iterator[tuple[int, int]]:
    """Yield the block shapes that the configuration states, in any of its forms."""
    for options in (layer.config, *weight_options(layer)):
        for key in ("weight_block_size", "block_structure", "group_size"):
            if _is_block(block := options.get(key)):
                yield block[0], block[1]
        group = options.get("group_size")
        if isinstance(group, int) and group >= 1:
            yield 1, group


def read_eight_bit(layer: Layer) -> QuantizedTensor:
    """Read int8 or fp8 codes with scales per tensor, channel, group or block."""
    import torch

    n, k = layer.shape(".weight", 2)
    scale, block = (mx_scales if is_mx(layer) else scales_of)(layer, n, k)
    zero = None
    if ".weight_zero_point" in layer:
        zero = zeros_of(layer, n, k, 8).to(torch.int8)
        layer.require(zero.shape == scale.shape, "zero points do not fit scales")
    integers = layer[".weight"].dtype == "int8"
    kind, least = ("int", 1) if integers else ("float", 8)
    require_described(layer, kind, 8, zero is not None, least)
    asymmetric = zero is not None and bool(zero.any())
    layer.require(not asymmetric or layer[".weight"].dtype == "int8", "fp8 codes have no zero points")
    return QuantizedTensor(
        get_type(EIGHT_BIT[layer[".weight"].dtype]),
        (n, k),
        layer.tensor(".weight").view(torch.uint8),
        block,
        scale=scale,
        zero=zero if asymmetric else None,
        zero_kind="integer" if asymmetric else "none",
        scale_type=scale_name(scale),
    )


def is_mx(layer: Layer) -> bool:
    """Tell whether scales are powers of two, stored as exponents."""
    return layer[".weight_scale"].dtype in ("uint8", "float8_e8m0fnu")


def mx_scales(layer: Layer, n: int, k: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """Return exponents as scales of type e8m0, one per 32 columns."""
    import torch

    rows, columns = layer.shape(".weight_scale", 2)
    layer.require(rows == n and 32 * columns == k, f"exponents [{rows}, {columns}] for [{n}, {k}]")
    return layer.tensor(".weight_scale").view(torch.float8_e8m0fnu), (1, 32)


def scale_name(scale: torch.Tensor) -> str:
    """Return our name of the type of scales."""
    name = str(scale.dtype).removeprefix("torch.")
    return {"float8_e8m0fnu": "e8m0", "float8_e4m3fn": "fp8_e4m3"}.get(name, name)


MX_TYPES = {16: (4, "mxfp4"), 24: (6, "mxfp6_e2m3")}
"""Bytes of codes per exponent -> bits of an element, the block type."""


def mx_type(layer: Layer, codes: str = ".weight_packed") -> tuple[int, str] | None:
    """Return the bits of packed MX codes and their block type, if they are such."""
    weight, scale = layer[codes], layer[".weight_scale"]
    if weight.dtype != "uint8" or len(weight.shape) != 2 or len(scale.shape) != 2 or 0 in scale.shape:
        return None
    if not is_mx(layer) or ".weight_global_scale" in layer or weight.shape[1] % scale.shape[1]:
        return None
    integers = layer.config.get("data_type") == "mx_int"  # a sign and quarters, of which no type of ours is
    layer.require(not integers, "AutoRound's mx_int, integers that share exponents, is not read")
    return MX_TYPES.get(weight.shape[1] // scale.shape[1])


def mx_shape(layer: Layer, codes: str = ".weight_packed") -> Shape:
    """Return [N, K]."""
    return layer.shape(codes, 2)[0], 32 * layer.shape(".weight_scale", 2)[1]


def read_mx(layer: Layer, codes: str = ".weight_packed") -> QuantizedTensor:
    """Read packed MXFP4 or MXFP6 codes."""
    found = mx_type(layer, codes)
    assert found is not None
    bits, name = found
    n, k = mx_shape(layer, codes)
    stored = layer.tensor(codes)
    if bits == 6:
        stored = by_rows(lambda part: pack_codes(words_to_codes(part, bits, k), bits), stored, k)
    return of_block_type(name, (n, k), stored, mx_scales(layer, n, k)[0])


def is_nvfp4(layer: Layer) -> bool:
    """Tell whether codes are packed NVFP4."""
    return layer[".weight_packed"].dtype == "uint8" and ".weight_global_scale" in layer


def nvfp4_shape(layer: Layer, codes: str = ".weight_packed") -> Shape:
    """Return [N, K]."""
    n, octets = layer.shape(codes, 2)
    return n, 2 * octets


def read_nvfp4(layer: Layer) -> QuantizedTensor:
    """Read packed NVFP4 codes: ``q * (scale / global)``."""
    total = layer.number(".weight_global_scale")
    layer.require(total != 0, "weight_global_scale is 0")
    return nvfp4_tensor(layer, ".weight_packed", 1 / total)


NVFP4_GROUPS = (16, 32)
"""Columns that share a scale: the type's own, and ModelOpt's for 16-bit and fp8 activations."""


def nvfp4_tensor(layer: Layer, codes: str, factor: float) -> QuantizedTensor:
    """Return e2m1 codes with e4m3 scales of 16 or 32 columns and a factor of all."""
    import torch

    n, octets = layer.shape(codes, 2)
    layer.require_type(codes, "uint8")
    layer.require_type(".weight_scale", "float8_e4m3fn")
    rows, groups = layer.shape(".weight_scale", 2)
    size = 2 * octets // groups
    fits = rows == n and size in NVFP4_GROUPS and size * groups == 2 * octets
    layer.require(fits, f"{octets} bytes per row beside scales {[rows, groups]}")
    return QuantizedTensor(
        get_type("fp4_e2m1"),
        (n, 2 * octets),
        layer.tensor(codes).view(torch.uint8),
        (1, size),
        scale=layer.tensor(".weight_scale"),
        tensor_scale=factor,
        scale_type="fp8_e4m3",
        type_name="nvfp4" if size == NVFP4_GROUPS[0] else "",
    )


def is_eight_bit(layer: Layer) -> bool:
    """Tell whether there are 8-bit codes with scales."""
    return layer[".weight"].dtype in EIGHT_BIT


METHOD = ("compressed-tensors",)

PACKED = Format(
    "pack-quantized",
    ".weight_packed",
    lambda layer: layer[".weight_packed"].dtype == "int32" and ".weight_shape" in layer,
    packed_shape,
    read_packed,
    methods=METHOD,
    parts=(".weight_scale",),
    optional=(".weight_shape", ".weight_zero_point", ".weight_g_idx"),
    dtype="scale",
    doc="compressed-tensors integers of 1 to 8 bits, words dense (0.17 on) or not (before)",
)
MX = Format(
    "mx-pack-quantized",
    ".weight_packed",
    lambda layer: mx_type(layer) is not None,
    mx_shape,
    read_mx,
    methods=(*METHOD, *AUTO_ROUND),
    parts=(".weight_scale",),
    optional=(".weight_global_scale",),
    dtype="scale",
    doc="compressed-tensors mxfp4 and mxfp6",
)
NVFP4 = Format(
    "nvfp4-pack-quantized",
    ".weight_packed",
    is_nvfp4,
    nvfp4_shape,
    read_nvfp4,
    methods=(*METHOD, *AUTO_ROUND),
    parts=(".weight_scale",),
    optional=(".weight_global_scale",),
    rounding="scales_first",
    converted="bfloat16",
    doc="compressed-tensors nvfp4: scales divided by the global one",
)
EIGHT = Format(
    "8-bit",
    ".weight_scale",
    is_eight_bit,
    lambda layer: layer.shape(".weight", 2),
    read_eight_bit,
    methods=(*METHOD, *AUTO_ROUND, "fbgemm_fp8", "modelopt", "fp8", "quark", "w8a8_int8", "w8a8_fp8"),
    parts=(".weight",),
    optional=(".weight_zero_point",),
    dtype="scale",
    doc="int8, fp8 and mxfp8 with scales: compressed-tensors, FBGEMM, ModelOpt's fp8, Quark, SGLang's own",
)
