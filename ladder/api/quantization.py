"""Quantization of torch tensors, and clipping: large weights may cost the others of their group too much."""

from __future__ import annotations

from typing import Any

import torch

from tile_types import TType
from tile_types.arrays import as_torch
from tile_types.errors import positive_number, require_options
from tile_types.quantize import quantize as quantize_values


def quantize_tokens(
    x: torch.Tensor, activation: str = "int8", *, group_size: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize activations to 8 bits by their largest magnitudes, in one pass over x.

    `Matmul`, `Linear` and `GroupedMatmul` do this to float rows where they compute in 8 bits; call
    it to use the codes of x in several products.

    Parameters
    ----------
    x
        ``[..., K]``: float16, bfloat16 or float32.
    activation
        ``"int8"``, ``"fp8_e4m3"`` or ``"fp8_e5m2"``.
    group_size
        Elements along K that share a scale; None: all of a row. On GPUs 8 times a power of two, at
        most 256.

    Returns
    -------
    ``(codes, scale)``: ``[..., K]`` of the 8-bit type, rounded to nearest even, and float32 ``[...]``, or
    ``[..., ceil(K / group_size)]``. ``codes * scale`` approximates x. Zeros have codes 0. On GPUs, rows
    (or groups) with infinity or NaN have the scale NaN, so that products with them are NaN.

    Raises
    ------
    DTypeError, ConversionError
        If x is no such float, or the device does not compute in that type.
    """
    from ladder.runtime import operator

    if group_size is not None:
        positive_number(group_size, "group_size", "None for whole rows")
    return operator.quantize_tokens(x, activation, group_size or 0)


def quantize(weight: Any, /, ttype: TType | str, **options: Any) -> Any:
    """Quantize a matrix; `ladder.quantize` describes the arguments."""
    require_options("option of quantize", options, quantize_values)
    return quantize_values(weight.detach() if hasattr(weight, "detach") else weight, ttype, **options)


FRACTIONS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7)
"""Fractions of a group's largest magnitude at which it may be clipped."""


def clipped(weight: torch.Tensor, ttype: str, **options: Any) -> torch.Tensor:
    """Return a matrix each group of which is clipped where its quantization errs least.

    weight: ``[N, K]``.
    ttype, **options: As in `ladder.quantize`; without ``group_size`` a row is a group, and a block type has
        its own.
    Returns: ``[N, K]`` of the same type: what to quantize in its place. The squared error of every group
        against ``weight`` is at most what it was.
    """
    wide = weight.detach().float()
    best = wide.clone()
    least: torch.Tensor | None = None
    for fraction in FRACTIONS:
        group = min(int(quantize(wide, ttype, **options).block[1]), wide.shape[1])
        limit = _spread(_grouped(wide.abs(), group).amax(-1) * fraction, group, wide.shape[1])
        trial = wide.clamp(-limit, limit)
        decoded = as_torch(quantize(trial, ttype, **options).dequantize("float32"))
        error = _grouped((decoded - wide).square(), group).sum(-1)
        better = torch.ones_like(error, dtype=torch.bool) if least is None else error < least
        best = torch.where(_spread(better, group, wide.shape[1]), trial, best)
        least = error if least is None else torch.minimum(least, error)
    return best.to(weight.dtype)


def _grouped(values: torch.Tensor, group: int) -> torch.Tensor:
    """Return ``[N, groups, group]``, padded with zeros."""
    padded = torch.nn.functional.pad(values, (0, -values.shape[1] % group))
    return padded.view(len(values), -1, group)


def _spread(values: torch.Tensor, group: int, columns: int) -> torch.Tensor:
    """Return ``[N, columns]`` from one value per group."""
    return values.repeat_interleave(group, dim=1)[:, :columns]
