"""Convolutions that torch computes, alone or with what follows them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from ladder.ir.build import bind
from ladder.ir.convolution import Convolution, FusedConvolution, as_convolution, as_fused_convolution
from ladder.partition.convolutions import ADD_RELU, ADDMM, ADDMM_RELU, CONVOLVE, RELU
from ladder.partition.parts import Part
from tile_types.errors import LadderError

Run = Callable[..., torch.Tensor]


def convolution_title(part: Part) -> str:
    """Return the name of torch's function for a convolution."""
    by = dict(part.roles).get("by", CONVOLVE)
    return f"torch.conv{_plain(part).rank}d" if by == CONVOLVE else f"torch.{by}"


def _plain(part: Part) -> Convolution:
    node = next(node for node in part.graph.nodes if node.operator == "contract")
    return as_convolution(part.graph, node)


def convolution_run(part: Part, sizes: Mapping[str, int]) -> Run:
    """Return ``(operands...) -> result`` of a convolution, in the order of the part's inputs.

    Raises
    ------
    LadderError
        If this torch lacks the function that the plan names.
    """
    graph = bind(part.graph, sizes)
    shape = tuple(int(str(extent)) for extent in graph.tile(graph.outputs[0]).shape)
    by = dict(part.roles).get("by")
    if by is None:
        return _channels_first(_plain(part), tuple(map(int, _shape_of(part, sizes))))
    found = as_fused_convolution(graph)
    order = [node.name for node in graph.inputs]
    roles = (found.x, found.weight, found.bias, found.residual)
    places = [order.index(name) if name else None for name in roles]
    call = _CALLS[by](found, shape)

    def run(*operands: torch.Tensor) -> torch.Tensor:
        return call(*(None if place is None else operands[place] for place in places))

    return run


def _shape_of(part: Part, sizes: Mapping[str, int]) -> Any:
    return bind(part.graph, sizes).tile(part.graph.outputs[0]).shape


def _channels_first(form: Convolution, shape: tuple[int, ...]) -> Run:
    function = getattr(torch.nn.functional, f"conv{form.rank}d")

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if form.groups > 1:
            x, weight = x.flatten(1, 2), weight.flatten(0, 1)
        y = function(x, weight, None, form.stride, form.padding, form.dilation, form.groups)
        return y.reshape(shape)  # type: ignore[no-any-return]

    return run


def _images(form: Convolution, x: torch.Tensor, groups: int) -> torch.Tensor:
    """Return ``[N, C, H, W]`` of channels last ``[N, (H,) W, (g,) C]``: the same memory."""
    x = x.flatten(-2) if groups > 1 else x
    x = x.unsqueeze(1) if form.rank == 1 else x
    return x.movedim(-1, 1)


def _kernels(form: Convolution, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[F, C, R, S]`` of ``[(g,) F, (R,) S, C]``: the same memory."""
    weight = weight.flatten(0, 1) if form.groups > 1 else weight
    weight = weight.unsqueeze(1) if form.rank == 1 else weight
    return weight.movedim(-1, 1)


def _settings(form: Convolution) -> tuple[list[int], list[int], list[int]]:
    """Return stride, padding and dilation along two axes."""
    if form.rank == 1:
        return [1, *form.stride], [0, *form.padding], [1, *form.dilation]
    return list(form.stride), list(form.padding), list(form.dilation)


def _convolve(found: FusedConvolution, shape: tuple[int, ...]) -> Run:
    form = found.form
    if form.rank > 2:
        return _convolve_any(form, shape)
    stride, padding, dilation = _settings(form)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        images, kernels = _images(form, x, form.groups), _kernels(form, weight)
        y = torch.conv2d(images, kernels, bias, stride, padding, dilation, form.groups)
        return y.movedim(1, -1).reshape(shape)

    return run


def _convolve_any(form: Convolution, shape: tuple[int, ...]) -> Run:
    function = getattr(torch.nn.functional, f"conv{form.rank}d")

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        images, kernels = _images(form, x, form.groups), _kernels(form, weight)
        y = function(images, kernels, bias, form.stride, form.padding, form.dilation, form.groups)
        return y.movedim(1, -1).reshape(shape)  # type: ignore[no-any-return]

    return run


def _convolve_relu(found: FusedConvolution, shape: tuple[int, ...]) -> Run:
    form, function = found.form, _function(RELU)
    settings = (*_settings(form), form.groups)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        y = function(_images(form, x, form.groups), _kernels(form, weight), bias, *settings)
        return y.movedim(1, -1).reshape(shape)  # type: ignore[no-any-return]

    return run


def _convolve_add_relu(found: FusedConvolution, shape: tuple[int, ...]) -> Run:
    form, function = found.form, _function(ADD_RELU)
    settings = (*_settings(form), form.groups)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: torch.Tensor) -> torch.Tensor:
        other = _images(form, residual, form.groups)
        y = function(_images(form, x, form.groups), _kernels(form, weight), other, 1.0, bias, *settings)
        return y.movedim(1, -1).reshape(shape)  # type: ignore[no-any-return]

    return run


def _rows(found: FusedConvolution, shape: tuple[int, ...]) -> Run:
    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        rows, matrix = x.reshape(-1, found.depth), weight.reshape(-1, found.depth).t()
        y = torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)
        return y.view(shape)

    return run


def _rows_relu(found: FusedConvolution, shape: tuple[int, ...]) -> Run:
    function = _function(ADDMM_RELU)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        rows, matrix = x.reshape(-1, found.depth), weight.reshape(-1, found.depth).t()
        return function(bias, rows, matrix).view(shape)  # type: ignore[no-any-return]

    return run


_CALLS: Mapping[str, Callable[[FusedConvolution, tuple[int, ...]], Run]] = {
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
