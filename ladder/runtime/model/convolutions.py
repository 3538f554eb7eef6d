"""Convolutions that torch computes, alone or with what follows them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch

from ladder.ir.convolution import Convolution, FusedConvolution, as_convolution, as_fused_convolution
from ladder.ir.graph import Graph, Node
from ladder.partition.convolutions import ADD_RELU, ADDMM, ADDMM_RELU, BMM, CONVOLVE, RELU
from ladder.partition.subgraphs import Subgraph
from ladder.runtime.model.ordered import (
    Keep,
    Order,
    Settings,
    convolve,
    is_enabled,
    multiply,
    ordered_matrix,
    pays,
)
from ladder.runtime.model.sizes import CallSizes, Numbers
from tile_types.errors import LadderError

Run = Callable[..., torch.Tensor]
Call = Callable[[torch.Tensor, torch.Tensor, Any, Any], torch.Tensor]
"""(image, kernel, bias, residual) -> result, channels last."""


def convolution_title(part: Subgraph) -> str:
    """Return the name of torch's function for a convolution."""
    by = dict(part.roles).get("by", CONVOLVE)
    return f"torch.conv{_plain(part).rank}d" if by == CONVOLVE else f"torch.{by}"


def _plain(part: Subgraph) -> Convolution:
    node = next(node for node in part.graph.nodes if node.operator == "contract")
    return as_convolution(part.graph, node)


def convolution_run(part: Subgraph, now: CallSizes, lasting: Mapping[str, Keep]) -> Run:
    """Return ``(operands...) -> result`` of a convolution, in the order of the part's inputs.

    lasting: Inputs of the part's graph of which oneDNN may keep a copy in an order of its own -> what holds
        it.
    Raises LadderError if this torch lacks the function that the plan names.
    """
    graph = part.graph
    shape = now.numbers(graph.tile(graph.outputs[0]).shape)
    by = dict(part.roles).get("by")
    order = [node.name for node in graph.inputs]
    if by is None:
        alone = _channels_first(_plain(part), shape)
        return alone if len(order) > 1 else lambda x: alone(x, x)
    found = as_fused_convolution(graph)
    roles = (found.x, found.weight, found.bias, found.residual)
    places = [order.index(name) if name else None for name in roles]
    weight = graph.tile(found.weight)
    worth = pays(weight) if by == ADDMM else weight.ttype.name == "float32" and is_enabled()
    call = _CALLS[by](found, lasting.get(found.weight) if worth else None)
    given = operator.itemgetter(*(len(order) if place is None else place for place in places))

    def run(*operands: torch.Tensor) -> torch.Tensor:
        y, wanted = call(*given((*operands, None))), shape()
        return y if y.shape == wanted else y.reshape(wanted)

    return run


def contract_run(graph: Graph, node: Node, now: CallSizes) -> Run:
    """Return ``(x, weight) -> result`` of a convolution alone."""
    form, shape = as_convolution(graph, node), now.numbers(node.tile.shape)
    if not form.last:
        return _channels_first(form, shape)
    function, settings = getattr(torch.nn.functional, f"conv{max(form.rank, 2)}d"), _settings(form)

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = function(_images(form, x), _kernels(form, weight), None, *settings)
        return y.movedim(1, -1).reshape(shape())  # type: ignore[no-any-return]

    return run


def _channels_first(form: Convolution, shape: Numbers) -> Run:
    function = getattr(torch.nn.functional, f"conv{form.rank}d")

    def run(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if form.groups > 1:
            x, weight = x.flatten(1, 2), weight.flatten(0, 1)
        wanted = shape()
        if 0 in wanted:  # torch refuses images that no window fits into
            return x.new_empty(wanted)
        y = function(x, weight, None, form.stride, form.padding, form.dilation, form.groups)
        return y.reshape(wanted)  # type: ignore[no-any-return]

    return run


def _images(form: Convolution, x: torch.Tensor) -> torch.Tensor:
    """Return ``[N, C, H, W]`` of channels last ``[N, (H,) W, (g,) C]``, which results then lie like."""
    x = x.flatten(-2) if x.ndim > form.rank + 2 else x
    x = (x.unsqueeze(1) if form.rank == 1 else x).contiguous()
    return x.permute(0, 3, 1, 2) if x.ndim == 4 else x.movedim(-1, 1)


def _kernels(form: Convolution, weight: torch.Tensor) -> torch.Tensor:
    """Return ``[F, C, R, S]`` of ``[(g,) F, (R,) S, C]``: the same memory."""
    weight = weight.flatten(0, 1) if form.groups > 1 else weight
    weight = weight.unsqueeze(1) if form.rank == 1 else weight
    return weight.movedim(-1, 1)


def _settings(form: Convolution) -> Settings:
    """Return stride, padding, dilation and groups; an image of one row stands for one axis."""
    one = form.rank == 1
    stride, padding, dilation = list(form.stride), list(form.padding), list(form.dilation)
    return [1] * one + stride, [0] * one + padding, [1] * one + dilation, form.groups


def _convolve(found: FusedConvolution, keep: Keep | None) -> Call:
    form, settings = found.form, _settings(found.form)
    function = getattr(torch.nn.functional, f"conv{max(form.rank, 2)}d")
    weights = None if keep is None else keep(_order(form))

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        image = _images(form, x)
        known = None if weights is None else weights.of(weight, image)
        if known is None:
            y = function(image, _kernels(form, weight), bias, *settings)
        else:
            y = convolve(image, known, bias, settings)
        return y.movedim(1, -1)  # type: ignore[no-any-return]

    return run


def _order(form: Convolution) -> Order:
    """Return what puts the weight of a convolution in order for images like one."""
    stride, padding, dilation, groups = _settings(form)
    order: Any = getattr(torch._C._nn, f"mkldnn_reorder_conv{max(form.rank, 2)}d_weight")

    def ordered(weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        plain = _kernels(form, weight).contiguous().to_mkldnn()
        return order(plain, padding, stride, dilation, groups, list(image.shape))  # type: ignore[no-any-return]

    return ordered


def _convolve_relu(found: FusedConvolution, keep: Keep | None) -> Call:
    form, function, settings = found.form, _function(RELU), _settings(found.form)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        y = function(_images(form, x), _kernels(form, weight), bias, *settings)
        return y.movedim(1, -1)  # type: ignore[no-any-return]

    return run


def _convolve_add_relu(found: FusedConvolution, keep: Keep | None) -> Call:
    form, function, settings = found.form, _function(ADD_RELU), _settings(found.form)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: torch.Tensor) -> torch.Tensor:
        other = _images(form, residual)
        y = function(_images(form, x), _kernels(form, weight), other, 1.0, bias, *settings)
        return y.movedim(1, -1)  # type: ignore[no-any-return]

    return run


def _rows(found: FusedConvolution, keep: Keep | None) -> Call:
    weights = None if keep is None else keep(ordered_matrix)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        rows = x.reshape(-1, found.depth)
        known = None if weights is None else weights.of(weight, rows)
        if known is not None:
            return multiply(rows, known, bias)
        matrix = weight.reshape(-1, found.depth).t()
        return torch.mm(rows, matrix) if bias is None else torch.addmm(bias, rows, matrix)

    return run


def _rows_relu(found: FusedConvolution, keep: Keep | None) -> Call:
    function = _function(ADDMM_RELU)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        rows, matrix = x.reshape(-1, found.depth), weight.reshape(-1, found.depth).t()
        return function(bias, rows, matrix)  # type: ignore[no-any-return]

    return run


def _grouped_rows(found: FusedConvolution, keep: Keep | None) -> Call:
    groups, depth = found.form.groups, found.depth

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        rows = x.reshape(-1, groups, depth)
        matrices = weight.reshape(groups, -1, depth)
        y = rows.new_empty(len(rows), groups, matrices.shape[1])
        torch.bmm(rows.transpose(0, 1), matrices.transpose(1, 2), out=y.transpose(0, 1))
        return y

    return run


_CALLS: Mapping[str, Callable[[FusedConvolution, Keep | None], Call]] = {
    CONVOLVE: _convolve,
    RELU: _convolve_relu,
    ADD_RELU: _convolve_add_relu,
    ADDMM: _rows,
    ADDMM_RELU: _rows_relu,
    BMM: _grouped_rows,
}
"""Function of torch -> what calls it, told what keeps the weight in oneDNN's order, if that is worth it."""


def _function(name: str) -> Any:
    try:
        return reduce(getattr, ("aten", name, "default"), torch.ops)
    except AttributeError as error:
        raise LadderError(f"torch {torch.__version__} has no operator aten.{name}") from error
