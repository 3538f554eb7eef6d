"""Resize and Upsample in all modes: each axis is resampled by weights of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import ceil, inf, prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.moves import moving
from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.resampled import have_kernels, interpolated, picked
from tile_types.errors import ShapeError

Place = Callable[[Any, float, int, int, float, float], Any]
"""``(x of the result, scale, extent, new extent, begin, end of the region) -> x of the operand``."""


def _symmetric(x: Any, scale: float, extent: int, out: int, begin: float, end: float) -> Any:
    """Half pixels around the middle, where the scaled extent is rounded."""
    adjustment = out / (scale * extent)
    return extent / 2 * (1 - adjustment) + (x + 0.5) / scale - 0.5


def _corners(x: Any, scale: float, extent: int, out: int, begin: float, end: float) -> Any:
    """Take a scaled extent with its fraction, as the standard's reference does; onnxruntime cuts it off."""
    length = scale * extent
    return x * (extent - 1) / (length - 1) if length != 1 else 0 * x


def _crop(x: Any, scale: float, extent: int, out: int, begin: float, end: float) -> Any:
    if out == 1:
        return 0 * x + 0.5 * (begin + end) * (extent - 1)
    return begin * (extent - 1) + x * (end - begin) * (extent - 1) / (out - 1)


PLACES: Mapping[str, Place] = {
    "half_pixel": lambda x, scale, extent, out, begin, end: (x + 0.5) / scale - 0.5,
    "half_pixel_symmetric": _symmetric,
    "pytorch_half_pixel": lambda x, s, n, m, b, e: (x + 0.5) / s - 0.5 if m > 1 else 0 * x,
    "asymmetric": lambda x, s, n, m, b, e: x / s,
    "align_corners": _corners,
    "tf_crop_and_resize": _crop,
    "tf_half_pixel_for_nn": lambda x, s, n, m, b, e: (x + 0.5) / s,
}
"""How coordinates of the result are those of the operand."""

NEAREST: Mapping[str, Callable[[Any], Any]] = {
    "round_prefer_floor": lambda x: torch.ceil(x - 0.5),
    "round_prefer_ceil": lambda x: torch.floor(x + 0.5),
    "floor": torch.floor,
    "ceil": torch.ceil,
}
"""How a coordinate becomes that of an element."""


def _cubic(x: Any, a: float) -> Any:
    x = x.abs()
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = ((a * x - 5 * a) * x + 8 * a) * x - 4 * a
    return torch.where(x <= 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


KERNELS: Mapping[str, tuple[Callable[[Any, float], Any], int]] = {
    "linear": (lambda x, a: (1 - x.abs()).clamp(min=0), 1),
    "cubic": (_cubic, 2),
}
"""Mode -> weight by distance, and how far it reaches."""


def axis_taps(op: Operation, places: Any, extent: int, scale: float) -> tuple[Any, Any]:
    """Return which elements of an axis are read, and their weights, ``[out, taps]`` each.

    Elements that do not count are not read: an infinite one, times a weight of 0, would be NaN.
    """
    function, reach = KERNELS[op.get("mode")]
    a = op.get("cubic_coeff_a", -0.75)
    antialias = bool(op.get("antialias", 0))
    stretch = min(scale, 1.0) if antialias else 1.0
    span = int(-(-reach // stretch)) + 1 if antialias else reach
    first = places.floor().to(torch.int64)
    taps = first.reshape(-1, 1) + torch.arange(1 - span, span + 1)
    weights = function((taps - places.reshape(-1, 1)) * stretch, a)
    inside = (taps >= 0) & (taps < extent)
    if op.get("exclude_outside", 0):
        weights = torch.where(inside, weights, torch.zeros_like(weights))
    if op.get("exclude_outside", 0) or antialias:
        weights = weights / weights.sum(1, keepdim=True)
    if antialias:
        taps = torch.where(weights == 0, first.reshape(-1, 1), taps)
    return taps.clamp(0, extent - 1), weights


def _axes(op: Operation, rank: int) -> list[int]:
    """Return the axes that are resized, each once; ShapeError if they are none of the operand's."""
    axes = [int(axis) for axis in op.get("axes") or range(rank)]
    if any(not -rank <= axis < rank for axis in axes) or len({axis % rank for axis in axes}) != len(axes):
        raise ShapeError(f"{op.name} of axes {axes}: the operand has {rank}, each is named once")
    return [axis % rank for axis in axes]


def _one_each(op: Operation, what: str, values: list[Any], axes: Sequence[int]) -> list[Any]:
    """Return finite numbers, one for each axis; ShapeError if there are others, or less than 0."""
    if len(values) != len(axes) or not all(0 <= value < inf for value in values):
        raise ShapeError(f"{op.name}: {what} {values} for {len(axes)} axes")
    return values


def _roi(op: Operation, roi: Any, axes: Sequence[int]) -> list[tuple[float, float]]:
    mode = op.get("coordinate_transformation_mode")
    if roi is None or not roi.numel() or mode != "tf_crop_and_resize":
        return [(0.0, 1.0)] * len(axes)
    values = roi.tolist()
    if len(values) != 2 * len(axes):
        raise ShapeError(f"{op.name}: a region of {len(values)} numbers for {len(axes)} axes")
    return list(zip(values[: len(axes)], values[len(axes) :], strict=True))


def _targets(op: Operation, x: Any, scales: Any, sizes: Any, axes: Sequence[int]) -> list[tuple[int, float]]:
    """Return the new extent and the scale of each axis."""
    if sizes is None or not sizes.numel():
        factors = _one_each(op, "scales", [float(value) for value in scales.tolist()], axes)
        return [(int(x.shape[axis] * scale), scale) for axis, scale in zip(axes, factors, strict=True)]
    wanted = _one_each(op, "sizes", [int(value) for value in sizes.tolist()], axes)
    extents = [x.shape[axis] for axis in axes]
    ratios = [size / extent if extent else 1.0 for size, extent in zip(wanted, extents, strict=True)]
    policy = op.get("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return list(zip(wanted, ratios, strict=True))
    scale = min(ratios) if policy == "not_larger" else max(ratios)
    return [(int(scale * extent + 0.5), scale) for extent in extents]


def _chosen(op: Operation, places: Any, extent: int) -> Any:
    """Return the elements of an axis that are nearest."""
    found = NEAREST[op.get("nearest_mode", "round_prefer_floor")](places)
    return found.clamp(0, extent - 1).to(torch.int64)


def _nearest(op: Operation, x: Any, axis: int, places: Any, scale: float) -> Any:
    return x.index_select(axis, _chosen(op, places, x.shape[axis]).to(x.device))


def _resampled(op: Operation, x: Any, axis: int, places: Any, scale: float) -> Any:
    shape = [-1 if at == axis else 1 for at in range(x.ndim)]
    taps, weights = (value.to(x.device) for value in axis_taps(op, places, x.shape[axis], scale))
    total: Any = 0
    for tap, weight in zip(taps.T, weights.T.to(x.dtype), strict=True):
        total = total + x.index_select(axis, tap) * weight.reshape(shape)
    return total


EIGHT_BITS = 2.0**22
"""Weights of codes of 8 bits are multiples of one over this, as in Pillow and onnxruntime."""


def _smoothed_codes(op: Operation, x: Any, axis: int, places: Any, scale: float) -> Any:
    """Resample whole numbers along one axis and round them, as Pillow and onnxruntime do between axes."""
    taps, weights = axis_taps(op, places, x.shape[axis], scale)
    if x.element_size() == 1:
        weights = (weights * EIGHT_BITS).round() / EIGHT_BITS
    matrix = torch.zeros(len(taps), x.shape[axis], dtype=torch.float64).scatter_add_(1, taps, weights)
    found = (x.movedim(axis, -1).double() @ matrix.T.to(x.device)).movedim(-1, axis)
    return _back(found.sign() * (found.abs() + 0.5).floor(), x.dtype)


CORNERS = {"half_pixel": False, "pytorch_half_pixel": False, "align_corners": True}
"""Coordinates that torch's function has -> its name for them."""

LINEAR = {3: "linear1d", 4: "bilinear2d", 5: "trilinear3d"}
"""Rank -> torch's function."""

SHAPES = 16
"""Shapes for which a node keeps what it finds of them."""

LARGEST_FLOAT32_EXTENT = 256
"""Extent up to which coordinates in float32, as torch has them, give weights within 2e-5."""


def _is_torchs(op: Operation, x: Any, axes: Sequence[int], targets: Sequence[tuple[int, float]]) -> bool:
    """Tell whether torch's function gives the result: linear, of all axes behind two, at its coordinates."""
    how = op.get("coordinate_transformation_mode", "half_pixel")
    linear = op.get("mode") == "linear" and how in CORNERS
    if not linear or op.get("antialias", 0) or op.get("exclude_outside", 0) or x.ndim not in LINEAR:
        return False

    def fits(axis: int, out: int, scale: float) -> bool:
        extent = x.shape[axis]
        if axis < 2 or not extent:
            return out == extent and scale == 1 and extent > 0
        whole = abs(out - scale * extent) < 1e-9 * out
        precise = extent <= LARGEST_FLOAT32_EXTENT or (how != "align_corners" and scale in (2, 4, 8))
        return whole and precise and out > (how == "pytorch_half_pixel")

    moved = {axis for axis, _ in zip(axes, targets, strict=True) if axis > 1}
    return len(moved) == x.ndim - 2 and all(
        fits(axis, *target) for axis, target in zip(axes, targets, strict=True)
    )


class Found(NamedTuple):
    """A node for known shapes: its axes, their new extents and scales, and one callable for all of them."""

    axes: Sequence[int]
    targets: Sequence[tuple[int, float]]
    whole: Callable[[Any], Any] | None


def _found_of(op: Operation, x: Any, scales: Any, sizes: Any) -> Found:
    axes = _axes(op, x.ndim)
    targets, how = _targets(op, x, scales, sizes, axes), op.get("coordinate_transformation_mode")
    same = all(scale == 1 and out == x.shape[axis] for axis, (out, scale) in zip(axes, targets, strict=True))
    if same and how != "tf_crop_and_resize":
        return Found(axes, targets, lambda work: work)
    by_kernel = _by_kernel(op, x, axes, targets)
    if by_kernel is not None:
        return Found(axes, targets, by_kernel)
    smoothed = _smoothed(op, x, axes, targets)
    if smoothed is not None or _is_blended(op, x.dtype) or not _is_torchs(op, x, axes, targets):
        return Found(axes, targets, smoothed)
    shape = [out for axis, (out, _) in sorted(zip(axes, targets, strict=True)) if axis > 1]
    function, corners = getattr(torch._C._nn, f"upsample_{LINEAR[x.ndim]}"), CORNERS[how or "half_pixel"]
    return Found(axes, targets, lambda work: function(work, shape, corners))


def _by_kernel(
    op: Operation, x: Any, axes: Sequence[int], targets: Sequence[tuple[int, float]]
) -> Callable[[Any], Any] | None:
    """Return the kernel of ours that gives the result, with its taps; None if there is none."""
    mode, how = op.get("mode", "nearest"), op.get("coordinate_transformation_mode", "half_pixel")
    linear = mode == "linear" and x.dtype != torch.float64 and not op.get("antialias", 0)
    plain = (linear and not _is_blended(op, x.dtype)) or mode == "nearest"
    largest = prod(max(out, x.shape[axis]) for axis, (out, _) in zip(axes, targets, strict=True))
    if not plain or how == "tf_crop_and_resize" or not have_kernels(x, largest):
        return None
    taps: dict[int, Any] = {}
    for axis, (out, scale) in zip(axes, targets, strict=True):
        if out != x.shape[axis] or scale != 1:
            places = PLACES[how](torch.arange(out, dtype=torch.float64), scale, x.shape[axis], out, 0.0, 1.0)
            if linear:
                tap, share = axis_taps(op, places, x.shape[axis], scale)
                taps[axis] = tap.T.to(torch.int32).contiguous(), share.T.to(torch.float32).contiguous()
            else:
                taps[axis] = _chosen(op, places, x.shape[axis]).to(torch.int32)
    function = interpolated if linear else picked
    return lambda work: function(work, taps)


MOST_MARGINS = 2
"""Times an extent that a margin may be."""

MOST_SHIFT = 5e-6
"""Elements by which results may be shifted behind a margin that scales to no whole number."""


def _margin(extent: int, out: int, scale: float) -> tuple[int, int] | None:
    """Return how many elements and results are a margin that windows at a border do not leave."""
    if scale == 1 and out == extent:
        return 0, 0
    least = ceil(1 / min(scale, 1)) + 1
    for margin in range(least, MOST_MARGINS * extent + 1):
        results = round(margin * scale)
        if results and abs(margin * scale - results) < MOST_SHIFT * scale:
            return margin, results
    return None


def _smoothed(
    op: Operation, x: Any, axes: Sequence[int], targets: Sequence[tuple[int, float]]
) -> Callable[[Any], Any] | None:
    """Return torch's function of pictures that are smoothed while they shrink, if it gives the result.

    It leaves out what lies beyond borders, where ONNX repeats elements: margins of these are put around.
    """
    how = op.get("coordinate_transformation_mode", "half_pixel")
    linear = op.get("mode") == "linear" and op.get("antialias", 0) and not op.get("exclude_outside", 0)
    linear = linear and x.dtype.is_floating_point
    by_axis = dict(zip(axes, targets, strict=True))
    moved = {axis for axis, (out, scale) in by_axis.items() if (out, scale) != (x.shape[axis], 1)}
    if not linear or x.ndim != 4 or not moved <= {2, 3} or how not in ("half_pixel", "pytorch_half_pixel"):
        return None
    sides = []
    for axis in (2, 3):
        out, scale = by_axis.get(axis, (x.shape[axis], 1.0))
        several = out > (how == "pytorch_half_pixel")
        margin = _margin(x.shape[axis], out, scale) if several and x.shape[axis] else None
        if margin is None:
            return None
        sides.append((out, scale, *margin))
    (high, row, above, top), (wide, column, before, left) = sides

    def smooth(work: Any) -> Any:
        padded = F.pad(work, [before, before, above, above], mode="replicate")
        found = _torchs_smoothed(padded, [high + 2 * top, wide + 2 * left], row, column)
        return found[:, :, top : top + high, left : left + wide].contiguous()

    return smooth


def _torchs_smoothed(x: Any, out: list[int], row: float, column: float) -> Any:
    """Call torch's function; where results have one column, columns as rows: it reads one element there."""
    function = torch.ops.aten._upsample_bilinear2d_aa.default
    if out[1] > 1:
        return function(x, out, False, row, column)
    return function(function(x, [x.shape[2], 1], False, 1.0, column).mT, out[::-1], False, 1.0, row).mT


def resize(op: Operation, x: Any, roi: Any = None, scales: Any = None, sizes: Any = None) -> Any:
    """Resize; axes one after the other."""
    known = op.once(dict)
    key = x.shape, *(None if value is None else tuple(value.tolist()) for value in (scales, sizes))
    found = known.get(key)
    if found is None:
        if len(known) == SHAPES:
            known.clear()
        found = known[key] = _found_of(op, x, scales, sizes)
    axes, targets, whole = found
    mode, how = op.get("mode", "nearest"), op.get("coordinate_transformation_mode", "half_pixel")
    dtype, outside = x.dtype, []
    codes = mode != "nearest" and bool(op.get("antialias", 0)) and not dtype.is_floating_point
    work = x if mode == "nearest" or codes or dtype in (torch.float32, torch.float64) else x.float()
    blended: list[tuple[int, Any]] = []
    if whole is not None and (not op.get("antialias", 0) or bool(work.sum().isfinite())):
        return whole(work) if work.dtype == dtype else _back(whole(work), dtype)
    each = sorted(zip(axes, targets, _roi(op, roi, axes), strict=True), reverse=codes)
    for axis, (out, scale), (begin, end) in each:
        extent = x.shape[axis]
        if out == extent and scale == 1 and how != "tf_crop_and_resize":
            continue
        kind = torch.float32 if _is_blended(op, dtype) else torch.float64
        places = PLACES[how](torch.arange(out, dtype=kind), scale, extent, out, begin, end)
        if how == "tf_crop_and_resize":
            outside.append((axis, (places < 0) | (places > extent - 1)))
        if _is_blended(op, dtype):
            blended.append((axis, places))
            continue
        function = _nearest if mode == "nearest" else _smoothed_codes if codes else _resampled
        work = function(op, work, axis, places, scale)
    work = _blended(work, blended) if blended else work
    for axis, beyond in outside:
        shape = [-1 if at == axis else 1 for at in range(work.ndim)]
        fill = torch.full((), op.get("extrapolation_value", 0.0), dtype=work.dtype)
        work = torch.where(beyond.reshape(shape).to(work.device), fill.to(work.device), work)
    if _is_blended(op, dtype):
        return work.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)
    return work if work.dtype == dtype else _back(work, dtype)


def _is_blended(op: Operation, dtype: Any) -> bool:
    """Tell whole numbers between neighbours: their fractions are cut off, so onnxruntime's order is kept."""
    return op.get("mode") == "linear" and not (dtype.is_floating_point or op.get("antialias", 0))


def _blended(x: Any, axes: Sequence[tuple[int, Any]]) -> Any:
    """Return the sum of all neighbours times products of their distances, as onnxruntime adds them, float32.

    axes: Each with its coordinates, the last one varies fastest.
    """
    sides = []
    for axis, places in axes:
        extent, shape = x.shape[axis], [-1 if at == axis else 1 for at in range(x.ndim)]
        within = places.clamp(0, extent - 1)
        first = within.to(torch.int64)
        second = (first + 1).clamp(max=extent - 1)
        shares = [torch.where(first == second, 0.5, (within - tap).abs()) for tap in (second, first)]
        sides.append(
            [(axis, tap, share.reshape(shape)) for tap, share in zip((first, second), shares, strict=True)]
        )
    total: Any = None
    for corner in product(*sides):
        taken, share = x, 1.0
        for axis, tap, part in reversed(corner):
            taken, share = taken.index_select(axis, tap), share * part
        total = taken * share if total is None else total + taken * share
    return total


def _back(x: Any, dtype: Any) -> Any:
    if dtype.is_floating_point:
        return x.to(dtype)
    return x.round().clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max).to(dtype)


def _resize(op: Operation, x: Any, *rest: Any) -> Any:
    """Opset 10 has scales alone, and coordinates that begin at the corner."""
    if op.version < 11:
        older = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", **op.given}
        older["mode"] = {"bilinear": "linear"}.get(older.get("mode", "nearest"), older.get("mode", "nearest"))
        return _any(Operation(op.name, 11, older), x, None, *rest)
    return _any(op, x, *rest)


def _any(op: Operation, x: Any, *rest: Any) -> Any:
    if op.get("mode", "nearest") == "nearest":
        return moving(lambda op, x, *rest: resize(op, x, *rest))(op, x, *rest)
    return resize(op, x, *rest)


def _upsample(op: Operation, x: Any, scales: Any = None) -> Any:
    factors = scales if scales is not None else torch.tensor(op.get("scales", _old_scales(op, x)))
    return _resize(Operation(op.name, 10, op.given), x, factors)


def _old_scales(op: Operation, x: Any) -> list[float]:
    """Return what opset 1 states by two attributes."""
    return [1.0, 1.0, op.get("height_scale", 1.0), op.get("width_scale", 1.0)][: x.ndim]


# sampling at given places ----------------------------------------------------------------------------


TORCHS_MODES = ({"linear": "bilinear", "cubic": "bicubic"}, {"linear": "bilinear"})
"""Modes of images, and of volumes -> what torch calls them. What is nearest is found in float64."""


FARTHEST = 4
"""Elements beyond an image that no kernel reaches into it."""


def _is_sampled_by_torch(x: Any, grid: Any) -> bool:
    """Whether torch's kernel samples a tensor at such places: to it NaN and infinity are places outside."""
    plain = x.ndim in (4, 5) and x.dtype in (torch.float32, torch.float64) and x.device.type == "cpu"
    return plain and 0 not in (*x.shape, *grid.shape) and bool(grid.isfinite().all())


def _grid_sample(op: Operation, x: Any, grid: Any) -> Any:
    """Sample at places of -1 to 1 per axis, given last axis first."""
    rank, corners = x.ndim - 2, bool(op.get("align_corners", 0))
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(op.get("mode", "linear"), op.get("mode", "linear"))
    if mode in TORCHS_MODES[rank > 2] and x.dtype == grid.dtype and _is_sampled_by_torch(x, grid):
        padding = op.get("padding_mode", "zeros")
        return F.grid_sample(x, grid, TORCHS_MODES[rank > 2][mode], padding, corners)
    places = []
    for axis in range(rank):
        extent = x.shape[2 + axis]
        at = grid[..., rank - 1 - axis].double()
        at = (at + 1) / 2 * (extent - 1) if corners else ((at + 1) * extent - 1) / 2
        if op.get("padding_mode", "zeros") == "border":  # all is alike so far outside, infinity too
            at = at.clamp(-FARTHEST, extent - 1 + FARTHEST)
        places.append(at)
    if mode == "nearest":
        weights = [[(place.round(), torch.ones_like(place))] for place in places]
    else:
        function, reach = KERNELS[mode]
        weights = [
            [
                (place.floor() + t, function(place.floor() + t - place, -0.75))
                for t in range(1 - reach, reach + 1)
            ]
            for place in places
        ]
    total: Any = 0
    for taps in product(*weights):
        found, inside = _picked(op, x, [at for at, _ in taps], corners)
        share = torch.ones_like(places[0])
        for _, weight in taps:
            share = share * weight
        total = total + found * (share * inside).unsqueeze(1).to(found.dtype)
    return total.to(x.dtype)


def _picked(op: Operation, x: Any, places: Sequence[Any], corners: bool) -> tuple[Any, Any]:
    """Return elements at whole places, and which of them count."""
    mode, inside = op.get("padding_mode", "zeros"), torch.ones_like(places[0], dtype=torch.bool)
    flat, index = x.flatten(2), torch.zeros_like(places[0], dtype=torch.int64)
    for extent, place in zip(x.shape[2:], places, strict=True):
        if mode == "reflection":
            place = _mirrored(place, extent, corners)
        elif mode == "zeros":
            inside = inside & (place >= 0) & (place < extent)
        index = index * extent + place.nan_to_num(-1).clamp(0, extent - 1).to(torch.int64)
    rows = index.reshape(x.shape[0], 1, -1).expand(-1, x.shape[1], -1)
    return flat.gather(2, rows).reshape(*x.shape[:2], *index.shape[1:]), inside


def _mirrored(place: Any, extent: int, corners: bool) -> Any:
    """Reflect at the centres of the outer elements, or at their edges."""
    low, span = (0.0, extent - 1) if corners else (-0.5, extent)
    if span == 0:
        return 0 * place
    away = (place - low).abs() % (2 * span)
    return torch.minimum(away, 2 * span - away) + low


RESIZES: Mapping[str, Run] = {"Resize": _resize, "Upsample": _upsample, "GridSample": _grid_sample}
"""Operators that resample."""
