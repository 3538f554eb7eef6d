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
    ordered = OrderedWeight(form)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Any, residual: Any) -> torch.Tensor:
        image = _images(form, x)
        known = ordered.of(weight, image)
        if known is None:
            y = function(image, _kernels(form, weight), bias, *settings)
        else:
            stride, padding, dilation, groups = settings
            y = POINTWISE(image, known, bias, padding, stride, dilation, groups, "none", [], "")
        return y.movedim(1, -1)  # type: ignore[no-any-return]

    return run


POINTWISE: Any = getattr(torch.ops.mkldnn, "_convolution_pointwise", None)
"""oneDNN's convolution with a weight that lies as it wants it."""


class OrderedWeight:
    """The weight of a convolution as oneDNN wants it: put in order once, not in each call.

    It is made at the second call with the same weight: one that changes from call to call is not worth it.
    """

    def __init__(self, form: Convolution) -> None:
        self.form = form
        self.known: tuple[Any, int, int] = (None, 0, 0)
        """The weight of the last call, its address, and how often it was changed in place."""
        self.ordered: torch.Tensor | None = None

    def of(self, weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor | None:
        """Return the weight in order; None where torch's own function is to take the plain one."""
        now = (weight, weight.data_ptr(), 0 if weight.is_inference() else weight._version)
        if self.known[0] is not weight or self.known[1:] != now[1:]:
            self.known, self.ordered = now, None
        elif self.ordered is None and self.is_possible(weight, image):
            self.ordered = self.made(weight, image)
        return self.ordered

    def is_possible(self, weight: torch.Tensor, image: torch.Tensor) -> bool:
        """Tell whether oneDNN convolves these."""
        cpu = image.device.type == "cpu" and image.dtype == weight.dtype == torch.float32
        enabled = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        return cpu and enabled and self.form.rank <= 2 and POINTWISE is not None and image.numel() > 0

    def made(self, weight: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
        """Put a weight in order for images like one."""
        stride, padding, dilation, groups = _settings(self.form)
        plain = _kernels(self.form, weight.detach()).contiguous().to_mkldnn()
        order: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
        return order(plain, padding, stride, dilation, groups, list(image.shape))  # type: ignore[no-any-return]


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
