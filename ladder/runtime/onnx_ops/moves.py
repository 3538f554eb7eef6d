"""Operators that move elements: shapes, slices, gathers, scatters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import BITS, DTYPES, integers, narrow, ordered, restored, wide
from tile_types.errors import ShapeError

SAME = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
"""Types of whole numbers that torch moves."""


def of_one_type(function: Callable[..., Any], first: Any, *others: Any) -> Any:
    """Return what a function that only moves elements makes of operands of one type.

    Types that torch does not move keep their bits; of text numbers are moved, which stand for it.
    """
    operands = (first, *others)
    if isinstance(first, np.ndarray) and first.dtype == object:
        flat = np.concatenate([x.reshape(-1) for x in operands])
        places = torch.split(torch.arange(flat.size), [x.size for x in operands])
        found = function(*(part.reshape(x.shape) for part, x in zip(places, operands, strict=True)))
        return np.asarray(flat[found.numpy()], object)
    if isinstance(first, np.ndarray):
        bits = function(*(torch.from_numpy(x.view(np.uint8)) for x in operands))
        return bits.numpy().view(first.dtype)
    computed = first.is_complex() or (first.is_floating_point() and first.element_size() > 1)
    if computed or first.dtype in SAME:
        return function(*operands)
    return function(*(x.view(BITS[x.element_size()]) for x in operands)).view(first.dtype)


def moving(function: Run) -> Run:
    """Return the row of an operator that only moves its first operand: types of any kind keep their bits."""

    def run(op: Operation, x: Any, *rest: Any) -> Any:
        return of_one_type(lambda value: function(op, value, *rest), x)

    return run


def nothing_of(x: Any) -> Any:
    """Return a number 0, or an empty text, of an operand's type."""
    if isinstance(x, np.ndarray):
        return np.array("" if x.dtype == object else 0, x.dtype)
    return torch.zeros(x.element_size(), dtype=torch.uint8, device=x.device).view(x.dtype).reshape(())


def _reshape(op: Operation, x: Any, shape: Any = None) -> Any:
    """Give another shape; of no elements, extents that are kept do not count for the one that is open."""
    wanted = op.axes(shape, "shape") or []
    kept = (
        {} if op.get("allowzero", 0) else {at: x.shape[at] for at, extent in enumerate(wanted) if not extent}
    )
    if -1 in wanted and 0 in x.shape:
        given = prod(extent for at, extent in enumerate(x.shape) if at not in kept)
        stated = prod(extent for extent in wanted if extent > 0)
        if given % stated == 0:
            wanted = [given // stated if extent == -1 else extent for extent in wanted]
    return x.reshape([kept.get(at, extent) for at, extent in enumerate(wanted)])


def _flatten(op: Operation, x: Any) -> Any:
    axis = op.get("axis", 1)
    axis = axis + x.ndim if axis < 0 else axis
    return x.reshape(prod(x.shape[:axis]), prod(x.shape[axis:]))


def _squeeze(op: Operation, x: Any, axes: Any = None) -> Any:
    chosen = op.axes(axes)
    if chosen is None or not x.ndim:  # of a number onnxruntime takes any axes
        return x.reshape([extent for extent in x.shape if extent != 1])
    places = {axis % x.ndim for axis in chosen}
    if any(x.shape[axis] != 1 for axis in places):
        raise ShapeError(f"Squeeze of axes {chosen}: not all of {list(x.shape)} are 1 there")
    return x.reshape([extent for at, extent in enumerate(x.shape) if at not in places])


def _unsqueeze(op: Operation, x: Any, axes: Any = None) -> Any:
    chosen = op.axes(axes) or []
    shape, rank = list(x.shape), x.ndim + len(chosen)
    for axis in sorted(axis % rank for axis in chosen):
        shape.insert(axis, 1)
    return x.reshape(shape)


def _transpose(op: Operation, x: Any) -> Any:
    return x.permute(op.get("perm") or list(range(x.ndim))[::-1])


def _expand(op: Operation, x: Any, shape: Any) -> Any:
    return x.expand(np.broadcast_shapes(tuple(x.shape), tuple(integers(shape))))


def _tile(op: Operation, x: Any, repeats: Any, axis: Any = None) -> Any:
    if axis is None:
        return x.repeat(integers(repeats))
    times = [1] * x.ndim  # opset 1
    times[int(axis)] = int(repeats)
    return x.repeat(times)


def _concat(op: Operation, *parts: Any) -> Any:
    axis = op.get("axis", 1)
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts, axis)
    first = parts[0]
    return (
        torch.cat([wide(part) for part in parts], axis).to(first.dtype)
        if wide(first) is not first
        else torch.cat(parts, axis)
    )


def _split(op: Operation, x: Any, sizes: Any = None) -> Any:
    axis = op.get("axis", 0)
    asked = op.axes(sizes, "split")
    if asked is None:
        count = op.get("num_outputs", op.count)
        part = -(-x.shape[axis] // count)
        asked = [max(min(part, x.shape[axis] - at * part), 0) for at in range(count)]
    if sum(asked) != x.shape[axis]:
        raise ShapeError(f"Split into {asked} of an axis of {x.shape[axis]}")
    if isinstance(x, np.ndarray):
        return tuple(np.split(x, np.cumsum(asked)[:-1], axis))
    return tuple(torch.split(x, asked, axis))


LONGEST = 1 << 40
"""A step of slices that leads out of every axis, as longer ones do."""

WHOLE = ((1 << 31) - 1, (1 << 63) - 1)
"""Ends of slices that mean all of an axis, in version 10 and in onnxruntime whichever way they go."""


def sliced_places(start: int, end: int, step: int, extent: int) -> range:
    """Return the indices of a slice; one that goes backwards begins at the first element or behind it."""
    step = max(-max(extent, 1), min(step, max(extent, 1)))  # longer ones have one element, too
    found = range(*slice(start, None if end in WHOLE else end, step).indices(extent))
    return range(0, found.stop, step) if extent and found.start < 0 else found


def _slice(
    op: Operation, x: Any, starts: Any = None, ends: Any = None, axes: Any = None, steps: Any = None
) -> Any:
    begin, end = op.axes(starts, "starts") or [], op.axes(ends, "ends") or []
    chosen = op.axes(axes) or list(range(len(begin)))
    strides = op.axes(steps, "steps") or [1] * len(begin)
    for axis, first, last, step in zip(chosen, begin, end, strides, strict=True):
        places = sliced_places(first, last, step, x.shape[axis])
        step = places.step
        forward = places if step > 0 else places[::-1]
        box = [slice(None)] * x.ndim
        box[axis] = slice(forward.start, forward.stop, forward.step) if len(forward) else slice(0, 0)
        x = x[tuple(box)] if step > 0 else x[tuple(box)].flip(axis)
    return x


def from_the_end(indices: Any, extent: int) -> Any:
    """Return indices that count from the beginning.

    Raises ShapeError if one lies outside of the axis.
    """
    indices = indices.to(torch.int64)
    least, most = map(int, torch.aminmax(indices)) if indices.numel() else (0, 0)
    if indices.numel() and not -extent <= least <= most < extent:
        raise ShapeError(f"indices {least} to {most} of an axis of {extent}")
    return torch.where(indices < 0, indices + extent, indices) if least < 0 else indices


def at_places(function: Callable[[Any], Any], x: Any, indices: Any, axis: int) -> Any:
    """Return a function of indices along an axis that count from the beginning; on CPUs torch checks them."""
    if x.device.type == "cpu" and indices.dtype == torch.int64:
        with suppress(RuntimeError):  # one counts from the end, or lies outside
            return function(indices)
    return function(from_the_end(indices, x.shape[axis]))


def _gather(op: Operation, x: Any, indices: Any) -> Any:
    axis = op.get("axis", 0) % x.ndim
    places = from_the_end(indices, x.shape[axis])
    found = x.index_select(axis, places.reshape(-1))
    return found.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _gather_elements(op: Operation, x: Any, indices: Any) -> Any:
    axis = op.get("axis", 0) % x.ndim
    return at_places(lambda places: x.gather(axis, places), x, indices, axis)


def _gather_nd(op: Operation, x: Any, indices: Any) -> Any:
    batch, depth = op.get("batch_dims", 0), indices.shape[-1]
    lead = [
        torch.arange(n, device=x.device).reshape([-1 if at == axis else 1 for at in range(indices.ndim - 1)])
        for axis, n in enumerate(x.shape[:batch])
    ]
    rest = [from_the_end(indices[..., at], x.shape[batch + at]) for at in range(depth)]
    return x[(*lead, *rest)] if lead or rest else x


REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}
"""ONNX's word for how what falls on one element is combined -> torch's."""


def _scatter_elements(op: Operation, x: Any, indices: Any, updates: Any) -> Any:
    axis, how = op.get("axis", 0) % max(x.ndim, 1), op.get("reduction", "none")
    if how == "none":
        return at_places(lambda places: x.scatter(axis, places, updates), x, indices, axis)
    return x.scatter_reduce(axis, from_the_end(indices, x.shape[axis]), updates, REDUCED[how])


def _scatter_nd(op: Operation, x: Any, indices: Any, updates: Any) -> Any:
    how, depth = op.get("reduction", "none"), indices.shape[-1]
    places = [from_the_end(indices[..., at], x.shape[at]).reshape(-1) for at in range(depth)]
    strides = [prod(x.shape[at + 1 : depth]) for at in range(depth)]
    first = torch.zeros(prod(indices.shape[:-1]), dtype=torch.int64, device=x.device)
    rows = sum((p * s for p, s in zip(places, strides, strict=True)), first)
    width = prod(x.shape[depth:])
    table = x.reshape(prod(x.shape[:depth]), width).clone()
    new = updates.reshape(len(rows), width)
    if how == "none":
        table[rows] = new
    else:
        table = table.scatter_reduce(0, rows.reshape(-1, 1).expand(new.shape), new, REDUCED[how])
    return table.reshape(x.shape)


def scattering(function: Run) -> Run:
    """Return the row of a scatter: operands in a type that torch can move, or compute in where they meet."""

    def run(op: Operation, x: Any, indices: Any, updates: Any) -> Any:
        if op.get("reduction", "none") == "none":
            return of_one_type(lambda into, new: function(op, into, indices, new), x, updates)
        to, back = (ordered, restored) if op.get("reduction") in ("max", "min") else (wide, narrow)
        return back(function(op, to(x), indices, to(updates)), x.dtype)

    return run


def _tensor_scatter(op: Operation, cache: Any, update: Any, starts: Any = None) -> Any:
    """Write new rows of a cache from a position of each sequence on."""
    axis = op.get("axis", -2) % cache.ndim
    extent, count = cache.shape[axis], update.shape[axis]
    first = torch.zeros(cache.shape[0], dtype=torch.int64) if starts is None else starts.to(torch.int64)
    if first.numel() and int(first.min()) < 0:
        raise ShapeError(f"TensorScatter from position {int(first.min())} on")
    places = first.to(cache.device).reshape(-1, 1) + torch.arange(count, device=cache.device)
    if op.get("mode", "linear") == "circular":
        places = places % extent
    shape = [cache.shape[0], *[1] * (cache.ndim - 1)]
    shape[axis] = count
    places = from_the_end(places, extent).reshape(shape).expand(update.shape)
    return of_one_type(lambda into, new: into.scatter(axis, places, new), cache, update)


def _pad(op: Operation, x: Any, pads: Any = None, value: Any = None, axes: Any = None) -> Any:
    mode = op.get("mode", "constant")
    are_stated = pads is None and axes is None
    amounts = op.once(lambda: _amounts(op, x.ndim)) if are_stated else _amounts(op, x.ndim, pads, axes)

    def padded(x: Any, fill: Any) -> Any:
        number = op.get("value", 0.0) if "value" in op.given else fill.reshape(()).item()
        for axis, before, after in amounts:
            x = _padded_axis(x, axis, before, after, mode, number)
        return x

    return of_one_type(padded, x, nothing_of(x) if value is None else value)


def _amounts(op: Operation, rank: int, pads: Any = None, axes: Any = None) -> list[tuple[int, int, int]]:
    """Return each axis that is padded, and by how much before and behind it."""
    amounts = op.axes(pads, "pads") or op.axes(None, "paddings") or []
    chosen = [axis % rank for axis in op.axes(axes) or range(rank)]
    low, high = amounts[: len(chosen)], amounts[len(chosen) :]
    return [found for found in zip(chosen, low, high, strict=True) if found[1] or found[2]]


def _padded_axis(x: Any, axis: int, before: int, after: int, mode: str, fill: Any) -> Any:
    if before < 0 or after < 0:
        start = min(max(-before, 0), x.shape[axis])
        x = x.narrow(axis, start, max(x.shape[axis] - start - max(-after, 0), 0))
        before, after = max(before, 0), max(after, 0)
    extent = x.shape[axis]
    if mode == "constant" and x.is_complex():
        shape = [*x.shape]
        shape[axis] = 1
        border = x.new_full(shape, fill)
        return torch.cat([border] * before + [x] + [border] * after, axis)
    if mode == "constant":
        borders = [0, 0] * (x.ndim - 1 - axis) + [before, after]
        return F.pad(x, borders, value=fill)
    of_torch = x.is_floating_point() and x.element_size() >= 4 and x.ndim in (2, 3) and axis == x.ndim - 1
    if of_torch and mode == "reflect" and max(before, after) < extent:
        return F.pad(x, [before, after], mode)
    places = torch.arange(-before, extent + after, device=x.device)
    return x.index_select(axis, PLACES[mode](places, extent))


def _reflected(places: Any, extent: int) -> Any:
    if extent == 1:
        return torch.zeros_like(places)
    places = places.abs() % (2 * extent - 2)
    return torch.minimum(places, 2 * extent - 2 - places)


PLACES: Mapping[str, Callable[[Any, int], Any]] = {
    "reflect": _reflected,
    "edge": lambda places, extent: places.clamp(0, extent - 1),
    "wrap": lambda places, extent: places % extent,
}
"""How padding is filled -> where each element comes from."""


def _shape(op: Operation, x: Any) -> Any:
    return torch.tensor(list(x.shape)[op.get("start", 0) : op.get("end", x.ndim)], dtype=torch.int64)


def _filled(op: Operation, shape: Any) -> Any:
    value = op.get("value")
    if isinstance(value, np.ndarray):
        return np.broadcast_to(value.reshape(()), integers(shape)).copy()
    number = torch.zeros((), dtype=torch.float32) if value is None else value.reshape(())
    return number.to(shape.device).expand(integers(shape)).clone()


def _constant(op: Operation) -> Any:
    """Return what one of several attributes states."""
    for name, dtype in (("value_float", torch.float32), ("value_int", torch.int64)):
        for form in (name, f"{name}s"):
            if form in op.given:
                return torch.tensor(op.given[form], dtype=dtype)
    for form in ("value_string", "value_strings"):
        if form in op.given:
            return np.array(op.given[form], object)
    return op.given["sparse_value"] if "sparse_value" in op.given else op.given["value"]


def _range(op: Operation, start: Any, limit: Any, delta: Any = None) -> Any:
    """Count; com.microsoft's has steps of 1 if it is given none."""
    first, last = (value.reshape(()).item() for value in (start, limit))
    step = 1 if delta is None else delta.reshape(()).item()
    count = max(int(np.ceil((last - first) / step)), 0)
    whole = not start.is_floating_point()
    numbers = torch.arange(count, dtype=torch.int64 if whole else torch.float64, device=start.device)
    return narrow(numbers * step + first, start.dtype)


def _eye(op: Operation, x: Any) -> Any:
    dtype = DTYPES[op.get("dtype")] if "dtype" in op.given else x.dtype
    rows, columns = (torch.arange(extent, device=x.device) for extent in x.shape)
    return (columns == rows.reshape(-1, 1) + op.get("k", 0)).to(dtype)


def _triangle(op: Operation, x: Any, k: Any = None) -> Any:
    shift = 0 if k is None else int(k)
    device = "cpu" if isinstance(x, np.ndarray) else x.device
    ones = torch.ones(tuple(x.shape[-2:]), dtype=torch.bool, device=device)
    kept = ones.triu(shift) if op.get("upper", 1) else ones.tril(shift)
    return of_one_type(lambda value, zero: torch.where(kept, value, zero), x, nothing_of(x))


def _one_hot(op: Operation, indices: Any, depth: Any, values: Any) -> Any:
    count = int(depth.reshape(()).item())
    axis = op.get("axis", -1)
    axis = axis + indices.ndim + 1 if axis < 0 else axis
    places = wide(indices)
    places = torch.where(places < 0, places + count, places).unsqueeze(axis)
    steps = torch.arange(count, device=indices.device)
    steps = steps.reshape([-1 if at == axis else 1 for at in range(indices.ndim + 1)])
    chosen = places == steps
    return of_one_type(lambda pair: torch.where(chosen, pair[1], pair[0]), values)


def _places_of_others(op: Operation, x: Any) -> Any:
    """Return where elements are that are not 0, of text those that are not empty."""
    value = torch.from_numpy(x.astype(bool)) if isinstance(x, np.ndarray) else wide(x)
    return value.nonzero().T.contiguous()


def _compress(op: Operation, x: Any, condition: Any) -> Any:
    axis = op.get("axis")
    x, axis = (x.reshape(-1), 0) if axis is None else (x, axis)
    return x.index_select(axis, condition[: x.shape[axis]].nonzero().reshape(-1))


def _unique(op: Operation, x: Any) -> Any:
    if isinstance(x, np.ndarray) and x.dtype == object:  # text: numbers in its order in its place
        words, codes = np.unique(x, return_inverse=True)
        found, *rest = _unique(op, torch.from_numpy(codes.reshape(x.shape).astype(np.int64)))
        return words[found.numpy()].astype(object), *rest
    axis = op.get("axis")
    value = x.float().numpy() if x.is_floating_point() and x.element_size() < 4 else x.numpy()
    places = np.unique(value, return_index=True, return_inverse=True, return_counts=True, axis=axis)
    values, first, inverse, counts = (np.asarray(part) for part in places)
    inverse = inverse.reshape(-1)
    if not op.get("sorted", 1):
        order = np.argsort(first)
        back = np.argsort(order)
        values, first, counts = np.take(values, order, axis or 0), first[order], counts[order]
        inverse = back[inverse]
    whole = [
        torch.from_numpy(np.ascontiguousarray(part).astype(np.int64)) for part in (first, inverse, counts)
    ]
    return narrow(torch.from_numpy(np.ascontiguousarray(values)), x.dtype), *whole


def _reversed(op: Operation, x: Any, lengths: Any) -> Any:
    time, batch = op.get("time_axis", 0), op.get("batch_axis", 1)
    x = x.movedim((batch, time), (0, 1))
    steps = torch.arange(x.shape[1], device=x.device).reshape(1, -1)
    ends = lengths.reshape(-1, 1).to(x.device)
    places = torch.where(steps < ends, ends - 1 - steps, steps)
    found = x[torch.arange(x.shape[0], device=x.device).reshape(-1, 1), places]
    return found.movedim((0, 1), (batch, time))


def _depth_to_space(op: Operation, x: Any) -> Any:
    n, c, h, w = x.shape
    b = op.get("blocksize")
    if op.get("mode", "DCR") == "DCR":
        parts = x.reshape(n, b, b, c // b**2, h, w).permute(0, 3, 4, 1, 5, 2)
    else:
        parts = x.reshape(n, c // b**2, b, b, h, w).permute(0, 1, 4, 2, 5, 3)
    return parts.reshape(n, c // b**2, h * b, w * b)


def _space_to_depth(op: Operation, x: Any) -> Any:
    n, c, h, w = x.shape
    b = op.get("blocksize")
    if op.get("mode", "DCR") == "CRD":
        return F.pixel_unshuffle(x, b)
    parts = x.reshape(n, c, h // b, b, w // b, b).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(n, c * b * b, h // b, w // b)


def _center_crop_pad(op: Operation, x: Any, shape: Any) -> Any:
    """Cut or pad each axis around its middle."""
    axes = [axis % x.ndim for axis in op.get("axes") or range(x.ndim)]

    def cut(x: Any, zero: Any) -> Any:
        for axis, wanted in zip(axes, integers(shape), strict=True):
            extra = wanted - x.shape[axis]
            before = extra // 2 if extra > 0 else -(-extra // 2)
            x = _padded_axis(x, axis, before, extra - before, "constant", zero.item())
        return x

    return of_one_type(cut, x, nothing_of(x))


MOVING: Mapping[str, Run] = {
    "Reshape": _reshape, "Flatten": _flatten, "Squeeze": _squeeze, "Unsqueeze": _unsqueeze,
    "Transpose": _transpose, "Expand": _expand, "Tile": _tile, "Slice": _slice, "Gather": _gather,
    "GatherElements": _gather_elements, "GatherND": _gather_nd, "Compress": _compress,
    "ReverseSequence": _reversed, "DepthToSpace": _depth_to_space, "SpaceToDepth": _space_to_depth,
}  # fmt: skip
"""Operators that move their first operand, whatever its type."""

MOVES: Mapping[str, Run] = {
    **{name: moving(function) for name, function in MOVING.items()},
    "Concat": _concat,
    "Split": _split,
    "ScatterElements": scattering(_scatter_elements),
    "Scatter": scattering(_scatter_elements),
    "ScatterND": scattering(_scatter_nd),
    "TensorScatter": _tensor_scatter,
    "Pad": _pad,
    "CenterCropPad": _center_crop_pad,
    "Trilu": _triangle,
    "Shape": _shape,
    "Size": lambda op, x: torch.tensor(prod(x.shape), dtype=torch.int64),
    "ConstantOfShape": _filled,
    "Constant": _constant,
    "Range": _range,
    "EyeLike": _eye,
    "OneHot": _one_hot,
    "NonZero": _places_of_others,
    "Unique": _unique,
    "Identity": lambda op, x: x,
}  # fmt: skip
"""Operators that move elements."""
