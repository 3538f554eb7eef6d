"""``torch.topk`` of short rows in comparisons, which join the chains around them on a GPU.

A library's kernel selects and then sorts, in launches of their own; the router of a mixture of experts asks
for a few of at most some hundred scores.
"""

from __future__ import annotations

from typing import Any

import torch

PAIRS = 1 << 20
"""How many pairs are compared at most: those of 16 rows of 256 scores, which DeepSeek-V3's routers have."""


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the k largest (or smallest) along an axis in order, and where they were.

    NaN counts as the largest, as torch has it; of equal ones the first comes first, which torch leaves open.

    Returns: (values, indices); NotImplemented, on which torch's operator stays, on CPUs, for many or long
        rows and for open extents.
    """
    known = all(isinstance(extent, int) for extent in (*x.shape, k))
    if x.device.type == "cpu" or x.dtype.is_complex or not (known and x.dim()):
        return NotImplemented
    if not 0 < k <= x.shape[dim] or x.numel() * x.shape[dim] > PAIRS:
        return NotImplemented
    rows = x.movedim(dim, -1)
    values, indices = chosen(rows, places(rows, largest), k)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


def places(rows: Any, largest: bool = False) -> Any:
    """Return where each element of ``rows[..., n]`` stands once rows are sorted stably."""
    at = torch.arange(rows.shape[-1], device=rows.device)
    one, other = rows.unsqueeze(-1), rows.unsqueeze(-2)
    ahead, behind = (other, one) if largest else (one, other)
    before, same = ahead > behind, other == one
    if rows.is_floating_point():  # NaN, which differs from itself, is greater than all else
        before = before | ((ahead != ahead) & (behind == behind))
        same = same | ((one != one) & (other != other))
    return (before | (same & (at < at.unsqueeze(-1)))).sum(-1)


def chosen(rows: Any, place: Any, k: int) -> tuple[Any, Any]:
    """Return the elements of ``rows[..., n]`` whose places are the first k, and where they were."""
    at = torch.arange(rows.shape[-1], device=rows.device)
    here = place.unsqueeze(-2) == at[:k].unsqueeze(-1)
    least = -torch.inf if rows.is_floating_point() else torch.iinfo(rows.dtype).min
    values = torch.where(here, rows.unsqueeze(-2), least).amax(-1)
    return values, torch.where(here, at, 0).sum(-1)
