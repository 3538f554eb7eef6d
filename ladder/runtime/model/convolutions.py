"""Convolutions that torch computes, alone or with what follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from ladder.ir.convolution import Convolution, FusedConvolution, as_convolution, as_fused_convolution
from ladder.partition.convolutions import ADD_RELU, ADDMM, ADDMM_RELU, CONVOLVE, RELU
from ladder.partition.parts import Part
from ladder.runtime.model.sizes import Now, Numbers
from tile_types.errors import LadderError

Run = Callable[..., torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor, Any, Any], torch.Tensor]
"""(image, kernel, bias, residual) -> result, channels last."""


def convolution_title(part: Part) -> str:
    """Return the name of torch's function for a convolution."""
    by = dict(part.roles).get("by", CONVOLVE)
    return f"torch.conv{_plain(part).rank}d" if by == CONVOLVE else f"torch.{by}"


def _plain(part: Part) -> Convolution:
    node = next(node for node in part.graph.nodes if node.operator == "contract")
    return as_convolution(part.graph, node)


def convolution_run(part: Part, now: Now) -> Run:
    """Return ``(operands...) -> result`` of a convolution, in the order of the part's inputs.

    Raises
    ------
    LadderError
        If this torch lacks the function that the plan names.
    """
    graph = part.graph
    shape = now.numbers(graph.tile(graph.outputs[0]).shape)
    by = dict(part.roles).get("by")
    if by is None:
        return _channels_first(_plain(part), shape)
    found = as_fused_convolution(graph)
    order = [node.name for node in graph.inputs]
    roles = (found.x, found.weight, found.bias, found.residual)
    places = [order.index(name) if name else None for name in roles]
    call = _CALLS[by](found)

    def run(*operands: torch.Tensor) -> torch.Tensor:
        given: Any = (None if place is None else operands[place] for place in places)
        return call(*given).reshape(shape())

    return run


def _channels_first(form: Convolution, shape: Numbers) -> Run:
    function = getattr(torch.nn.functional, f"conv{form.rank}d")
    last = form.rank == 2 and (form.are_points or form.groups > 1)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if form.groups > 1:
            x, weight = x.flatten(1, 2), weight.flatten(0, 1)
        wanted = shape()
        if 0 in wanted:  # torch refuses images that no window fits into
            return x.new_empty(wanted)
        if last and x.device.type == "cpu" and is_faster_last(x, weight, form.groups):
            x = x.contiguous(memory_format=torch.channels_last)
        y = function(x, weight, None, form.stride, form.padding, form.dilation, form.groups)
        return y.reshape(wanted)  # type: ignore[no-any-return]

    return run


FEW_PLACES = 12
"""Positions of an image below which oneDNN's products of single points want channels last: 4 to 6 times."""

FEW_ELEMENTS = 1 << 14
"""Of an image up to which copies into channels last and back pay where each channel has its own kernel."""


def is_faster_last(x: torch.Tensor, weight: torch.Tensor, groups: int) -> bool:
    """Say whether torch on a CPU convolves an image sooner if channels come last, the copies included."""
    if x.dtype is not torch.float32:
        return False
    if groups > 1:
        return groups == x.shape[1] == weight.shape[0] and x.numel() <= FEW_ELEMENTS
    return 1 < x.shape[2] * x.shape[3] < FEW_PLACES


def _images(form: Convolution, x: torch.Tensor) -> torch.Tensor:
    """Return ``[N, C, H, W]`` of channels last ``[N, (H,) W, (g,) C]``: the same memory."""
    x = x.flatten(-2) if form.groups > 1 else x
    x = x.unsqueeze(1) if form.rank == 1 else x
    return x.movedim(-1, 1)


def _kernels(form: Convolution, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[F, C, R, S]`` of ``[(g,) F, (R,) S, C]``: the same memory."""
    weight = weight.flatten(0, 1) if form.groups > 1 else weight
    weight = weight.unsqueeze(1) if form.rank == 1 else weight
    return weight.movedim(-1, 1)


def _settings(form: Convolution) -> tuple[list[int], list[int], list[int], int]:
    """Return stride, padding, dilation and groups; an image of one row stands for one axis."""
    one = form.rank == 1
    stride, padding, dilation = list(form.stride), list(form.padding), list(form.dilation)
    return [1] * one + stride, [0] * one + padding, [1] * one + dilation, form.groups


def _convolve(found: FusedConvolution) -> Call:
    form, settings = found.form, _settings(found.form)
    function = getattr(torch.nn.functional, f"conv{max(form.rank, 2)}d")

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        y = function(_images(form, x), _kernels(form, weight), bias, *settings)
        return y.movedim(1, -1)  # type: ignore[no-any-return]

    return run


def _convolve_relu(found: FusedConvolution) -> Call:
    form, function, settings = found.form, _function(RELU), _settings(found.form)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        y = function(_images(form, x), _kernels(form, weight), bias, *settings)
        return y.movedim(1, -1)  # type: ignore[no-any-return]

    return run


def _convolve_add_relu(found: FusedConvolution) -> Call:
    form, function, settings = found.form, _function(ADD_RELU), _settings(found.form)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: torch.Tensor) -> torch.Tensor:
        other = _images(form, residual)
        y = function(_images(form, x), _kernels(form, weight), other, 1.0, bias, *settings)
        return y.movedim(1, -1)  # type: ignore[no-any-return]

    return run


def _rows(found: FusedConvolution) -> Call:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        rows, matrix = x.reshape(-1, found.depth), weight.reshape(-1, found.depth).t()
        return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)

    return run


def _rows_relu(found: FusedConvolution) -> Call:
    function = _function(ADDMM_RELU)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        rows, matrix = x.reshape(-1, found.depth), weight.reshape(-1, found.depth).t()
        return function(bias, rows, matrix)  # type: ignore[no-any-return]

    return run


_CALLS: Mapping[str, Callable[[FusedConvolution], Call]] = {
    CONVOLVE: _convolve,
    RELU: _convolve_relu,
    ADD_RELU: _convolve_add_relu,
    ADDMM: _rows,
    ADDMM_RELU: _rows_relu,
}
"""Function of torch -> what calls it."""


def _function(name: str) -> Any:
    try:
        return reduce(getattr, ("aten", name, "default"), torch.ops)
    except AttributeError as error:
        raise LadderError(f"torch {torch.__version__} has no operator aten.{name}") from error
