"""Clipping before quantization: a group's largest weights may cost the others more than they are worth."""

from __future__ import annotations

from typing import Any

import torch

from ladder.api.quantization import quantize
from tile_types.arrays import as_torch

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
