"""`Conv`: a quantized drop-in for ``torch.nn.Conv1d`` and ``Conv2d``: a product over windows."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional

from ladder.api.linear import Linear
from ladder.ir.gemm import Gemm
from ladder.ir.windows import Pair, Windows
from ladder.runtime import convolve, operator
from ladder.runtime.compile import Request
from ladder.runtime.tokens import EIGHT_BIT
from tile_types.errors import DTypeError, ShapeError, require_kind, whole_number

CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d)

CHUNK = 8
"""Channels that kernels gather at once."""


class Conv(torch.nn.Module):
    """A convolution ``y[n, f, h, w] = sum over c, r, s of x[n, c, h + r, w + s] · W[f, c, r, s] + bias[f]``.

    W is of a low-bit type. On GPUs one kernel gathers windows of 16-bit x while it reads them, if x has
    multiples of eight channels. Otherwise windows are gathered first (``im2col``; kernels of one point only
    reorder x), and one quantized product `Linear` takes ``[windows, R · S · C]``. Channels of the result are
    last in memory.

    Parameters
    ----------
    product
        Of the kernel ``[F, R · S · C]``.
    windows
        What it multiplies.
    rank
        Spatial axes of x: 1 or 2.
    spare
        Channels of zeros by which the weight has more than x.
    """

    def __init__(self, product: Linear, windows: Windows, rank: int, spare: int = 0) -> None:
        super().__init__()
        self.product, self.windows, self.rank, self.spare = product, windows, rank, spare

    @classmethod
    def from_conv(cls, conv: torch.nn.Conv1d | torch.nn.Conv2d, weight: str = "int4", **options: Any) -> Conv:
        """Quantize a convolution; it is left as it is. Options as for `Linear.from_linear`.

        On a GPU, channels of windows are made up to a multiple of eight: kernels gather no fewer at once.

        Raises
        ------
        ShapeError
            If `refusal` names a reason.
        LadderError
            If the weight cannot be quantized so.
        """
        reason = refusal(conv)
        if reason:
            raise ShapeError(reason)
        rank = len(conv.kernel_size)
        taps = conv.weight.detach().flatten(2).transpose(1, 2)
        spare = -conv.in_channels % CHUNK if conv.weight.is_cuda else 0
        matrix = functional.pad(taps, (0, spare)).flatten(1)
        linear = torch.nn.Linear(
            matrix.shape[1], matrix.shape[0], conv.bias is not None, device=matrix.device, dtype=matrix.dtype
        )
        linear.weight.data.copy_(matrix)
        if conv.bias is not None:
            linear.bias.data.copy_(conv.bias.detach())
        if options.get("group_size") is not None:  # kernels of few channels have one group
            size = whole_number(options["group_size"], "group_size")
            options["group_size"] = min(size, matrix.shape[1])
        product = Linear.from_linear(linear, weight, **options)
        kernel, stride = _pair(conv.kernel_size, 1), _pair(conv.stride, 1)
        padding, dilation = _pair(conv.padding, 0), _pair(conv.dilation, 1)
        return cls(product, Windows(kernel, stride, padding, dilation), rank, spare)

    @property
    def problem(self) -> Gemm:
        """The product that it computes, in normal form."""
        return self.product.problem

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weight as kernels read it."""
        return self.product.weight_nbytes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``[N, F, H', W']`` for ``[N, C, H, W]``, or both without W, or without N."""
        x = input
        require_kind(x, torch.Tensor, "x must be a torch tensor")
        if x.dim() == self.rank + 1:
            return self.forward(x[None])[0]
        if x.dim() != self.rank + 2:
            axes = ["N", "C", "H", "W"][: self.rank + 2]
            raise ShapeError(f"x must be [{', '.join(axes)}], got {list(x.shape)}")
        if not x.is_floating_point():
            raise DTypeError(
                f"x must be {self.product.dtype}, got {x.dtype}; convert it with .to({self.product.dtype})"
            )
        if x.shape[1] != (channels := self.product.in_features // self.windows.points - self.spare):
            raise ShapeError(
                f"x has {x.shape[1]} channels, the convolution takes {channels}: {list(x.shape)}"
            )
        if self.rank == 1:
            return self._convolve(x[:, :, None])[:, :, 0]
        return self._convolve(x)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        at = self.windows
        if self.spare:
            x = functional.pad(x, (0, 0, 0, 0, 0, self.spare))
        if self.gathers(x):
            return self._gather(x)
        if at.are_points:
            points = x[:, :, :: at.stride[0], :: at.stride[1]]
            return self.product(points.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
        batch, channels = x.shape[:2]
        high, wide = at.extents(*x.shape[2:])
        found = functional.unfold(x, at.kernel, at.dilation, at.padding, at.stride)
        rows = found.reshape(batch, channels, at.points, high * wide).permute(0, 3, 2, 1).flatten(2)
        y: torch.Tensor = self.product(rows)
        return y.reshape(batch, high, wide, self.product.out_features).permute(0, 3, 1, 2)

    def gathers(self, x: torch.Tensor) -> bool:
        """Tell whether a kernel gathers windows of x while it reads them."""
        eight = self.problem.activation in EIGHT_BIT
        return x.is_cuda and not eight and x.shape[1] % CHUNK == 0

    def _gather(self, x: torch.Tensor) -> torch.Tensor:
        last = x.permute(0, 2, 3, 1).to(self.product.dtype)
        call = convolve.registered if operator.needs_dispatch(x) else convolve.convolve
        text = _request_text(self.problem, self.windows)
        return call(last, self.product.arrays, self.product.bias, None, text).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        """Return what the module is."""
        return f"{self.windows}, rank={self.rank}"


@lru_cache(maxsize=1024)
def _request_text(gemm: Gemm, windows: Windows) -> str:
    return Request(replace(gemm, windows=None if windows.are_rows else windows)).text


def refusal(conv: torch.nn.Module) -> str:
    """Say why a module is no convolution that `Conv` replaces; empty if it is one."""
    if not isinstance(conv, CONVOLUTIONS) or type(conv) not in CONVOLUTIONS:
        return f"{type(conv).__name__} is not torch.nn.Conv1d or Conv2d itself"
    if conv.groups != 1:
        return f"a convolution of {conv.groups} groups multiplies too few elements each"
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return f"padding is {conv.padding!r} of {conv.padding_mode}"
    return ""


def _pair(values: Any, neutral: int) -> Pair:
    """Return two numbers of one or two; one axis becomes the last of two."""
    found = tuple(int(value) for value in values)
    return (neutral, found[0]) if len(found) == 1 else (found[0], found[1])
