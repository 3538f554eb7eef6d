"""Operators that reduce axes, search or accumulate along them, and normalise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from ladder.runtime.onnx_ops.operation import Operation, Run
from ladder.runtime.onnx_ops.values import DTYPES, narrow, ordered, restored, wide


def reduced(function: Callable[[Any, list[int], bool], Any], each: Callable[[Any], Any] | None = None) -> Run:
    """Return the row of a reduction; ``each`` is what it does to elements where no axis is asked for."""

    def run(op: Operation, x: Any, axes: Any = None) -> Any:
        chosen, keep = op.axes(axes), bool(op.get("keepdims", 1))
        if not chosen and op.get("noop_with_empty_axes", 0):
            return x if each is None else narrow(each(wide(x)), x.dtype)
        places = sorted({axis % x.ndim for axis in chosen} if chosen else range(x.ndim))
        return narrow(function(wide(x), places, keep), x.dtype)

    return run


def _sum(x: Any, axes: list[int], keep: bool) -> Any:
    return x.sum(axes, keepdim=keep) if axes else x


def _prod(x: Any, axes: list[int], keep: bool) -> Any:
    for axis in reversed(axes):
        x = x.prod(axis, keepdim=keep)
    return x


def _mean(x: Any, axes: list[int], keep: bool) -> Any:
    if x.is_floating_point():
        return x.mean(axes, keepdim=keep) if axes else x
    return x.double().mean(axes, keepdim=keep) if axes else x


def _largest(x: Any, axes: list[int], keep: bool) -> Any:
    if not axes:
        return x
    if not all(x.shape[axis] for axis in axes):
        return _of_nothing(x, axes, keep, least=True)
    return x.amax(axes, keepdim=keep)


def _smallest(x: Any, axes: list[int], keep: bool) -> Any:
    if not axes:
        return x
    if not all(x.shape[axis] for axis in axes):
        return _of_nothing(x, axes, keep, least=False)
    return x.amin(axes, keepdim=keep)


def _of_nothing(x: Any, axes: list[int], keep: bool, *, least: bool) -> Any:
    """Return the neutral element of an extreme, where nothing is reduced."""
    shape = [1 if at in axes else n for at, n in enumerate(x.shape) if keep or at not in axes]
    if x.dtype == torch.bool:
        value: Any = not least
    elif x.is_floating_point():
        value = float("-inf") if least else float("inf")
    else:
        value = torch.iinfo(x.dtype).min if least else torch.iinfo(x.dtype).max
    return torch.full(shape, value, dtype=x.dtype, device=x.device)


def extreme(function: Callable[[Any, list[int], bool], Any]) -> Run:
    """Return the row of a reduction by order, of any type."""

    def run(op: Operation, x: Any, axes: Any = None) -> Any:
        found = reduced(function)(op, ordered(x), axes)
        return restored(found, x.dtype)

    return run


def _log_sum_exp(x: Any, axes: list[int], keep: bool) -> Any:
    value = x if x.is_floating_point() else x.double()
    return torch.logsumexp(value, axes, keepdim=keep) if axes else x


def _real(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda x: function(x if x.is_floating_point() else x.double())


def _length(x: Any, axes: list[int], keep: bool) -> Any:
    value = _real(lambda v: v)(x)
    return (value * value).sum(axes, keepdim=keep).sqrt() if axes else value.abs()


def _index_of(largest: bool) -> Run:
    def run(op: Operation, x: Any) -> Any:
        axis, keep = op.get("axis", 0), bool(op.get("keepdims", 1))
        value = ordered(x).flip(axis) if op.get("select_last_index", 0) else ordered(x)
        found = (value.max if largest else value.min)(axis, keepdim=True).indices  # of equal ones the first
        if op.get("select_last_index", 0):
            found = x.shape[axis] - 1 - found
        return found if keep else found.squeeze(axis)

    return run


def _top(op: Operation, x: Any, k: Any = None) -> Any:
    count = int(k.reshape(())) if k is not None else op.get("k")
    axis, largest = op.get("axis", -1), bool(op.get("largest", 1))
    values, indices = _best(ordered(x).movedim(axis, -1), count, largest)
    return restored(values.movedim(-1, axis), x.dtype), indices.movedim(-1, axis)


def _best(x: Any, count: int, largest: bool) -> tuple[Any, Any]:
    """Return the best elements of the last axis in order and where they are, of equal ones the first.

    Selecting leaves open which of equal ones it takes: rows where one is not better than the next are sorted.
    """
    if not 0 < count < x.shape[-1] or x.device.type != "cpu":
        order = torch.sort(x, descending=largest, stable=True)
        return order.values[..., :count], order.indices[..., :count]
    values, indices = torch.topk(x, count + 1, largest=largest)
    better, next_ = values[..., :-1], values[..., 1:]
    distinct = better > next_ if largest else better < next_
    values, indices = better, indices[..., :-1]
    if not distinct.all():
        rows = ~distinct.all(-1)
        order = torch.sort(x[rows], descending=largest, stable=True)
        values[rows], indices[rows] = order.values[:, :count], order.indices[:, :count]
    return values, indices


def _accumulated(function: Callable[..., Any], neutral: int) -> Run:
    def run(op: Operation, x: Any, axis: Any) -> Any:
        at, value = int(axis.reshape(())), wide(x)
        value = value.flip(at) if op.get("reverse", 0) else value
        if op.get("exclusive", 0):
            shape = [1 if i == at % value.ndim else extent for i, extent in enumerate(value.shape)]
            value = torch.cat([value.new_full(shape, neutral), value], at).narrow(at, 0, value.shape[at])
        found = function(value, at)
        return narrow(found.flip(at) if op.get("reverse", 0) else found, x.dtype)

    return run


# normalisation ---------------------------------------------------------------------------------------


def flattened_softmax(function: Callable[[Any, int], Any]) -> Run:
    """Return the row of a softmax; before opset 13 all axes from ``axis`` on count as one."""

    def run(op: Operation, x: Any) -> Any:
        if op.version >= 13:
            return function(x, op.get("axis", -1))
        axis = op.get("axis", 1) % max(x.ndim, 1)
        return function(x.flatten(axis), -1).reshape(x.shape)

    return run


def _hardmax(x: Any, axis: int) -> Any:
    if not x.numel():  # an empty axis has no largest place
        return x.clone()
    place = x.argmax(axis, keepdim=True)
    return torch.zeros_like(x).scatter(axis, place, 1)


def _batch_norm(op: Operation, x: Any, scale: Any, bias: Any, mean: Any, variance: Any) -> Any:
    """Normalise each channel by stored or, in training, by its own mean and variance; or each place.

    A vector is of one channel. Versions 7 to 13 do not say what trains: nothing does, as in onnxruntime.
    """
    if x.ndim == 1:
        found, *moments = _batch_norm(op, x.unsqueeze(1), scale, bias, mean, variance)
        return found.squeeze(1), *moments
    spatial = bool(op.get("spatial", 1))  # until version 8
    shape = [1, -1, *[1] * (x.ndim - 2)] if spatial else [1, *x.shape[1:]]
    epsilon, share = op.get("epsilon", 1e-5), op.get("momentum", 0.9)
    training = bool(op.get("training_mode", 0)) or (
        op.version < 7 and not op.get("is_test", 0) and op.count > 1
    )
    if not training:
        found = _by_moments(x, scale, bias, mean, variance, epsilon, shape)
        return (found, mean, variance, mean, variance)[: max(op.count, 1)]
    axes = [axis for axis in range(x.ndim) if axis != 1] if spatial else [0]
    now, spread = x.float().mean(axes), x.float().var(axes, unbiased=False)
    found = _by_moments(x, scale, bias, now, spread, epsilon, shape)
    return (
        found,
        (mean * share + now * (1 - share)).to(mean.dtype),
        (variance * share + spread * (1 - share)).to(variance.dtype),
    )


def _by_moments(
    x: Any, scale: Any, bias: Any, mean: Any, variance: Any, epsilon: float, shape: list[int]
) -> Any:
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    factor = scale.to(dtype) / (variance.to(dtype) + epsilon).sqrt()
    shift = bias.to(dtype) - mean.to(dtype) * factor
    return (x.to(dtype) * factor.reshape(shape) + shift.reshape(shape)).to(x.dtype)


def _instance_norm(op: Operation, x: Any, scale: Any, bias: Any) -> Any:
    axes, shape = list(range(2, x.ndim)), [1, -1, *[1] * (x.ndim - 2)]
    mean, spread = x.mean(axes, keepdim=True), x.var(axes, keepdim=True, unbiased=False)
    return (x - mean) / (spread + op.get("epsilon", 1e-5)).sqrt() * scale.reshape(shape) + bias.reshape(shape)


def _layer_norm(op: Operation, x: Any, scale: Any, bias: Any = None) -> Any:
    axis = op.get("axis", -1) % x.ndim
    axes = list(range(axis, x.ndim))
    dtype = DTYPES[op.get("stash_type", 1)]
    value = x.to(dtype)
    mean = value.mean(axes, keepdim=True)
    inverse = (value.var(axes, keepdim=True, unbiased=False) + op.get("epsilon", 1e-5)).rsqrt()
    found = ((value - mean) * inverse).to(x.dtype) * scale
    return (found if bias is None else found + bias), mean, inverse


def _group_norm(op: Operation, x: Any, scale: Any, bias: Any) -> Any:
    groups, shape = op.get("num_groups"), [1, -1, *[1] * (x.ndim - 2)]
    if op.version < 21:  # a scale per group
        scale, bias = (v.repeat_interleave(x.shape[1] // groups) for v in (scale, bias))
    dtype = torch.float64 if x.dtype == torch.float64 else DTYPES[op.get("stash_type", 1)]
    found = F.group_norm(x.to(dtype), groups, None, None, op.get("epsilon", 1e-5)).to(x.dtype)
    return found * scale.reshape(shape) + bias.reshape(shape)


def _local_response(op: Operation, x: Any) -> Any:
    size, square = op.get("size"), x * x
    before = (size - 1) // 2
    pads = [0, 0] * (x.ndim - 2) + [before, size - 1 - before]
    total = F.pad(square, pads).unfold(1, size, 1).sum(-1)
    return x / (op.get("bias", 1.0) + op.get("alpha", 1e-4) / size * total) ** op.get("beta", 0.75)


def _lp_norm(op: Operation, x: Any) -> Any:
    length = x.abs().pow(op.get("p", 2)).sum(op.get("axis", -1), keepdim=True).pow(1 / op.get("p", 2))
    return torch.where(
        length == 0, torch.zeros_like(x), x / torch.where(length == 0, torch.ones_like(length), length)
    )


def _mean_variance(op: Operation, x: Any) -> Any:
    """Normalise by the axes given; as ONNX had it for trial, of all axes or of all but the channels."""
    if op.version < 9:
        axes = [axis for axis in range(x.ndim) if axis != 1 or op.get("across_channels", 0)]
        away = x - x.mean(axes, keepdim=True)
        scaled = op.get("normalize_variance", 1)
        return away / (away * away).mean(axes, keepdim=True).sqrt() if scaled else away
    axes = op.get("axes") or [0, 2, 3]
    spread = (x * x).mean(axes, keepdim=True) - x.mean(axes, keepdim=True) ** 2
    return (x - x.mean(axes, keepdim=True)) / (spread.sqrt() + 1e-9)


REDUCTIONS: Mapping[str, Run] = {
    "ReduceSum": reduced(_sum),
    "ReduceProd": reduced(_prod),
    "ReduceMean": reduced(_mean),
    "ReduceMax": extreme(_largest),
    "ReduceMin": extreme(_smallest),
    "ReduceL1": reduced(lambda x, axes, keep: _sum(x.abs(), axes, keep), torch.abs),
    "ReduceL2": reduced(_length, torch.abs),
    "ReduceSumSquare": reduced(lambda x, axes, keep: _sum(x * x, axes, keep), torch.square),
    "ReduceLogSum": reduced(lambda x, axes, keep: _sum(_real(lambda v: v)(x), axes, keep).log(), torch.log),
    "ReduceLogSumExp": reduced(_log_sum_exp, lambda x: x),
    "ArgMax": _index_of(largest=True),
    "ArgMin": _index_of(largest=False),
    "TopK": _top,
    "CumSum": _accumulated(lambda x, axis: x.cumsum(axis, dtype=x.dtype), 0),
    "CumProd": _accumulated(lambda x, axis: x.cumprod(axis, dtype=x.dtype), 1),
    "Softmax": flattened_softmax(torch.softmax),
    "LogSoftmax": flattened_softmax(torch.log_softmax),
    "Hardmax": flattened_softmax(_hardmax),
    "BatchNormalization": _batch_norm,
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "GroupNormalization": _group_norm,
    "LRN": _local_response,
    "LpNormalization": _lp_norm,
    "MeanVarianceNormalization": _mean_variance,
}
"""Operators that reduce axes, search or accumulate along them, and normalise."""
