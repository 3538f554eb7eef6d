"""`Conv`: a quantized drop-in for ``torch.nn.Conv1d`` and ``Conv2d``: a product over windows."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from ladder.api.linear import Linear
from ladder.ir.gemm import Gemm
from tile_types.errors import ShapeError

CONVOLUTIONS = (torch.nn.Conv1d, torch.nn.Conv2d)


class Conv(torch.nn.Module):
    """A convolution ``y[n, f, h, w] = sum over c, r, s of x[n, c, h + r, w + s] · W[f, c, r, s] + bias[f]``.

    W is of a low-bit type. Windows of x are gathered (``im2col``; kernels of one point only reorder x), and
    one quantized product `Linear` takes ``[windows, R · S · C]``. Its result lies with channels last.

    Parameters
    ----------
    product
        Of the kernel ``[F, R · S · C]``.
    kernel, stride, padding, dilation
        Two numbers each.
    rank
        Spatial axes of x: 1 or 2.
    """

    def __init__(
        self,
        product: Linear,
        kernel: tuple[int, int],
        stride: tuple[int, int],
        padding: tuple[int, int],
        dilation: tuple[int, int],
        rank: int,
    ) -> None:
        super().__init__()
        self.product = product
        self.kernel, self.stride, self.padding, self.dilation = kernel, stride, padding, dilation
        self.rank = rank

    @classmethod
    def from_conv(cls, conv: torch.nn.Conv1d | torch.nn.Conv2d, weight: str = "int4", **options: Any) -> Conv:
        """Quantize a convolution; it is left as it is. Options as for `Linear.from_linear`.

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
        matrix = conv.weight.detach().flatten(2).transpose(1, 2).flatten(1)
        linear = torch.nn.Linear(
            matrix.shape[1], matrix.shape[0], conv.bias is not None, device=matrix.device, dtype=matrix.dtype
        )
        linear.weight.data.copy_(matrix)
        if conv.bias is not None:
            linear.bias.data.copy_(conv.bias.detach())
        if options.get("group_size") is not None:  # kernels of few channels have one group
            options["group_size"] = min(options["group_size"], matrix.shape[1])
        product = Linear.from_linear(linear, weight, **options)
        settings = (conv.kernel_size, conv.stride, conv.padding, conv.dilation)
        pairs = (_pair(values, neutral) for values, neutral in zip(settings, (1, 1, 0, 1), strict=True))
        return cls(product, *pairs, rank)

    @property
    def problem(self) -> Gemm:
        """The product that it computes, in normal form."""
        return self.product.problem

    @property
    def weight_nbytes(self) -> int:
        """Bytes of the weight as kernels read it."""
        return self.product.weight_nbytes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``[N, F, H', W']`` for ``x[N, C, H, W]``, or both without W."""
        if self.rank == 1:
            return self._convolve(x[:, :, None])[:, :, 0]
        return self._convolve(x)

    def _convolve(self, x: torch.Tensor) -> torch.Tensor:
        if self.kernel == (1, 1) and self.padding == (0, 0):
            points = x[:, :, :: self.stride[0], :: self.stride[1]]
            return self.product(points.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
        batch, channels, points = *x.shape[:2], self.kernel[0] * self.kernel[1]
        windows = functional.unfold(x, self.kernel, self.dilation, self.padding, self.stride)
        rows = windows.reshape(batch, channels, points, -1).permute(0, 3, 2, 1).flatten(2)
        y: torch.Tensor = self.product(rows)
        return y.reshape(batch, *self._extents(x), -1).permute(0, 3, 1, 2)

    def _extents(self, x: torch.Tensor) -> list[int]:
        """Return the spatial extents of the result."""
        settings = zip(x.shape[2:], self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return [(extent + 2 * p - d * (k - 1) - 1) // s + 1 for extent, k, s, p, d in settings]

    def extra_repr(self) -> str:
        """Return what the module is."""
        return (
            f"kernel={self.kernel}, stride={self.stride}, padding={self.padding}, dilation={self.dilation},"
            f" rank={self.rank}"
        )


def refusal(conv: torch.nn.Module) -> str:
    """Say why a module is no convolution that `Conv` replaces; empty if it is one."""
    if not isinstance(conv, CONVOLUTIONS) or type(conv) not in CONVOLUTIONS:
        return f"{type(conv).__name__} is not torch.nn.Conv1d or Conv2d itself"
    if conv.groups != 1:
        return f"a convolution of {conv.groups} groups multiplies too few elements each"
    if isinstance(conv.padding, str) or conv.padding_mode != "zeros":
        return f"padding is {conv.padding!r} of {conv.padding_mode}"
    return ""


def _pair(values: Any, neutral: int) -> tuple[int, int]:
    """Return two numbers of one or two; one axis becomes the last of two."""
    found = tuple(int(value) for value in values)
    return (neutral, found[0]) if len(found) == 1 else (found[0], found[1])
