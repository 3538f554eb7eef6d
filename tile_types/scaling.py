"""Choosing scales and zero points from the statistics of each block of weights.

Everything is float64 until a scale or zero point is rounded to its storage type; codes are
chosen afterwards, with the rounded ones, so that what is stored is what was meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from tile_types.arrays import Array, arrays_of, is_torch
from tile_types.errors import ValueRangeError
from tile_types.library import get_type
from tile_types.ttype import TType, code_dtype

CHUNK_ELEMENTS = 1 << 20
"""Elements handled at once where each operation costs a launch: temporaries in float64 are tens of MB."""

CACHED_ELEMENTS = 1 << 16
"""Elements that one core handles at once: its second-level cache holds temporaries of them."""

FEW_ELEMENTS = 1 << 15
"""Numbers handled at once where there are many temporaries: memory that was just freed is taken again."""

ZERO_BLOCK_SCALE = 2.0**-14
"""Scale of a block of zeros: any positive one is right, a moderate one overflows nowhere later."""

SMALLEST_TENSOR_SCALE = 2.0**-126

LARGEST_USED = 65504.0
"""Largest magnitude that weights are scaled to, float16's, though the type reach further (e8m0: 2**127).

So are scales of blocks by that of the tensor.

Sums of unscaled values of a group then fit in float32, and scales in float16.
"""

_HUGE = float("inf")

HQQ_ITERATIONS, HQQ_NORM, HQQ_BETA, HQQ_GROWTH = 20, 0.7, 10.0, 1.01
"""Settings of the half-quadratic solver as its authors publish them (Badri and Shaji, 2023)."""


@dataclass(frozen=True)
class Statistics:
    """Per block of weights [N, K], float64 [ceil(N/bn), ceil(K/bk)]: extremes and mean magnitude.

    values: The weights.
    block: Rows and columns of a block.
    """

    low: Array
    high: Array
    values: Array
    block: tuple[int, int]

    @property
    def mean_abs(self) -> Array:
        """Mean magnitude of each block."""
        values, xp, rows = self.values, arrays_of(self.values), int(self.values.shape[0])
        mask = group_mask(values.shape[1], self.block[1], values)
        total = xp.empty((rows, mask.shape[0]), "float64", values)
        for part in parts_of(values):
            total[part] = xp.sum(abs(grouped(xp.cast(values[part], "float64"), self.block[1])) * mask, 2)
        count = _merge_rows(total * 0 + xp.sum(mask, 1), self.block[0], xp.pad_last, xp.sum)
        return _merge_rows(total, self.block[0], xp.pad_last, xp.sum) / count

    @property
    def absmax(self) -> Array:
        """Largest magnitude of each block."""
        return arrays_of(self.low).where(self.high > -self.low, self.high, -self.low)


def row_chunks(rows: int, columns: int, most: int = CHUNK_ELEMENTS) -> Iterator[slice]:
    """Cut rows into slices of at most so many elements (at least one row)."""
    step = max(1, most // max(1, columns))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))


def parts_of(values: Array) -> Iterator[slice]:
    """Cut the rows of weights [N, K] into what their device should handle at once."""
    most = CACHED_ELEMENTS
    if is_torch(values):
        import torch

        most = most * torch.get_num_threads() if values.device.type == "cpu" else CHUNK_ELEMENTS
    return row_chunks(int(values.shape[0]), int(values.shape[1]), most)


def block_rows(array: Array, height: int, part: slice) -> Array:
    """Return float64 rows of a per-block array [ceil(N/height), G], one for each matrix row in ``part``."""
    xp = arrays_of(array)
    if height == 1:
        return xp.cast(array[part], "float64")
    rows = xp.array([row // height for row in range(part.start, part.stop)], "int32", array)
    return xp.take(xp.cast(array, "float64"), rows)


def grouped(chunk: Array, group: int) -> Array:
    """Return [r, K] as [r, ceil(K/group), group]; a partial last group repeats its last column."""
    xp = arrays_of(chunk)
    return xp.pad_edge(chunk, -chunk.shape[1] % group).reshape(chunk.shape[0], -1, group)


def group_mask(columns: int, group: int, like: Array) -> Array:
    """Return float64 [ceil(K/group), group]: 1 on real columns, 0 on those `grouped` repeated."""
    xp = arrays_of(like)
    ones = xp.array([[1.0] * columns], "float64", like)
    return xp.pad_last(ones, -columns % group).reshape(-1, group)


def statistics(values: Array, block: tuple[int, int]) -> Statistics:
    """Reduce values [N, K] to the statistics of each block."""
    xp, number = arrays_of(values), "float64" if values.dtype.itemsize > 4 else "float32"
    rows, columns = values.shape
    height, width = block[0], min(block[1], columns)
    shape = (rows, -(-columns // width))
    low, high = (xp.empty(shape, "float64", values) for _ in range(2))
    for part in parts_of(values):
        chunk = grouped(xp.cast(values[part], number), width)
        low[part] = xp.cast(xp.amin(chunk, 2), "float64")
        high[part] = xp.cast(xp.amax(chunk, 2), "float64")
    return Statistics(
        _merge_rows(low, height, xp.pad_edge, xp.amin),
        _merge_rows(high, height, xp.pad_edge, xp.amax),
        values,
        (height, width),
    )


def _merge_rows(
    x: Array, height: int, pad: Callable[[Array, int], Array], reduce: Callable[[Array, int], Array]
) -> Array:
    """Reduce each ``height`` rows of [N, G] to one."""
    if height == 1:
        return x
    columns_first = pad(x.T, -x.shape[0] % height)
    return reduce(columns_first.reshape(x.shape[1], -1, height), 2).T


def used_range(element: TType) -> tuple[float, float]:
    """Return the least and the largest value that weights are scaled to.

    Values beyond `LARGEST_USED` are left out, unless there are no others.
    """
    if element.max_abs > LARGEST_USED:
        values = element.probe_values()
        within = values[np.abs(values) <= LARGEST_USED]
        if within.size:
            return float(within.min()), float(within.max())
    return element.minimum, element.maximum


def reach(element: TType, zero: str) -> tuple[float, float]:
    """Return (center, largest distance from it) that symmetric scaling maps absmax to.

    Without a zero point the center is 0; two's complement then uses its positive side
    (int4: 7). With one, the center is the upper middle of the codes (uint4: 8, reach 7).
    """
    low, high = used_range(element)
    center = 0.0 if zero == "none" else float(-(-(low + high) // 2))
    sides = [side for side in (high - center, center - low) if side > 0]
    return center, min(sides, default=1.0)


def absmax_scale(stats: Statistics, element: TType, zero: str) -> Array:
    """Map the largest magnitude of a block to the type's reach."""
    return stats.absmax / reach(element, zero)[1]


def absmean_scale(stats: Statistics, element: TType, zero: str) -> Array:
    """Use the mean magnitude of a block (BitNet b1.58, arXiv 2402.17764, eq. 3)."""
    return stats.mean_abs


def minmax_scale(stats: Statistics, element: TType, zero: str) -> Array:
    """Map [low, high] to the type's range; an integer zero point needs 0 within [low, high]."""
    xp = arrays_of(stats.low)
    low, high = stats.low, stats.high
    if zero == "integer":
        low, high = xp.clip(low, -_HUGE, 0.0), xp.clip(high, 0.0, _HUGE)
    least, most = used_range(element)
    return (high - low) / (most - least if most > least else element.maximum - element.minimum)


def mx_scale(stats: Statistics, element: TType, zero: str) -> Array:
    """Return 2**(floor(log2 absmax) - emax of the element), OCP MX v1.0 §6.3."""
    xp = arrays_of(stats.low)
    top = int(xp.exponent(xp.array([reach(element, zero)[1]], "float64", stats.low))[0])
    absmax = stats.absmax
    exponent = xp.exponent(xp.where(absmax > 0, absmax, absmax + 1.0)) - top
    scale = xp.pow2(xp.clip(exponent, -127, 127))
    return xp.where(absmax > 0, scale, absmax)


SCALINGS: dict[str, Callable[[Statistics, TType, str], Array]] = {
    "absmax": absmax_scale,
    "absmean": absmean_scale,
    "minmax": minmax_scale,
    "hqq": minmax_scale,
    "mx": mx_scale,
}
"""Rule -> unrounded scale of each block. ``hqq`` starts from min-max and then moves the zero points."""


def round_scale(scale: Array, empty: Array, scale_type: str) -> Array:
    """Round scales to their storage type; never to 0.

    scale: float64, >= 0.
    empty: Where a block is all zero: it gets `ZERO_BLOCK_SCALE` (or the type's smallest above).
    scale_type: Name of the storage type.
    Returns: Array of the native dtype of ``scale_type``.
    Raises ValueRangeError if a scale is beyond the type's largest value.
    """
    xp = arrays_of(scale)
    ttype = get_type(scale_type)
    largest = float(scale.max())
    if largest > ttype.maximum * (1 + 2.0**-12):
        raise ValueRangeError(
            f"a scale of {largest:.6g} overflows {scale_type} (largest {ttype.maximum:.6g});"
            " use scale_type='float32' or smaller weights"
        )
    scale = xp.where(empty, scale * 0 + ZERO_BLOCK_SCALE, scale)
    return native(xp.clip(scale, ttype.smallest_positive, ttype.maximum), scale_type)


def require_reached(absmax: Array, element: TType, scale_type: str, zero: str) -> None:
    """Raise unless the smallest scale of a type leaves something of weights that are not 0.

    absmax: Largest magnitude of each block, in units of the tensor scale.
    element, scale_type: Types of the codes and of the scales.
    zero: Kind of zero point. Without one, a type in which no code stands for 0 makes small weights grow, and
        no block may be so small; else all are not.
    Raises ValueRangeError: Names the largest weight that is lost, and the smallest that is kept.
    """
    magnitudes = abs(element.probe_values())
    least = get_type(scale_type).smallest_positive * float(magnitudes[magnitudes > 0].min(initial=_HUGE))
    grows = zero == "none" and bool(magnitudes.all())
    some = absmax[absmax > 0]
    lost = some[some < least / 2]
    if len(lost) and (grows or len(lost) == len(some)):
        effect = "would become far larger" if grows else "would all become 0"
        raise ValueRangeError(
            f"weights of at most {float(lost.max()):.6g} underflow {element.name} with {scale_type} scales"
            f" (smallest {least:.6g}) and {effect}; use scale_type='float32' or larger weights"
        )


def native(values: Array, name: str) -> Array:
    """Round float64 values to a type that the array library holds itself."""
    xp = arrays_of(values)
    ttype = get_type(name)
    return xp.view(xp.cast(ttype.encode_finite(values), code_dtype(ttype.elem_bits)), name)


def wide_enough_for_zero(scale: Array, stats: Statistics, element: TType, scale_type: str) -> Array:
    """Raise scales so that a float zero point stays within its type's precision and range.

    A block far from 0 compared with its spread (low = 1, high = 1.000001) would need a zero
    point whose rounding error exceeds a step of the element, 1 or what it is where weights are mapped to,
    or, of elements with large steps, one that overflows.

    Raises ValueRangeError if values to map weights to are themselves out of its range.
    """
    xp = arrays_of(scale)
    middle, values = _middle(element), np.unique(element.probe_values())
    step = float(np.diff(values[values <= middle][-2:]).max(initial=1.0))
    mapped, to = (
        (stats.low, element.minimum) if element.is_integer else ((stats.low + stats.high) / 2, middle)
    )
    room = get_type(scale_type).maximum - abs(to)
    if room <= 0:
        raise ValueRangeError(
            f"zero points beside values of {element.name} around {to:g} overflow {scale_type}; use a wider"
            " scale_type, or a type whose values are smaller"
        )
    for floor in (stats.absmax * zero_precision(scale_type) / step, abs(mapped) / room):
        scale = xp.where(scale > floor, scale, floor)
    return scale


def zero_precision(scale_type: str) -> float:
    """Return the relative spacing of a float type: 2**-8 for bfloat16, 2**-11 for float16."""
    values = get_type(scale_type).probe_values()
    return float(values[values > 1].min() - 1) / 2


def _middle(element: TType) -> float:
    """Return the value nearest to the middle of those that weights are scaled to."""
    least, most = used_range(element)
    return float(element.decode_codes(element.encode(np.array([least / 2 + most / 2])))[0])


def initial_zero(scale: Array, stats: Statistics, element: TType, zero: str, scaling: str) -> Array:
    """Return unrounded float64 zero points for rounded float64 scales."""
    if scaling in ("absmax", "absmean", "mx"):
        return scale * 0 + reach(element, zero)[0]
    xp = arrays_of(scale)
    if not element.is_integer:  # floats are finest near 0: map the middle of the weights there
        return _middle(element) - (stats.low + stats.high) / 2 / scale
    low = xp.clip(stats.low, -_HUGE, 0.0) if zero == "integer" else stats.low
    return element.minimum - low / scale


def round_zero(zero: Array, element: TType, kind: str, scale_type: str) -> Array:
    """Round zero points: to integers in the element's range (int8 or uint8), or to the scale's type."""
    xp = arrays_of(zero)
    if kind == "float":
        return native(zero, scale_type)
    nearest = xp.clip(xp.rint(zero), element.minimum, element.maximum)
    return xp.cast(nearest, "int8" if element.minimum < 0 else "uint8")


def nearest_value(values: Array, element: TType) -> Array:
    """Return the element's values nearest to float64 values."""
    xp = arrays_of(values)
    if element.is_integer:
        return xp.clip(xp.rint(values), element.minimum, element.maximum)
    return element.decode_array(element.encode_finite(values))


def refine_zero(units: Array, mask: Array, zero: Array, element: TType, scale_type: str) -> Array:
    """Move float zero points by the half-quadratic solver of HQQ.

    Alternates between the soft-thresholded error (l_p norm, p < 1) and the zero point that
    fits it (Badri and Shaji, "Half-Quadratic Quantization", 2023). Works in units of the
    scale, so it does not depend on the weights' magnitude, and keeps the best zero point
    seen, so it never ends worse than it began.

    units: float64 [r, G, g]: weights / scale.
    mask: float64 [G, g]: 1 on real columns.
    zero: float64 [r, G]: start, as rounded to storage.
    element, scale_type: Types of the codes and of the zero points.
    Returns: float64 [r, G], representable in ``scale_type``.
    """
    xp = arrays_of(units)
    count = xp.sum(mask, 1)
    beta, best, best_error = HQQ_BETA, zero, None
    for _ in range(HQQ_ITERATIONS):
        level = nearest_value(units + zero[:, :, None], element)
        error = units - (level - zero[:, :, None])
        size = xp.clip(abs(error), 1e-12, _HUGE)
        slope = size ** (HQQ_NORM - 1)
        norm = xp.sum(size * slope * mask, 2)
        if best_error is None:
            best_error = norm
        best = xp.where(norm < best_error, zero, best)
        best_error = xp.where(norm < best_error, norm, best_error)
        shrunk = xp.sign(error) * xp.clip(size - slope / beta, 0.0, _HUGE)
        zero = xp.sum((level - units + shrunk) * mask, 2) / count
        zero = xp.cast(native(zero, scale_type), "float64")
        beta *= HQQ_GROWTH
    return best
