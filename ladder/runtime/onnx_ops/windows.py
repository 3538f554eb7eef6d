"""Operators over windows: convolutions, transposed ones, pooling."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from math import inf, prod
from typing import Any

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from tile_types.errors import ShapeError

Pools = Mapping[int, Callable[..., Any]]
CONVOLUTIONS: Pools = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED: Pools = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX_POOLS: Pools = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
AVERAGE_POOLS: Pools = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
"""Functions by the number of spatial axes."""

LEAST_CHANNELS = 8
"""Channels from which images are pooled with channels last."""


def window_pads(
    op: Operation, spatial: Sequence[Any], kernel: Sequence[int], strides: Sequence[int], gaps: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return what is added before and after each spatial axis; extents are read for ``auto_pad`` alone."""
    rank, mode = len(kernel), op.get("auto_pad", "NOTSET")
    if mode in ("NOTSET", "VALID", ""):
        pads = op.get("pads", [0] * 2 * rank) if mode != "VALID" else [0] * 2 * rank
        return list(pads[:rank]), list(pads[rank:])
    low, high = [], []
    for extent, taps, step, gap in zip(spatial, kernel, strides, gaps, strict=True):
        missing = max((-(-extent // step) - 1) * step + gap * (taps - 1) + 1 - extent, 0)
        parts = [missing // 2, missing - missing // 2]
        before, after = parts if mode == "SAME_UPPER" else parts[::-1]
        low.append(before)
        high.append(after)
    return low, high


def padded(x: Any, low: Sequence[int], high: Sequence[int], value: float = 0.0) -> Any:
    """Return a tensor with its last axes padded; what is below 0 is cut off."""
    if not any(low) and not any(high):
        return x
    pairs = [extent for pair in zip(reversed(low), reversed(high), strict=True) for extent in pair]
    return F.pad(x, pairs, value=value)


def settings(op: Operation, rank: int) -> tuple[list[int], list[int]]:
    """Return strides and dilations."""
    return list(op.get("strides") or [1] * rank), list(op.get("dilations") or [1] * rank)


def _kernel(x: Any, w: Any) -> list[int]:
    """Return the extents of a filter; ShapeError if it has other axes than the images."""
    if w.ndim != x.ndim or w.ndim - 2 not in CONVOLUTIONS:
        raise ShapeError(f"filters {list(w.shape)} of images {list(x.shape)}")
    return list(w.shape[2:])


def convolved(op: Operation, x: Any, w: Any, bias: Any = None) -> Any:
    """Convolve, of any number of spatial axes up to three."""
    kernel = _kernel(x, w)
    strides, gaps = settings(op, len(kernel))
    low, high = window_pads(op, x.shape[2:], kernel, strides, gaps)
    if (out := window_counts(x.shape, kernel, strides, gaps, low, high)) and min(out) < 1:
        return x.new_zeros(x.shape[0], w.shape[0], *(max(extent, 0) for extent in out))
    function = CONVOLUTIONS[len(kernel)]
    groups = op.get("group", 1)
    if low == high and min(low) >= 0:
        return function(x, w, bias, strides, low, gaps, groups)
    return function(padded(x, low, high), w, bias, strides, 0, gaps, groups)


def window_counts(
    shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    gaps: Sequence[int],
    low: Sequence[int],
    high: Sequence[int],
) -> list[int]:
    """Return how many windows fit along each spatial axis; torch refuses images that none fits into."""
    spans = [extent + a + b for extent, a, b in zip(shape[2:], low, high, strict=True)]
    return [
        (span - gap * (taps - 1) - 1) // step + 1
        for span, taps, step, gap in zip(spans, kernel, strides, gaps, strict=True)
    ]


def _conv_transposed(op: Operation, x: Any, w: Any, bias: Any = None) -> Any:
    """Scatter what a convolution gathers; the border is cut off afterwards."""
    kernel = _kernel(x, w)
    strides, gaps = settings(op, len(kernel))
    extra = list(op.get("output_padding") or [0] * len(kernel))
    function = TRANSPOSED[len(kernel)]
    full = function(x, w, None, strides, 0, 0, op.get("group", 1), gaps)
    natural = [
        step * (extent - 1) + added + (taps - 1) * gap + 1
        for step, extent, added, taps, gap in zip(strides, x.shape[2:], extra, kernel, gaps, strict=True)
    ]
    low, target = _transposed_border(op, x, natural, strides)
    high = [extent - full.shape[2 + at] + low[at] for at, extent in enumerate(target)]
    cut = padded(full, [-value for value in low], high)
    return cut if bias is None else cut + bias.reshape(1, -1, *[1] * len(kernel))


def _transposed_border(
    op: Operation, x: Any, natural: Sequence[int], strides: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return what is cut off before each axis, and the extents of the result."""
    rank, mode = len(natural), op.get("auto_pad", "NOTSET")
    shape = op.get("output_shape")
    if shape is None and mode in ("NOTSET", "VALID", ""):
        pads = list(op.get("pads") or [0] * 2 * rank) if mode != "VALID" else [0] * 2 * rank
        return pads[:rank], [n - pads[at] - pads[at + rank] for at, n in enumerate(natural)]
    if shape is None:
        shape = [extent * step for extent, step in zip(x.shape[2:], strides, strict=True)]
    target = list(shape)[-rank:]
    cut = [n - extent for n, extent in zip(natural, target, strict=True)]
    upper = mode == "SAME_UPPER"
    return [value // 2 if upper else value - value // 2 for value in cut], target


# pooling ---------------------------------------------------------------------------------------------


def _geometry(
    op: Operation, x: Any
) -> tuple[list[int], list[int], list[int], list[int], list[int], list[int]]:
    """Return kernel, strides, dilations, padding before and after, and extents of the result."""
    kernel = list(op.get("kernel_shape"))
    strides, gaps = settings(op, len(kernel))
    low, high = window_pads(op, x.shape[2:], kernel, strides, gaps)
    out = []
    same = op.get("auto_pad", "NOTSET") in ("SAME_UPPER", "SAME_LOWER")
    for at, taps in enumerate(kernel):
        span = x.shape[2 + at] + low[at] + high[at] - (gaps[at] * (taps - 1) + 1)
        count = span // strides[at] + 1
        if op.get("ceil_mode", 0) and not same and span % strides[at]:
            begins = count * strides[at] < x.shape[2 + at] + low[at]  # no window begins in the padding after
            count += int(begins)
        out.append(count)
    return kernel, strides, gaps, low, high, out


def _windows(x: Any, geometry: Any, value: float) -> Any:
    """Return ``x`` as ``[N, C, *out, taps]``."""
    kernel, strides, gaps, low, _, out = geometry
    needed = [
        (count - 1) * step + gap * (taps - 1) + 1
        for count, step, gap, taps in zip(out, strides, gaps, kernel, strict=True)
    ]
    after = [n - before - extent for n, before, extent in zip(needed, low, x.shape[2:], strict=True)]
    full = padded(x, low, after, value)
    parts = [
        full[
            (
                ...,
                *(
                    slice(at * gap, at * gap + (count - 1) * step + 1 if count > 0 else at * gap, step)
                    for at, gap, count, step in places
                ),
            )
        ]
        for taps in product(*(range(n) for n in kernel))
        for places in [list(zip(taps, gaps, out, strides, strict=True))]
    ]
    return torch.stack(parts, -1)


def _max_pool(op: Operation, x: Any) -> Any:
    geometry = _geometry(op, x)
    if op.count == 1 and _is_pooled_by_torch(op, x, geometry):
        kernel, strides, gaps, low, _, _ = geometry
        return MAX_POOLS[len(kernel)](_by_channels(x), kernel, strides, low, gaps).contiguous()
    lowest = -inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    found = _windows(x, geometry, lowest)
    values = found.amax(-1)
    if op.count == 1:
        return values
    return values, _positions(op, x, found, geometry) if values.numel() else values.to(torch.int64)


def _is_pooled_by_torch(op: Operation, x: Any, geometry: Any) -> bool:
    """Whether torch's own pooling means the same."""
    kernel, _, _, low, high, out = geometry
    if not x.is_floating_point() or low != high or len(kernel) > 3 or op.get("ceil_mode", 0):
        return False
    small = all(2 * pad <= taps for pad, taps in zip(low, kernel, strict=True))
    return small and min(out, default=1) >= 1


def _by_channels(x: Any) -> Any:
    """Return images with channels last, which torch pools several at a time on CPUs."""
    if x.ndim == 4 and x.device.type == "cpu" and x.shape[1] >= LEAST_CHANNELS:
        return x.contiguous(memory_format=torch.channels_last)
    return x


def _positions(op: Operation, x: Any, found: Any, geometry: Any) -> Any:
    """Return where in the whole tensor the largest elements lie."""
    order = x.shape[2:]
    numbers = torch.arange(prod(order), device=x.device).reshape(1, 1, *order)
    if op.get("storage_order", 0):
        numbers = torch.arange(prod(order), device=x.device).reshape(1, 1, *order[::-1])
        numbers = numbers.permute(0, 1, *range(numbers.ndim - 1, 1, -1))
    places = _windows(numbers.double(), geometry, -1.0).to(torch.int64).expand(found.shape)
    inside = torch.where(places >= 0, found, torch.full_like(found, found.min()))
    best = (
        torch.where(places >= 0, inside == found.amax(-1, keepdim=True), False)
        .to(torch.uint8)
        .argmax(-1, True)
    )
    base = torch.arange(x.shape[0] * x.shape[1], device=x.device) * prod(order)
    return places.gather(-1, best)[..., 0] + base.reshape(*x.shape[:2], *[1] * len(order))


def _average_pool(op: Operation, x: Any) -> Any:
    geometry = _geometry(op, x)
    kernel, strides, gaps, low, high, out = geometry
    wide, counted = x.dtype in (torch.float32, torch.float64), bool(op.get("count_include_pad", 0))
    if wide and gaps == [1] * len(kernel) and _is_pooled_by_torch(op, x, geometry):
        function = AVERAGE_POOLS[len(kernel)]
        return function(_by_channels(x), kernel, strides, low, False, counted).contiguous()
    total = _windows(x, geometry, 0.0).sum(-1)
    ones = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if counted:
        ones = padded(ones, low, high, 1.0)
        geometry = (kernel, strides, gaps, [0] * len(kernel), [0] * len(kernel), out)
    return total / _windows(ones, geometry, 0.0).sum(-1)


def _lp_pool(op: Operation, x: Any) -> Any:
    p = op.get("p", 2)
    found = _windows(x.abs(), _geometry(op, x), 0.0)
    return found.pow(p).sum(-1).pow(1 / p)


def _whole(function: Callable[[Any, list[int]], Any]) -> Run:
    return lambda op, x: function(x, list(range(2, x.ndim)))


def _whole_lp(op: Operation, x: Any) -> Any:
    p, axes = op.get("p", 2), list(range(2, x.ndim))
    return x.abs().pow(p).sum(axes, keepdim=True).pow(1 / p)


def _max_unpool(op: Operation, x: Any, indices: Any, shape: Any = None) -> Any:
    kernel = list(op.get("kernel_shape"))
    strides, _ = settings(op, len(kernel))
    pads = list(op.get("pads") or [0] * 2 * len(kernel))
    natural = [
        (extent - 1) * step + taps - pads[at] - pads[at + len(kernel)]
        for at, (extent, step, taps) in enumerate(zip(x.shape[2:], strides, kernel, strict=True))
    ]
    target = list(x.shape[:2]) + natural
    wanted = target if shape is None else [int(value) for value in shape.tolist()]
    found = torch.zeros(prod(wanted), dtype=x.dtype, device=x.device)
    places = indices.reshape(-1)
    if len(wanted) != x.ndim or wanted[:2] != target[:2] or bool((places < 0).any()):
        raise ShapeError(f"MaxUnpool of {list(x.shape)} to {wanted}, or of places below 0")
    if wanted != target:  # indices are those of the tensor that was pooled
        steps = torch.unravel_index(places, target)
        places = sum(step * prod(wanted[at + 1 :]) for at, step in enumerate(steps))
    return found.index_put((places,), x.reshape(-1)).reshape(wanted)


def _col2im(op: Operation, x: Any, image: Any, block: Any) -> Any:
    """Add up columns of blocks, the sums of what each element of an image is in."""
    extents, taps = [int(v) for v in image.tolist()], [int(v) for v in block.tolist()]
    rank = len(extents)
    strides, gaps = settings(op, rank)
    pads = list(op.get("pads") or [0] * 2 * rank)
    channels = x.shape[1] // prod(taps)
    spans = [extents[at] + pads[at] + pads[at + rank] for at in range(rank)]
    counts = [(spans[at] - gaps[at] * (taps[at] - 1) - 1) // strides[at] + 1 for at in range(rank)]
    found = torch.zeros((x.shape[0], channels, *spans), dtype=x.dtype, device=x.device)
    parts = x.reshape(x.shape[0], channels, prod(taps), *counts)
    for at, tap in enumerate(product(*(range(n) for n in taps))):
        box: Any = tuple(
            slice(t * gap, t * gap + (n - 1) * step + 1, step)
            for t, gap, n, step in zip(tap, gaps, counts, strides, strict=True)
        )
        found[(..., *box)] += parts[:, :, at]
    return padded(found, [-v for v in pads[:rank]], [-v for v in pads[rank:]])


def _deform_conv(op: Operation, x: Any, w: Any, offset: Any, bias: Any = None, mask: Any = None) -> Any:
    """Convolve what lies at places that are moved by offsets, interpolated between pixels."""
    kh, kw = w.shape[2:]
    strides, gaps = settings(op, 2)
    pads, groups, parts = op.get("pads") or [0] * 4, op.get("group", 1), op.get("offset_group", 1)
    n, oh, ow = x.shape[0], offset.shape[2], offset.shape[3]
    if not n:
        return x.new_zeros(0, w.shape[0], oh, ow)
    moved = offset.reshape(n, parts, kh * kw, 2, oh, ow)
    rows = torch.arange(oh, device=x.device).reshape(-1, 1) * strides[0] - pads[0]
    columns = torch.arange(ow, device=x.device).reshape(1, -1) * strides[1] - pads[1]
    taps = torch.arange(kh * kw, device=x.device)
    y = rows + (taps // kw * gaps[0]).reshape(-1, 1, 1) + moved[:, :, :, 0]
    z = columns + (taps % kw * gaps[1]).reshape(-1, 1, 1) + moved[:, :, :, 1]
    picked = _between(x.reshape(n, parts, -1, *x.shape[2:]), y, z)
    if mask is not None:
        picked = picked * mask.reshape(n, parts, 1, kh * kw, oh, ow)
    columns_ = picked.reshape(n, groups, x.shape[1] // groups, kh * kw, oh, ow)
    weights = w.reshape(groups, w.shape[0] // groups, -1, kh * kw)
    found = torch.einsum("ngctyx,goct->ngoyx", columns_, weights).reshape(n, w.shape[0], oh, ow)
    return found if bias is None else found + bias.reshape(1, -1, 1, 1)


def _between(x: Any, y: Any, z: Any) -> Any:
    """Return ``x[n, g, c, y, z]`` at fractional places ``[n, g, ...]``; 0 outside and at no number."""
    n, g, c, height, width = x.shape
    flat = x.reshape(n, g, c, height * width)
    total: Any = 0
    for dy, dz in product((0, 1), (0, 1)):
        row, column = y.floor() + dy, z.floor() + dz
        share = (1 - (y - row).abs()) * (1 - (z - column).abs())
        inside = (row >= 0) & (row < height) & (column >= 0) & (column < width)
        at = torch.where(inside, row * width + column, 0).to(torch.int64)
        found = flat.gather(3, at.reshape(n, g, 1, -1).expand(n, g, c, -1)).reshape(n, g, c, *y.shape[2:])
        total = total + found * torch.where(inside, share, 0).unsqueeze(2)
    return total


WINDOWS: Mapping[str, Run] = {
    "Conv": convolved,
    "ConvTranspose": _conv_transposed,
    "MaxPool": _max_pool,
    "AveragePool": _average_pool,
    "LpPool": _lp_pool,
    "GlobalAveragePool": _whole(lambda x, axes: x.mean(axes, keepdim=True)),
    "GlobalMaxPool": _whole(lambda x, axes: x.amax(axes, keepdim=True)),
    "GlobalLpPool": _whole_lp,
    "MaxUnpool": _max_unpool,
    "Col2Im": _col2im,
    "DeformConv": _deform_conv,
}
"""Operators over windows."""
