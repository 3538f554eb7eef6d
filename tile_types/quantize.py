"""`quantize`: weights to codes, scales and zero points."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np

from tile_types.arrays import Array, arrays_of, is_torch
from tile_types.errors import (
    ConversionError,
    DeviceError,
    DTypeError,
    ShapeError,
    ValueRangeError,
    require_kind,
    require_name,
    shown,
    unknown_name,
    whole_number,
)
from tile_types.library import SCALE_TYPES, get_type
from tile_types.quantized import QuantizedTensor
from tile_types.scaling import (
    LARGEST_USED,
    SCALINGS,
    SMALLEST_TENSOR_SCALE,
    Statistics,
    block_rows,
    group_mask,
    grouped,
    initial_zero,
    parts_of,
    reach,
    refine_zero,
    require_reached,
    round_scale,
    round_zero,
    statistics,
    wide_enough_for_zero,
)
from tile_types.ttype import NOT_CONSECUTIVE, TType, code_dtype, require_finite

ZERO_KINDS = ("none", "integer", "float")
GRANULARITIES = ("tensor", "channel", "group", "block2d")
FLOAT_SCALE_TYPES = ("float16", "bfloat16", "float32")
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Recipe:
    """How one matrix is quantized: every option resolved and checked."""

    type_name: str
    element: TType
    block: tuple[int, int]
    scaling: str
    scale_type: str
    zero: str
    tensor_scale: bool = False
    clips_sign: bool = False


def quantize(
    values: Array,
    ttype: TType | str,
    *,
    group_size: int | None = None,
    block: tuple[int, int] | None = None,
    scale_type: str | None = None,
    zero: str | None = None,
    scaling: str | None = None,
    granularity: str | None = None,
) -> QuantizedTensor:
    """Quantize a matrix to the nearest codes, ties to even in value space, saturating.

    Parameters
    ----------
    values
        Real [N, K], numpy (bfloat16 of ml_dtypes included) or torch on any device.
    ttype
        Element type, or a block type, which then fixes block, scale type and zero point.
    group_size
        Columns that share a scale, 1 to K, the last ones fewer; None or -1 is one scale per row.
    block
        (bn, bk) rows and columns that share a scale; -1 is the whole extent.
    scale_type
        Type of scales and float zero points; by default that of 16-bit values, else float16.
    zero
        ``"none"`` (default), ``"integer"``: a zero point in code space, ``"float"``: a real one.
    scaling
        ``"absmax"``, ``"minmax"``, ``"hqq"``, ``"absmean"``, ``"mx"``, ``"none"``: tile_types/README.md.
    granularity
        ``"tensor"``, ``"channel"``, ``"group"`` or ``"block2d"``; follows from the above.

    Returns
    -------
    QuantizedTensor whose arrays live where ``values`` does. Numpy and torch give equal codes.

    Raises
    ------
    DTypeError, ShapeError, UnknownNameError, ConversionError
        If values or options cannot be, or contradict each other or the type.
    ValueRangeError
        If a value is NaN or infinite (names the position), a scale overflows its type, weights lie
        below all that its smallest reaches, or negative values meet a type without any (and ``scaling``
        was not given explicitly).
    """
    values = _checked(values)
    kind, shared = get_type(ttype), _block(values.shape, group_size, block, granularity)
    recipe = _recipe(values, kind, shared, scale_type, zero, scaling)
    if recipe.scaling == "none":
        codes = _encode(values, recipe, None, None)
        return _result(codes, recipe, None, None, None)
    stats = statistics(values, recipe.block)
    _require_sign(stats, recipe)
    scale, tensor_scale = _scales(stats, recipe)
    factor = scale if tensor_scale is None else arrays_of(values).cast(scale, "float64") * tensor_scale
    zero_point = _zeros(values, stats, factor, recipe)
    codes = _encode(values, recipe, factor, zero_point)
    return _result(codes, recipe, scale, zero_point, tensor_scale)


def _checked(values: Array) -> Array:
    xp = arrays_of(values)
    if is_torch(values) and (values.is_nested or str(values.layout) != "torch.strided"):
        kind = "a nested tensor" if values.is_nested else values.layout
        raise DTypeError(f"quantize needs a dense matrix, got {kind}; give values.to_dense()")
    if isinstance(values, (np.ma.MaskedArray, np.matrix)):
        raise DTypeError(f"quantize needs a plain array, got {type(values).__name__}; fill it, or np.asarray")
    if not xp.is_float(values):
        raise DTypeError(f"quantize needs real values, got {values.dtype}; convert with .astype or .to first")
    if values.ndim != 2:
        raise ShapeError(
            f"quantize needs a matrix [N, K], got {values.ndim} dimensions: {list(values.shape)}"
        )
    if 0 in values.shape:
        raise ShapeError(f"quantize needs N >= 1 and K >= 1, got {list(values.shape)}")
    if is_torch(values) and values.is_meta:
        raise DeviceError("quantize needs values, there are none on the meta device; load the weights first")
    values = values.detach() if is_torch(values) else values
    require_finite(values, "quantize the weights")
    return values


def is_whole_row(group_size: object) -> bool:
    """Whether a group size asks for one scale per row: None or -1."""
    return group_size is None or (isinstance(group_size, Integral) and group_size == -1)


def _block(
    shape: Any, group_size: int | None, block: tuple[int, int] | None, granularity: str | None
) -> tuple[int, int] | None:
    """Resolve the three ways to say which elements share a scale; None if nothing was said."""
    rows, columns = int(shape[0]), int(shape[1])
    if granularity is not None and granularity not in GRANULARITIES:
        raise unknown_name("granularity", granularity, GRANULARITIES)
    grouped_by: Any = None if is_whole_row(group_size) else group_size
    whole = isinstance(grouped_by, Integral) and not isinstance(grouped_by, bool)
    if grouped_by is not None and not (whole and 1 <= grouped_by <= columns):
        raise ShapeError(
            f"group_size must be in 1..K={columns} (or -1 for one scale per row), got {shown(group_size)}"
        )
    said = {"group": grouped_by is not None, "block2d": block is not None}
    wanted = granularity or next((name for name, given in said.items() if given), None)
    if any(given and name != wanted for name, given in said.items()):
        raise ShapeError(
            f"granularity {wanted!r}, group_size={group_size} and block={block} contradict each other"
        )
    if wanted == "group" and grouped_by is None:
        raise ShapeError("granularity 'group' needs a group_size")
    if wanted is None and group_size is None:
        return None
    choices = {"group": (1, grouped_by or columns), "tensor": (rows, columns)}
    if wanted == "block2d":
        return _block2d(DEFAULT_BLOCK if block is None else block, rows, columns)
    return choices.get(wanted or "channel", (1, columns))


def _block2d(block: tuple[int, int], rows: int, columns: int) -> tuple[int, int]:
    require_kind(block, (tuple, list), "block must be two extents")
    extents = [whole_number(extent, "an extent of block") for extent in block]
    if len(extents) != 2 or any(extent < 1 and extent != -1 for extent in extents):
        raise ShapeError(f"block must be two extents >= 1 (or -1 for the whole), got {block}")
    height, width = extents
    return (rows if height == -1 else height, columns if width == -1 else width)


def _recipe(
    values: Array,
    ttype: TType,
    block: tuple[int, int] | None,
    scale_type: str | None,
    zero: str | None,
    scaling: str | None,
) -> Recipe:
    """Fill in defaults and refuse contradictions."""
    element = ttype.element_type
    for kind_of, given, known in (
        ("scaling", scaling, (*SCALINGS, "none")),
        ("kind of zero point", zero, ZERO_KINDS),
        ("scale type", scale_type, SCALE_TYPES),
    ):
        if given is not None:
            require_name(kind_of, given, known)
    if ttype.is_block:
        block, scale_type, zero = _forced(ttype, block, scale_type, zero)
    kind = zero or _implied_zero(element, scaling)
    own = arrays_of(values).dtype_name(values)
    stored = scale_type or (own if own in ("float16", "bfloat16") else "float16")
    rule = scaling or _default_scaling(element, stored, kind)
    recipe = Recipe(
        ttype.name,
        element,
        block or (1, int(values.shape[1])),
        rule,
        "none" if rule == "none" else stored,
        kind,
        tensor_scale=ttype.metadata_named("tensor_scale") is not None,
        clips_sign=scaling is not None,
    )
    _check_recipe(recipe, block is not None or scale_type is not None)
    return recipe


def _forced(
    ttype: TType, block: tuple[int, int] | None, scale_type: str | None, zero: str | None
) -> tuple[tuple[int, int], str, str]:
    """Take what a block type fixes; refuse options that say otherwise."""
    scale = ttype.metadata_named("scale")
    fixed = ((1, ttype.block_size), scale.ttype if scale else "none", ttype.zero_kind)
    asked = (("block", block), ("scale_type", scale_type), ("zero", zero))
    for (label, given), value in zip(asked, fixed, strict=True):
        if given is not None and given != value:
            raise ConversionError(
                f"type {ttype.name} fixes {label} to {value}, got {given}; leave it out, "
                f"or quantize to its element {ttype.element!r}"
            )
    return fixed


def _implied_zero(element: TType, scaling: str | None) -> str:
    """Return the kind of zero point that a scaling rule needs when none was named."""
    if scaling == "minmax":
        return "integer" if element.is_integer else "float"
    return "float" if scaling == "hqq" else "none"


def _default_scaling(element: TType, scale_type: str, zero: str) -> str:
    """Return the usual rule for a type."""
    if element.elem_bits > 8:
        return "none"
    if zero != "none":
        return "minmax"
    if scale_type == "e8m0" and element.exact:
        return "mx"
    return "absmean" if set(element.probe_values()) == {-1.0, 0.0, 1.0} else "absmax"


def _check_recipe(recipe: Recipe, scale_asked: bool) -> None:
    name, rule, zero = recipe.type_name, recipe.scaling, recipe.zero
    wide = recipe.element.elem_bits > 8
    problems = (
        (
            wide and rule != "none",
            f"{name} has {recipe.element.elem_bits} bits and is stored unscaled; use scaling='none'",
        ),
        (
            rule == "none" and (zero != "none" or scale_asked),
            f"{name} with scaling 'none'{' (the only one above 8 bits)' * wide} has no scale: leave out"
            " group, block, scale type and zero point",
        ),
        (
            rule in ("minmax", "hqq") and zero == "none",
            f"scaling {rule!r} needs a zero point; use zero='float'",
        ),
        (
            rule in ("absmean", "mx") and zero != "none",
            f"scaling {rule!r} is symmetric; leave out the zero point",
        ),
        (
            rule in ("minmax", "hqq") and recipe.element.minimum == recipe.element.maximum,
            f"{name} holds one value only, scaling {rule!r} needs a range; use scaling='absmax'",
        ),
        (rule == "hqq" and zero != "float", "scaling 'hqq' yields float zero points; use zero='float'"),
        (rule == "hqq" and recipe.block[0] != 1, "scaling 'hqq' needs groups within a row; use group_size"),
        (
            zero == "integer" and not recipe.element.is_integer,
            f"{name} {NOT_CONSECUTIVE}; use zero='float'",
        ),
        (
            zero == "float" and recipe.scale_type not in FLOAT_SCALE_TYPES,
            f"a float zero point needs scale_type {' or '.join(FLOAT_SCALE_TYPES)}, got {recipe.scale_type}",
        ),
    )
    for wrong, message in problems:
        if wrong:
            raise ConversionError(message)


def _require_sign(stats: Statistics, recipe: Recipe) -> None:
    """Refuse to clip half of the weights away unless the scaling was asked for."""
    if recipe.zero != "none" or recipe.clips_sign:
        return
    element, low, high = recipe.element, float(stats.low.min()), float(stats.high.max())
    kinds = "zero='integer' or zero='float'" if element.is_integer else "zero='float'"
    for side, lacks in (("negative", low < 0 <= element.minimum), ("positive", high > 0 >= element.maximum)):
        if lacks:
            raise ValueRangeError(
                f"{element.name} holds no {side} values but the weights span {low:.4g} to {high:.4g}; "
                f"use {kinds} (or scaling='absmax' to clip on purpose)"
            )


def _scales(stats: Statistics, recipe: Recipe) -> tuple[Array, float | None]:
    """Return the rounded scales and the tensor scale."""
    raw = SCALINGS[recipe.scaling](stats, recipe.element, recipe.zero)
    if recipe.zero == "float":
        raw = wide_enough_for_zero(raw, stats, recipe.element, recipe.scale_type)
    empty = stats.absmax == 0
    if not recipe.tensor_scale:
        require_reached(stats.absmax, recipe.element, recipe.scale_type, recipe.zero)
        return round_scale(raw, empty, recipe.scale_type), None
    largest = float(stats.absmax.max()) / reach(recipe.element, recipe.zero)[1]
    exact = largest / min(get_type(recipe.scale_type).maximum, LARGEST_USED) if largest else 1.0
    if exact > (limit := float(np.finfo(np.float32).max)):
        raise ValueRangeError(
            f"a tensor scale of {exact:.6g} overflows float32 (largest {limit:.6g}); scale the weights down"
        )
    tensor_scale = max(float(np.float32(exact)), SMALLEST_TENSOR_SCALE)
    require_reached(stats.absmax / tensor_scale, recipe.element, recipe.scale_type, recipe.zero)
    return round_scale(raw / tensor_scale, empty, recipe.scale_type), tensor_scale


def _zeros(values: Array, stats: Statistics, factor: Array, recipe: Recipe) -> Array | None:
    """Return the rounded zero points of codes that are multiplied by ``factor``."""
    if recipe.zero == "none":
        return None
    xp = arrays_of(values)
    wide = xp.cast(factor, "float64")
    start = initial_zero(wide, stats, recipe.element, recipe.zero, recipe.scaling)
    zero = round_zero(start, recipe.element, recipe.zero, recipe.scale_type)
    if recipe.scaling != "hqq":
        return zero
    width = min(recipe.block[1], int(values.shape[1]))
    mask = group_mask(int(values.shape[1]), width, values)
    for part in parts_of(values):
        units = grouped(xp.cast(values[part], "float64"), width) / wide[part][:, :, None]
        refined = refine_zero(units, mask, xp.cast(zero[part], "float64"), recipe.element, recipe.scale_type)
        zero[part] = xp.cast(refined, recipe.scale_type)
    return zero


def _encode(values: Array, recipe: Recipe, factor: Array | None, zero: Array | None) -> Array:
    """Return the codes [N, K], a chunk of rows at a time."""
    xp = arrays_of(values)
    rows, columns = int(values.shape[0]), int(values.shape[1])
    width = min(recipe.block[1], columns)
    codes = xp.empty((rows, columns), code_dtype(recipe.element.elem_bits), values)
    for part in parts_of(values):
        units = grouped(xp.cast(values[part], "float64"), width)
        if factor is not None:
            units = units / block_rows(factor, recipe.block[0], part)[:, :, None]
        if zero is not None:
            units = units + block_rows(zero, recipe.block[0], part)[:, :, None]
        flat = units.reshape(units.shape[0], -1)[:, :columns]
        codes[part] = xp.cast(recipe.element.encode_finite(flat), code_dtype(recipe.element.elem_bits))
    return codes


def _result(
    codes: Array, recipe: Recipe, scale: Array | None, zero: Array | None, tensor_scale: float | None
) -> QuantizedTensor:
    return QuantizedTensor.from_codes(
        codes,
        recipe.element,
        recipe.block,
        scale=scale,
        zero=zero,
        zero_kind=recipe.zero,
        tensor_scale=tensor_scale,
        scale_type=recipe.scale_type,
        type_name=recipe.type_name,
    )
