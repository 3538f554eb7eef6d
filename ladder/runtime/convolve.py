"""Convolutions: products of windows of an image, channels last, that kernels gather while they read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch

from ladder.ir.extents import MOST_COUNTED
from ladder.ir.gemm import Gemm
from ladder.runtime.compile import Request, compiled, plan_for, request_for, settled, target_of
from ladder.runtime.kernel import ALIGNMENT, CompiledGemm, require_alike, require_beside
from ladder.runtime.operator import refuse_gradient
from ladder.runtime.packed import as_taken
from ladder.runtime.registered import define, library
from targets import get_device
from tile_types.arrays import torch_dtype
from tile_types.errors import DTypeError, ShapeError

SCHEMA = "convolve(Tensor x, Tensor[] weight, Tensor? bias, Tensor? residual, str request) -> Tensor"


def output_shape(gemm: Gemm, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of y for an image (or, without windows, rows) of a shape.

    Raises ShapeError if the image has not the weight's channels, or is smaller than a window.
    """
    windows = gemm.windows
    channels = gemm.channels * (windows.groups if windows else 1)
    if shape[-1] != channels or (windows and len(shape) != 4):
        axes = "[B, H, W, C={}]" if windows else "[..., K={}]"
        raise ShapeError(f"x must be {axes.format(channels)}, got {list(shape)}")
    if windows is None:
        return (*shape[:-1], gemm.columns)
    return (shape[0], *windows.extents(shape[1], shape[2]), gemm.columns)


def window_count(gemm: Gemm, x: torch.Tensor) -> int:
    """Return M: how many windows, or rows, x has."""
    return prod(output_shape(gemm, x.shape)[:-1])


def convolve(
    x: torch.Tensor,
    weight: Sequence[Any],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    request: str,
) -> torch.Tensor:
    """Convolve on the GPU where x is.

    x: ``[B, H, W, C]`` of the activation type; other strides than those of channels last are copied.
    weight: Tensors of the packed weight ``[N, R * S * C / groups]``.
    bias, residual: ``[N]`` and ``[B, P, Q, N]`` of the output type, if the problem has them.
    request: `Request.text` of the problem; without a plan, the schedule is chosen for this many windows.
    Returns: ``[B, P, Q, N]``; N counts features alone, as in what is added.
    """
    rows = window_count(Request.parse(request).gemm, x)
    kernel, arrays = compiled(_planned(request, x.device, rows), x.device), [*map(as_taken, weight)]
    return launch(kernel, x, arrays, bias, residual)


@lru_cache(maxsize=4096)
def _planned(text: str, where: torch.device, rows: int) -> str:
    """Return the request with a schedule for so many windows, which spills only where all do."""
    request = Request.parse(text)
    if request.plan is not None:
        return text
    device = get_device(request.device or target_of(where))
    plan, _ = settled(
        Request(request.gemm, device.name), lambda: plan_for(request_for(request.gemm, device, rows))
    )
    return Request(request.gemm, device.name, plan).text


def launch(
    kernel: CompiledGemm,
    x: torch.Tensor,
    weight: Sequence[Any],
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Call the kernel that serves so many windows, on the current stream; ``factor`` is float32 ``[N]``."""
    gemm = kernel.gemm
    shape = output_shape(gemm, x.shape)
    m = prod(shape[:-1])
    extras = _extras(kernel, x, {"factor": factor, "bias": bias, "residual": residual}, shape)
    y = torch.empty(shape, dtype=kernel.output, device=x.device) if out is None else out
    if not x.is_contiguous() or x.data_ptr() % ALIGNMENT:
        x = x.clone(memory_format=torch.contiguous_format)
    if max(x.numel(), y.numel()) > MOST_COUNTED:
        raise ShapeError(f"kernels count {MOST_COUNTED} elements; convolve {tuple(x.shape)} in parts")
    if m:
        rows = x if gemm.windows else x.reshape(-1, gemm.k)
        if kernel.pad and not gemm.windows:
            rows = kernel.aligned(rows)
        kernel.entry_for(m)(rows, *weight, *extras, y.view(m, gemm.columns))
    return y


def _extras(
    kernel: CompiledGemm, x: torch.Tensor, given: Mapping[str, torch.Tensor | None], shape: tuple[int, ...]
) -> list[torch.Tensor]:
    """Check what multiplies and what is added; return it as the kernel takes it."""
    gemm = kernel.gemm
    if x.dtype != kernel.dtype:
        raise DTypeError(f"x is {x.dtype}, the operator was built for {kernel.dtype}; convert x")
    extras = []
    for name, tensor in given.items():
        require_alike(name, getattr(gemm, name), tensor)
        if tensor is None:
            continue
        extents = shape if name == "residual" else (gemm.columns,)
        dtype = torch.float32 if name == "factor" else kernel.output
        if tuple(tensor.shape) != extents or tensor.dtype != dtype:
            raise ShapeError(
                f"{name} must be {dtype} {list(extents)}, got {tensor.dtype} {list(tensor.shape)}"
            )
        require_beside(name, tensor, x)
        extras.append(
            tensor.contiguous().view(-1, gemm.columns) if name == "residual" else tensor.contiguous()
        )
    return extras


def _shape(
    x: torch.Tensor,
    weight: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    request: str,
) -> torch.Tensor:
    """Tell shape and type of the result."""
    gemm = Request.parse(request).gemm
    return x.new_empty(output_shape(gemm, x.shape), dtype=torch_dtype(gemm.output))


registered: Callable[..., torch.Tensor] = define(SCHEMA, convolve, _shape, ("CUDA",))
"""``convolve(x, weight, bias, residual, request)``: the registered operator."""
torch.library.register_autograd("ladder::convolve", refuse_gradient, lib=library)
