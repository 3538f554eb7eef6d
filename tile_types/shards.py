"""Shards of quantized matrices: what one of several devices holds, bit for bit as in the whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tile_types.arrays import Array, arrays_of
from tile_types.errors import ShapeError
from tile_types.factored import Factored
from tile_types.packing import pack_codes
from tile_types.quantized import QuantizedTensor

ROWS, COLUMNS = 0, 1
"""Axes of a weight [N, K]: outputs and inputs of a layer."""

NARROWEST = 16
"""Columns of the narrowest group that a border may leave."""


def borders(extent: int, index: int, count: int) -> tuple[int, int]:
    """Return where shard ``index`` of ``count`` begins and ends, as `torch.chunk` cuts.

    Raises ShapeError if there is no such shard, or nothing is left for the last.
    """
    if not 0 <= index < count:
        raise ShapeError(f"shard {index} of {count} does not exist")
    size = -(-extent // count)
    if size * (count - 1) >= extent:  # said to every device, so that none waits for one that has failed
        raise ShapeError(f"{extent} in {count} shards of {size} leave nothing for shard {count - 1}")
    return index * size, min(extent, (index + 1) * size)


def shard(
    weight: QuantizedTensor, axis: int, index: int, count: int, parts: Sequence[int] | None = None
) -> QuantizedTensor:
    """Return what device ``index`` of ``count`` holds of a matrix [N, K].

    weight: The whole.
    axis: `ROWS` (0) or `COLUMNS` (1).
    index, count: Which shard of how many.
    parts: Rows of the matrices that are joined in the whole, such as queries, keys and values: of each the
        device holds its shard. By default one matrix. Only for rows.
    Returns: The shard, with the values of the whole there. Groups that a border cuts become narrower ones
        with the same scale, equally wide on every device.
    Raises ShapeError if the whole cannot be cut so: a border leaves groups narrower than `NARROWEST` columns,
        columns have an order of their own, or parts do not add up.
    """
    if axis == COLUMNS:
        if parts is not None:
            raise ShapeError("parts are matrices that are joined along rows; columns are cut whole")
        return _columns(weight, index, count)
    parts = (weight.shape[ROWS],) if parts is None else tuple(parts)
    if sum(parts) != weight.shape[ROWS]:
        raise ShapeError(f"parts {list(parts)} do not add up to the {weight.shape[ROWS]} rows")
    return _rows(weight, parts, index, count)


def _common(width: int, extent: int, cuts: Iterable[int]) -> int:
    """Return the widest block that no cut divides; a block as wide as the whole stays one."""
    return width if width >= extent else math.gcd(width, *cuts)


def rows_of(parts: Sequence[int], index: int, count: int) -> list[int]:
    """Return the rows that device ``index`` holds of joined matrices: of each its shard."""
    return [row for first, last in _ranges(parts, index, count) for row in range(first, last)]


def _ranges(parts: Sequence[int], index: int, count: int) -> list[tuple[int, int]]:
    """Return the first row of a device's shard of each part, and the one after the last."""
    cut = [borders(part, index, count) for part in parts]
    return [(sum(parts[:at]) + first, sum(parts[:at]) + last) for at, (first, last) in enumerate(cut)]


def _rows(weight: QuantizedTensor, parts: Sequence[int], index: int, count: int) -> QuantizedTensor:
    """Return the rows of shard ``index`` of each part."""
    cuts = [first for device in range(count) for first, _ in _ranges(parts, device, count)]
    extent, height = weight.shape[ROWS], weight.block[ROWS]
    step, ranges = _common(height, extent, cuts), _ranges(parts, index, count)
    rows = rows_of(parts, index, count)
    blocks = [at // height for first, last in ranges for at in range(first, last, step)]
    return replace(
        weight,
        shape=(len(rows), weight.shape[COLUMNS]),
        storage=_taken(weight.storage, ROWS, rows),
        block=(len(rows) if height >= extent else step, weight.block[COLUMNS]),
        **_per_group(weight, ROWS, blocks),
    )


def _columns(weight: QuantizedTensor, index: int, count: int) -> QuantizedTensor:
    """Return the columns of shard ``index``; codes are packed anew, so that borders may lie within a byte."""
    extent, width = weight.shape[COLUMNS], weight.block[COLUMNS]
    first, last = borders(extent, index, count)
    if count == 1:
        return weight
    if weight.columns is not None:
        raise ShapeError(
            f"{weight.type_name} [{weight.shape[ROWS]}, {extent}] stores its columns in an order of their own"
            " (GPTQ's desc_act), so that a border of columns cuts every group anywhere: shard its rows, or"
            " quantize it again without that order"
        )
    size = -(-extent // count)
    step = _common(width, extent, (size,))
    if step < min(width, NARROWEST):
        raise ShapeError(
            f"{weight.type_name} [{weight.shape[ROWS]}, {extent}] in {count} shards of columns: borders at"
            f" multiples of {size} cut its groups of {width} into groups of {step}, and"
            f" {NARROWEST} columns are the fewest that may share a scale: use fewer shards"
        )
    return replace(
        weight,
        shape=(weight.shape[ROWS], last - first),
        storage=pack_codes(weight.codes()[:, first:last], weight.ttype.elem_bits),
        block=(weight.block[ROWS], last - first if width >= extent else step),
        **_per_group(weight, COLUMNS, [at // width for at in range(first, last, step)]),
    )


def _per_group(weight: QuantizedTensor, axis: int, blocks: Sequence[int]) -> dict[str, Array]:
    """Return scales, zero points and offsets of some blocks along an axis; one block is every device's."""
    arrays = {name: getattr(weight, name) for name in ("scale", "zero", "offset")}
    whole = weight.block[axis] >= weight.shape[axis]
    return {
        name: array if whole else _taken(array, axis, blocks)
        for name, array in arrays.items()
        if array is not None
    }


def _taken(array: Array, axis: int, places: Sequence[int]) -> Array:
    xp = arrays_of(array)
    return xp.take(array, xp.array(places, "int64", array), axis)


def taken_rows(weight: QuantizedTensor, rows: Sequence[int]) -> QuantizedTensor:
    """Return rows of a matrix, in any order.

    Raises ShapeError if rows share scales.
    """
    if weight.block[ROWS] != 1:
        raise ShapeError(f"{weight.type_name} {list(weight.shape)}: {weight.block[ROWS]} rows share a scale")
    shape = len(rows), weight.shape[COLUMNS]
    storage, arrays = _taken(weight.storage, ROWS, rows), _per_group(weight, ROWS, rows)
    kept = {name: each for name in ("scale", "offset") if (each := weight.factored(name)) is not None}
    factors = {
        name: Factored(arrays[name], *(_taken(array, ROWS, rows) for array in (each.number, each.integers)))
        for name, each in kept.items()
    }
    return replace(weight, shape=shape, storage=storage, factors=factors, **arrays)


def joined(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return matrices of one type and as many columns as one, rows below rows: what `shard` takes apart.

    Blocks that reach over the end of a matrix become lower ones with the same scale. Where matrices have
    factors of their own (NVFP4's experts), scales become products with them in float32, as tools do.

    Raises ShapeError if types or what the matrices carry differ, or columns have an order of their own.
    """
    if len(weights) == 1:
        return weights[0]
    if len({weight.tensor_scale for weight in weights}) > 1:
        weights = [_with_factor_in_scales(weight) for weight in weights]
    first = weights[0]
    kinds = {_kind(weight) for weight in weights}
    if len(kinds) > 1 or first.columns is not None:
        raise ShapeError(
            f"only matrices of one kind, with plain columns, are joined: {sorted(map(str, kinds))}"
        )
    step = math.gcd(*(extent for weight in weights for extent in (weight.shape[ROWS], weight.block[ROWS])))
    cut = [_lower(weight, step) for weight in weights]
    xp = arrays_of(first.storage)
    arrays = {name: xp.concatenate([part[name] for part in cut]) for name in cut[0]}
    extents = sum(weight.shape[ROWS] for weight in weights), first.shape[COLUMNS]
    storage = xp.concatenate([weight.storage for weight in weights])
    return replace(first, shape=extents, storage=storage, block=(step, first.block[COLUMNS]), **arrays)


def _with_factor_in_scales(weight: QuantizedTensor) -> QuantizedTensor:
    """Return a matrix without a factor of all its values: its scales are multiplied by it."""
    xp = arrays_of(weight.storage)
    factor = 1.0 if weight.tensor_scale is None else weight.tensor_scale
    if weight.scale is None:
        scale, block = xp.array([[factor]], "float64", weight.storage), weight.shape
    else:
        scale, block = xp.cast(weight.scale, "float64") * factor, weight.block
    fields = {"scale": xp.cast(scale, "float32"), "scale_type": "float32", "block": block}
    return replace(weight, **fields, tensor_scale=None, type_name="")


def _kind(weight: QuantizedTensor) -> tuple[object, ...]:
    """Return what matrices that are joined have in common."""
    carried = weight.scale is None, weight.offset is None, weight.columns is None
    width = weight.shape[COLUMNS], weight.block[COLUMNS]
    return weight.ttype.name, *width, weight.tensor_scale, weight.scale_type, weight.zero_kind, *carried


def _lower(weight: QuantizedTensor, step: int) -> dict[str, Array]:
    """Return scales, zero points and offsets by blocks of ``step`` rows."""
    blocks = [at // weight.block[ROWS] for at in range(0, weight.shape[ROWS], step)]
    arrays = {name: getattr(weight, name) for name in ("scale", "zero", "offset")}
    return {name: _taken(array, ROWS, blocks) for name, array in arrays.items() if array is not None}
