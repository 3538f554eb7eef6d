"""Operators of detectors: boxes and regions of interest."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ladder.runtime import native
from ladder.runtime.native import can_build
from ladder.runtime.onnx_ops.operation import Operation, Run
from tile_types.errors import ShapeError

BLOCK = 128
"""Boxes that are compared with each other at a time, the best first."""

PLACE_BITS = 31
"""Bits that a list and a box of it have beside a score, in a number of 64."""

SAMPLES = 1 << 22
"""Most interpolated elements of regions that are in memory at a time."""


def _suppression(
    op: Operation, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None
) -> Any:
    """Keep, per class, the best boxes of those that overlap."""
    count = 0 if most is None else int(most.reshape(()))
    limit = 0.0 if overlap is None else float(overlap.reshape(()))
    edges = _edges(boxes, bool(op.get("center_point_box", 0)))
    if _have_kernel(edges, scores):
        return _kept_by_kernel(edges, scores, count, limit, least)
    found = []
    for image in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            kept = _kept(edges[image], scores[image, kind], count, limit, least)
            found += [(image, kind, at) for at in kept]
    return torch.tensor(found, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _have_kernel(edges: Any, scores: Any) -> bool:
    """Tell whether the kernel takes boxes: finite ones, since its comparisons have no NaN."""
    plain = edges.device.type == "cpu" and edges.dtype == scores.dtype == torch.float32
    places = (scores.shape[0] * scores.shape[1]).bit_length() + scores.shape[2].bit_length()
    fits = plain and places < PLACE_BITS and scores.numel() < native.MOST_BYTES
    return fits and bool(edges.isfinite().all()) and can_build("suppression", "suppression")


def _kept_by_kernel(edges: Any, scores: Any, count: int, limit: float, least: Any) -> Any:
    """Return ``[image, class, box]`` of boxes that are kept; all lists are sorted together."""
    kinds, boxes, lists = scores.shape[1], scores.shape[2], scores.shape[0] * scores.shape[1]
    which, box = _best_first(scores.contiguous().numpy().reshape(-1), boxes, least)
    sizes = np.bincount(which, minlength=lists)
    most = max(0, min(count, int(sizes.max(initial=0))))
    if not most:
        return torch.empty(0, 3, dtype=torch.int64)
    starts = torch.from_numpy(np.concatenate([[0], sizes.cumsum()]).astype(np.int32))
    kept, counts = torch.zeros(lists, most, dtype=torch.int32), torch.empty(lists, dtype=torch.int32)
    areas = (edges[..., 2:] - edges[..., :2]).prod(-1)
    order = torch.from_numpy(box.astype(np.int32))
    native.entry("suppression", "suppression")(
        edges.contiguous(), areas.contiguous(), order, starts, torch.tensor([limit]), kept, counts
    )
    row, place = (torch.arange(most) < counts.unsqueeze(1)).nonzero(as_tuple=True)
    return torch.stack([row // kinds, row % kinds, kept[row, place].long()], 1)


def _best_first(scores: Any, boxes: int, least: Any) -> tuple[Any, Any]:
    """Return lists and boxes of scores above the least one, list by list, the best and then the first first.

    Numbers that order them so are sorted: a list, a score's bits from the largest on, a box.
    """
    at = np.arange(len(scores)) if least is None else np.flatnonzero(scores > np.float32(least.reshape(())))
    which, box = np.divmod(at, boxes)
    bits = (scores[at] + np.float32(0)).view(np.int32).astype(np.int64)  # no zero is negative
    falling = np.iinfo(np.int32).max - np.where(bits < 0, bits ^ np.iinfo(np.int32).max, bits)
    width = boxes.bit_length()
    order = np.sort((which << (width + 32)) | (falling << width) | box)
    return order >> (width + 32), order & ((1 << width) - 1)


def _edges(boxes: Any, by_centre: bool) -> Any:
    """Return the lower and upper corner of each box."""
    if by_centre:
        x, y, w, h = boxes.unbind(-1)
        return torch.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    a, b = boxes[..., :2], boxes[..., 2:]
    return torch.cat([torch.minimum(a, b), torch.maximum(a, b)], -1)


def _kept(edges: Any, scores: Any, count: int, limit: float, least: Any) -> list[int]:
    order = torch.sort(scores, descending=True, stable=True).indices
    if least is not None:
        order = order[scores[order] > least.reshape(())]
    kept: list[int] = []
    for block in torch.split(order, BLOCK):
        if len(kept) >= count:
            break
        boxes = edges[block]
        if kept:
            free = (_overlap(edges[kept].unsqueeze(1), boxes) <= limit).all(0)
            block, boxes = block[free], boxes[free]
        apart = (_overlap(boxes.unsqueeze(1), boxes) <= limit).cpu().numpy()
        kept += block[_first_apart(apart, count - len(kept))].tolist()
    return kept


def _first_apart(apart: Any, count: int) -> list[int]:
    """Return the first boxes, in order, each of which is apart from all before it."""
    chosen: list[int] = []
    free = np.ones(len(apart), dtype=bool)
    for at, row in enumerate(apart):
        if free[at] and len(chosen) < count:
            chosen.append(at)
            free &= row
    return chosen


def _overlap(box: Any, others: Any) -> Any:
    """Return intersection over union."""
    low, high = torch.maximum(box[..., :2], others[..., :2]), torch.minimum(box[..., 2:], others[..., 2:])
    shared = (high - low).clamp(min=0).prod(-1)
    area = (box[..., 2:] - box[..., :2]).prod(-1) + (others[..., 2:] - others[..., :2]).prod(-1) - shared
    return torch.where(
        area > 0, shared / torch.where(area > 0, area, torch.ones_like(area)), torch.zeros_like(area)
    )


def _roi_align(op: Operation, x: Any, rois: Any, images: Any) -> Any:
    """Pool samples that are interpolated at the places of a grid in each region."""
    height, width = op.get("output_height", 1), op.get("output_width", 1)
    scale, ratio = op.get("spatial_scale", 1.0), op.get("sampling_ratio", 0)
    default = "half_pixel" if op.version >= 16 else "output_half_pixel"
    half = op.get("coordinate_transformation_mode", default) == "half_pixel"
    if not bool(((images >= 0) & (images < len(x))).all()):
        raise ShapeError(f"a region is of none of the {len(x)} images")
    if op.get("mode", "avg") == "avg" and bool(rois.isfinite().all()) and 0 not in (*x.shape, len(rois)):
        placed = rois.double() * scale - (0.5 if half else 0.0)
        if _have_regions(x, len(rois) * height * width):
            return _by_shares(x, placed, images, (height, width), ratio, half)
        if ratio > 0:
            return _averaged(x, placed, images, (height, width), ratio, half)
    found = [
        _aligned(
            x[int(image)], (roi * scale - (0.5 if half else 0.0)).tolist(), (height, width), ratio, half, op
        )
        for roi, image in zip(rois, images, strict=True)
    ]
    return torch.stack(found) if found else x.new_zeros(0, x.shape[1], height, width)


def _have_regions(x: Any, cells: int) -> bool:
    """Tell whether the kernel takes pictures: finite ones, since cells have shares of 0."""
    plain = x.device.type == "cpu" and x.dtype != torch.float64 and x.shape[1] * cells < native.MOST_BYTES
    fits = plain and x.numel() < native.MOST_BYTES and bool(x.isfinite().all())
    return fits and can_build("regions", "regions")


def _by_shares(x: Any, rois: Any, images: Any, size: tuple[int, int], ratio: int, half: bool) -> Any:
    """Return the means of cells: sums of elements times a cell's share of their row and of their column."""
    sides = [
        _shares(rois[:, 1 - axis], rois[:, 3 - axis], size[axis], ratio, half, x.shape[2 + axis])
        for axis in range(2)
    ]
    found = torch.empty(len(rois), *size, x.shape[1], dtype=torch.float32)
    channels_last = x.float().permute(0, 2, 3, 1).contiguous()
    operands = (part for side in sides for part in side)
    native.entry("regions", "regions")(channels_last, images.to(torch.int32), *operands, found)
    return found.permute(0, 3, 1, 2).to(x.dtype, memory_format=torch.contiguous_format)


def _shares(first: Any, last: Any, cells: int, ratio: int, half: bool, extent: int) -> tuple[Any, Any]:
    """Return what each cell of each region takes of an axis, and where that begins and ends.

    first, last: Where regions begin and end, ``[regions]``.
    ratio: Samples of a cell; 0 takes as many as it has elements, rounded up.
    Returns float32 ``[regions, cells, extent]``, and int32 ``[regions, cells + 1, 2]``: the region behind its
        cells.
    """
    spans = last - first if half else (last - first).clamp(min=1.0)
    counts = torch.full_like(spans, ratio) if ratio > 0 else (spans / cells).ceil().clamp(min=0)
    found = torch.zeros(len(spans), cells, extent)
    ends = torch.zeros(len(spans), cells + 1, 2, dtype=torch.int32)
    for count in filter(None, counts.unique().long().tolist()):
        which = (counts == count).nonzero().reshape(-1)
        steps = (torch.arange(cells * count, dtype=torch.float64) + 0.5) / (cells * count)
        places = first[which].unsqueeze(1) + steps * spans[which].unsqueeze(1)
        part = ((places >= -1) & (places <= extent)) / count
        at = places.clamp(0, extent - 1)
        low = at.floor()
        taken = torch.zeros(len(which) * cells, extent, dtype=torch.float64)
        for tap, share in ((low, 1 - (at - low)), ((low + 1).clamp(max=extent - 1), at - low)):
            taken.scatter_add_(1, tap.long().reshape(-1, count), (share * part).reshape(-1, count))
        found[which] = taken.reshape(-1, cells, extent).float()
        near = low.reshape(-1, cells, count)
        bounds = torch.stack([near.amin(2), (near.amax(2) + 2).clamp(max=extent)], -1)
        whole = torch.stack([bounds[..., 0].amin(1), bounds[..., 1].amax(1)], -1)
        ends[which] = torch.cat([bounds, whole.unsqueeze(1)], 1).to(torch.int32)
    return found, ends


def _averaged(x: Any, rois: Any, images: Any, size: tuple[int, int], ratio: int, half: bool) -> Any:
    """Return the means of as many samples of each cell of every region; places beyond a border are 0."""
    found = x.new_empty(len(rois), x.shape[1], *size)
    many = max(1, SAMPLES // (x.shape[1] * size[0] * size[1] * ratio * ratio))
    for image in images.unique().tolist():
        for part in (images == image).nonzero().reshape(-1).split(many):
            places, inside = [], []
            for axis in range(2):
                first, last, extent = rois[part, 1 - axis], rois[part, 3 - axis], x.shape[2 + axis]
                span = last - first if half else (last - first).clamp(min=1.0)
                steps = torch.arange(size[axis] * ratio, dtype=torch.float64, device=x.device) + 0.5
                at = first.unsqueeze(1) + steps * (span / (size[axis] * ratio)).unsqueeze(1)
                inside.append((at >= -1) & (at <= extent))
                places.append((2 * at.clamp(0, extent - 1) + 1) / extent - 1)
            rows, columns = places[0].unsqueeze(2), places[1].unsqueeze(1)
            shape = (len(part), rows.shape[1], columns.shape[2])
            grid = torch.stack([columns.expand(shape), rows.expand(shape)], -1).reshape(1, -1, shape[2], 2)
            dtype = x.dtype if x.dtype == torch.float64 else torch.float32
            sampled = F.grid_sample(
                x[image : image + 1].to(dtype), grid.to(dtype), padding_mode="border", align_corners=False
            )
            within = inside[0].unsqueeze(2) & inside[1].unsqueeze(1)
            cells = F.avg_pool2d(sampled.reshape(x.shape[1], *shape) * within, ratio)
            found[part] = cells.transpose(0, 1).to(x.dtype)
    return found


def _aligned(x: Any, roi: list[float], size: tuple[int, int], ratio: int, half: bool, op: Operation) -> Any:
    left, top, right, bottom = roi
    spans = [bottom - top, right - left]
    spans = spans if half else [max(span, 1.0) for span in spans]
    cells = [span / n for span, n in zip(spans, size, strict=True)]
    counts = [ratio if ratio > 0 else ceil(cell) for cell in cells]
    if min(counts) < 1:  # a region of no extent has no samples
        return x.new_zeros(x.shape[0], *size)
    rows, columns = (
        begin + (torch.arange(n * count, dtype=torch.float64) + 0.5) * cell / count
        for begin, n, count, cell in zip((top, left), size, counts, cells, strict=True)
    )
    best = op.get("mode", "avg") == "max"
    taps = _bilinear(x, rows, columns)
    shape = (4, x.shape[0], size[0], counts[0], size[1], counts[1])
    if best:
        return taps.reshape(shape).amax((0, 3, 5)).to(x.dtype)
    return taps.sum(0).reshape(shape[1:]).mean((2, 4)).to(x.dtype)


def _bilinear(x: Any, rows: Any, columns: Any) -> Any:
    """Return the four weighted neighbours ``[4, C, rows, columns]`` of places; 0 outside."""
    parts = []
    pairs = []
    for places, extent in ((rows, x.shape[1]), (columns, x.shape[2])):
        inside = (places >= -1) & (places <= extent)
        at = places.clamp(min=0)
        low = at.floor().clamp(max=extent - 1)
        share = torch.where(low >= extent - 1, torch.zeros_like(at), at - low)
        high = (low + 1).clamp(max=extent - 1)
        pairs.append([(low.long(), (1 - share) * inside), (high.long(), share * inside)])
    for row, a in pairs[0]:
        for column, b in pairs[1]:
            parts.append(x[:, row][:, :, column] * (a.reshape(-1, 1) * b))
    return torch.stack(parts)


def _roi_pool(op: Operation, x: Any, rois: Any) -> Any:
    """Take the largest element of each cell of regions in whole pixels."""
    height, width = op.get("pooled_shape")
    scale = op.get("spatial_scale", 1.0)
    found = x.new_zeros(rois.shape[0], x.shape[1], height, width)
    for number, roi in enumerate(rois.tolist()):
        left, top, right, bottom = (floor(value * scale + 0.5) for value in roi[1:])
        rows, columns = max(bottom - top + 1, 1), max(right - left + 1, 1)
        for i in range(height):
            for j in range(width):
                box = x[int(roi[0])][
                    :, _cell(i, rows / height, top, x.shape[2]), _cell(j, columns / width, left, x.shape[3])
                ]
                if box.numel():
                    found[number, :, i, j] = box.amax((1, 2))
    return found


def _cell(at: int, size: float, begin: int, extent: int) -> slice:
    first, last = floor(at * size) + begin, ceil((at + 1) * size) + begin
    return slice(min(max(first, 0), extent), min(max(last, 0), extent))


def _affine_grid(op: Operation, theta: Any, size: Any) -> Any:
    wanted = [int(value) for value in size.tolist()]
    return F.affine_grid(theta, wanted, align_corners=bool(op.get("align_corners", 0)))


VISION: Mapping[str, Run] = {
    "AffineGrid": _affine_grid,
    "NonMaxSuppression": _suppression,
    "RoiAlign": _roi_align,
    "MaxRoiPool": _roi_pool,
}
"""Operators of detectors."""
