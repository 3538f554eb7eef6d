"""Dynamic quantization of activations: one scale per row, computed where the row is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ladder.runtime.kernel import torch_dtype

if TYPE_CHECKING:
    import torch

EIGHT_BIT = ("int8", "fp8_e4m3", "fp8_e5m2")
"""Activation types that carry a scale per row."""


def quantize_tokens(x: torch.Tensor, activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize each row to 8 bits by its largest magnitude.

    Parameters
    ----------
    x
        ``[..., K]`` of any float type.
    activation
        One of `EIGHT_BIT`.

    Returns
    -------
    ``(codes, scale)``: ``[..., K]`` of the 8-bit type, rounded to nearest even, and float32 ``[...]``,
    such that ``codes * scale`` approximates x. A row of zeros has a tiny scale and codes 0.
    """
    import torch

    dtype = torch_dtype(activation)
    limit = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    wide = x.to(torch.float32)
    scale = (wide.abs().amax(dim=-1, keepdim=True) / limit).clamp_min(torch.finfo(torch.float32).tiny)
    units = (wide / scale).clamp(-limit, limit)
    codes = units.round().to(dtype) if dtype == torch.int8 else units.to(dtype)
    return codes, scale.squeeze(-1)
