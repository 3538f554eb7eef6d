"""Formats whose bytes are canonical storage already: gpt-oss MXFP4, fp8 with block scales.

Sources: transformers ``integrations/mxfp4.py``, ``integrations/finegrained_fp8.py`` (DeepSeek-V3's
``weight_scale_inv`` multiplies), GPTQModel ``nn_modules/qlinear/fp8.py`` (its own divides).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.formats.compressed import EIGHT_BIT, stated_block
from ladder.formats.layer import AUTO_ROUND, GENERIC, Format, Layer, Shape, group_of, of_block_type
from tile_types import QuantizedTensor, get_type

if TYPE_CHECKING:
    import torch


SCALE_NAMES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float8_e8m0fnu": "e8m0"}
"""torch's name of a block scale's element -> ours."""


BLOCK = (128, 128)
"""Rows and columns that share a scale of fp8 where the configuration does not say."""


def mxfp4_shape(layer: Layer) -> Shape:
    """Return [E, N, K]."""
    experts, rows, groups, octets = layer.shape("_blocks", 4)
    layer.require(octets == 16, f"blocks of {octets} bytes, expected 16")
    return experts, rows, 32 * groups


def read_mxfp4(layer: Layer) -> tuple[QuantizedTensor, ...]:
    """Read gpt-oss's experts, one matrix each; of ``gate_up_proj``, even rows are gates."""

    experts, n, k = mxfp4_shape(layer)
    layer.require_type("_blocks", "uint8")
    layer.require_type("_scales", "uint8", "float8_e8m0fnu")
    layer.require(layer.shape("_scales", 3) == (experts, n, k // 32), "_scales do not fit _blocks")
    codes = layer.tensor("_blocks").reshape(experts, n, k // 2)
    scale = layer.tensor("_scales")
    return tuple(of_block_type("mxfp4", (n, k), *parts) for parts in zip(codes, scale, strict=True))


FP8_TYPES = ("float8_e4m3fn", "float8_e5m2")


def _is_fp4(layer: Layer, name: str) -> bool:
    """Tell bytes that hold two e2m1 codes each, low half first."""
    return layer[name].dtype == "int8" and layer.config.get("quant_method") == "fp8"


def _is_named(layer: Layer, scale: str) -> bool:
    """Tell scales by a name that others do not use, or by what the configuration says."""
    return scale not in GENERIC or layer.config.get("quant_method") == "fp8"


def fp8_shape(layer: Layer, name: str) -> Shape:
    """Return [N, K] or, of experts, [E, N, K]."""
    shape = layer.shape(name)
    layer.require(len(shape) in (2, 3), f"its weight has the shape {list(shape)}")
    return (*shape[:-1], 2 * shape[-1]) if _is_fp4(layer, name) else shape


def read_fp8(layer: Layer, codes_name: str, scale_name: str) -> QuantizedTensor | tuple[QuantizedTensor, ...]:
    """Read fp8, or pairs of fp4, with one scale per block."""
    import torch

    extents = fp8_shape(layer, codes_name)
    layer.require_type(scale_name, *SCALE_NAMES, "uint8")
    codes, scale = layer.tensor(codes_name), layer.tensor(scale_name)
    meaning = layer.option("weight_scale_semantics", str, "")
    layer.require(meaning in ("", "inverse"), f"scales that are {meaning!r} are not read")
    if meaning:
        layer.require_type(scale_name, "float32")
        scale = scale.reciprocal()
    if scale.dtype == torch.uint8:
        scale = scale.view(torch.float8_e8m0fnu)
    if len(extents) == 2:
        return _matrix(layer, codes, scale)
    layer.require(scale.ndim == 3 and len(scale) == len(codes), "scales are not of as many experts")
    return tuple(_matrix(layer, *pair) for pair in zip(codes, scale, strict=True))


def _matrix(layer: Layer, codes: torch.Tensor, scale: torch.Tensor) -> QuantizedTensor:
    import torch

    pairs = codes.dtype == torch.int8
    n, k = codes.shape[0], codes.shape[1] * (2 if pairs else 1)
    if scale.ndim < 2 and scale.numel() in (1, n):
        scale = scale.reshape(-1, 1)
    if scale.ndim == 3 and scale.shape[2] == 1:  # musubi-tuner's of parts of rows
        scale = scale[:, :, 0]
    layer.require(scale.ndim == 2 and 0 not in scale.shape, f"scales have the shape {list(scale.shape)}")
    rows, columns = scale.shape
    block = stated_block(layer, n, k, rows, columns) if not pairs else (1, k // columns)
    if block is None and (-(-n // BLOCK[0]), -(-k // BLOCK[1])) == (rows, columns):
        block = BLOCK
    block = block or (group_of(layer, n, rows), group_of(layer, k, columns))
    layer.require(not pairs or (rows == n and columns * block[1] == k), f"{rows} x {columns} scales of fp4")
    return QuantizedTensor(
        get_type("fp4_e2m1" if pairs else EIGHT_BIT[str(codes.dtype).removeprefix("torch.")]),
        (n, k),
        codes.view(torch.uint8),
        block,
        scale=scale,
        scale_type=SCALE_NAMES[str(scale.dtype).removeprefix("torch.")],
    )


MXFP4 = Format(
    "mxfp4",
    "_blocks",
    lambda layer: len(layer["_blocks"].shape) == 4,
    mxfp4_shape,
    read_mxfp4,
    methods=("mxfp4",),
    parts=("_scales",),
    result="",
    dtype="bfloat16",
    doc="gpt-oss experts",
)


def _fp8(*names: str) -> Format:
    """Return the format of codes and scales by two names."""
    codes, scale = names
    return Format(
        "fp8-blocks",
        scale,
        lambda layer: _is_fp4(layer, codes) or (layer[codes].dtype in FP8_TYPES and _is_named(layer, scale)),
        lambda layer: fp8_shape(layer, codes),
        lambda layer: read_fp8(layer, codes, scale),
        methods=("fp8", "mxfp8", *AUTO_ROUND),
        parts=(codes,),
        result=codes,
        doc="fp8 and fp4 with scales of blocks (DeepSeek, Qwen3, Mistral, ComfyUI's scaled fp8)",
    )


FP8 = (
    _fp8("", "_scale_inv"),
    _fp8(".weight", ".scale"),
    _fp8(".weight", ".qscale_weight"),
    _fp8(".weight", ".scale_weight"),
)
