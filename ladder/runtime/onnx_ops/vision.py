"""Operators of detectors: boxes and regions of interest."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, floor
from typing import Any

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run


def _suppression(
    op: Operation, boxes: Any, scores: Any, most: Any = None, overlap: Any = None, least: Any = None
) -> Any:
    """Keep, per class, the best boxes of those that overlap."""
    count = 0 if most is None else int(most.reshape(()))
    limit = 0.0 if overlap is None else float(overlap.reshape(()))
    found = []
    for image in range(scores.shape[0]):
        edges = _edges(boxes[image], bool(op.get("center_point_box", 0)))
        for kind in range(scores.shape[1]):
            kept = _kept(edges, scores[image, kind], count, limit, least)
            found += [(image, kind, at) for at in kept]
    return torch.tensor(found, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _edges(boxes: Any, by_centre: bool) -> Any:
    """Return the lower and upper corner of each box."""
    if by_centre:
        x, y, w, h = boxes.unbind(-1)
        return torch.stack([y - h / 2, x - w / 2, y + h / 2, x + w / 2], -1)
    a, b = boxes[:, :2], boxes[:, 2:]
    return torch.cat([torch.minimum(a, b), torch.maximum(a, b)], -1)


def _kept(edges: Any, scores: Any, count: int, limit: float, least: Any) -> list[int]:
    order = torch.sort(scores, descending=True, stable=True).indices
    if least is not None:
        order = order[scores[order] > least.reshape(())]
    kept: list[int] = []
    while len(order) and len(kept) < count:
        best = int(order[0])
        kept.append(best)
        order = order[1:][_overlap(edges[best], edges[order[1:]]) <= limit]
    return kept


def _overlap(box: Any, others: Any) -> Any:
    """Return intersection over union."""
    sides = (torch.minimum(box[2:], others[:, 2:]) - torch.maximum(box[:2], others[:, :2])).clamp(min=0)
    shared = sides.prod(-1)
    area = (box[2:] - box[:2]).prod(-1) + (others[:, 2:] - others[:, :2]).prod(-1) - shared
    return torch.where(
        area > 0, shared / torch.where(area > 0, area, torch.ones_like(area)), torch.zeros_like(area)
    )


def _roi_align(op: Operation, x: Any, rois: Any, images: Any) -> Any:
    """Pool samples that are interpolated at the places of a grid in each region."""
    height, width = op.get("output_height", 1), op.get("output_width", 1)
    scale, ratio = op.get("spatial_scale", 1.0), op.get("sampling_ratio", 0)
    default = "half_pixel" if op.version >= 16 else "output_half_pixel"
    half = op.get("coordinate_transformation_mode", default) == "half_pixel"
    found = [
        _aligned(
            x[int(image)], (roi * scale - (0.5 if half else 0.0)).tolist(), (height, width), ratio, half, op
        )
        for roi, image in zip(rois, images, strict=True)
    ]
    return torch.stack(found) if found else x.new_zeros(0, x.shape[1], height, width)


def _aligned(x: Any, roi: list[float], size: tuple[int, int], ratio: int, half: bool, op: Operation) -> Any:
    left, top, right, bottom = roi
    spans = [bottom - top, right - left]
    spans = spans if half else [max(span, 1.0) for span in spans]
    cells = [span / n for span, n in zip(spans, size, strict=True)]
    counts = [ratio if ratio > 0 else max(ceil(cell), 1) for cell in cells]
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
