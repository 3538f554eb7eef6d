"""``torch.topk`` of short rows and ``torch.argmax`` of long ones in comparisons, which are chains on a GPU.

A library's kernel selects and then sorts, in launches of their own; the router of a mixture of experts asks
for a few of at most some hundred scores. Its argmax gives a row to one block, however long the row is; who
decodes greedily asks for the largest of a vocabulary's logits.
"""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
from torch.nn import _reduction

MOST_PAIRS = 1 << 20
"""Most pairs of elements that are compared: those of 16 rows of 256 scores, as in DeepSeek-V3's routers."""

MOST_TAKEN = 10
"""Most elements that are taken one after another: each costs two reductions of a row."""

MOST_ROWS, LEAST_ELEMENTS, MOST_ELEMENTS, LEAST_PARTS = 16, 4096, 1 << 30, 64
"""Limits of `argmax` by parts: most rows, least and most elements of a row, least parts of a row."""


def topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Return the k largest (or smallest) along an axis in order, and where they were.

    NaN counts as the largest, as torch has it; of equal ones the first comes first, which torch leaves open.

    Returns: (values, indices); NotImplemented, on which torch's operator stays, on CPUs, for many or long
        rows and for open extents.
    """
    known = all(isinstance(extent, int) for extent in (*x.shape, k))
    if x.device.type == "cpu" or x.dtype.is_complex or not (known and x.dim()):
        return NotImplemented
    if not 0 < k <= x.shape[dim] or x.numel() * x.shape[dim] > MOST_PAIRS:
        return NotImplemented
    rows = x.movedim(dim, -1)
    if largest and k <= MOST_TAKEN and rows.is_floating_point():
        values, indices = taken(rows, k)
    else:
        values, indices = chosen(rows, places(rows, largest), k)
    return values.movedim(-1, dim), indices.movedim(-1, dim)


def argmax(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """Return where the largest element along an axis is, found among those of the parts of a row.

    NaN counts as the largest; of equal ones the first. Rows that do not divide are filled up.

    Returns: NotImplemented, on which torch's operator stays (or raises, of bool), on CPUs, for many or short
        rows and for open extents.
    """
    known = all(isinstance(extent, int) for extent in x.shape)
    if x.device.type == "cpu" or x.dtype is torch.bool or not (known and x.dim()):
        return NotImplemented
    rows = x.flatten() if dim is None else x.movedim(dim, -1)
    extent = rows.shape[-1]
    if not LEAST_ELEMENTS <= extent <= MOST_ELEMENTS or not 0 < x.numel() <= MOST_ROWS * extent:
        return NotImplemented
    least = isqrt(extent)
    width = next((each for each in range(least, extent // LEAST_PARTS + 1) if extent % each == 0), least)
    found = by_parts(rows, width)
    if not keepdim:
        return found
    return found.reshape([1] * x.dim()) if dim is None else found.unsqueeze(dim)


def by_parts(rows: Any, width: int) -> Any:
    """Return where the largest of ``rows[..., n]`` are, among those of parts of ``width`` elements."""
    extent = rows.shape[-1]
    if further := -extent % width:
        rows = torch.nn.functional.pad(rows, (0, further), value=smallest(rows))
    parts = rows.unflatten(-1, (-1, width))
    largest = parts.amax(-1)
    at = torch.arange(extent + further, dtype=torch.int32, device=rows.device).view(-1, width)
    first = first_largest(parts, largest, at)
    return first_largest(largest, largest.amax(-1), first).long()


def smallest(rows: Any) -> float:
    """Return what no element of ``rows`` is less than, NaN aside."""
    return -torch.inf if rows.is_floating_point() else torch.iinfo(rows.dtype).min


def taken(rows: Any, k: int) -> tuple[Any, Any]:
    """Return the k largest elements of ``rows[..., n]`` and where they were, one taken after the other.

    What was taken is -inf from then on, and has no place: it is not taken again.
    """
    extent = rows.shape[-1]
    left = torch.arange(extent - 1, -1, -1, dtype=torch.int32, device=rows.device)  # the first is largest
    strange, values, found = rows != rows, [], []
    for _ in range(k):
        value = rows.amax(-1, True)  # NaN if there is one
        at = torch.where((rows == value) | strange, left, -1).amax(-1, True)
        rows, left = torch.where(left == at, -torch.inf, rows), torch.where(left == at, -1, left)
        values.append(value)
        found.append(at)
    return torch.cat(values, -1), extent - 1 - torch.cat(found, -1).long()


def first_largest(rows: Any, largest: Any, at: Any) -> Any:
    """Return the least of ``at`` where ``rows[..., n]`` is its largest element or NaN."""
    here = rows == largest.unsqueeze(-1)
    if rows.is_floating_point():
        here = here | (rows != rows)
    return torch.where(here, at, torch.iinfo(at.dtype).max).amin(-1)


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
    values = torch.where(here, rows.unsqueeze(-2), smallest(rows)).amax(-1)
    return values, torch.where(here, at, 0).sum(-1)


def multi_margin_loss(
    x: Any, target: Any, p: int = 1, margin: float = 1, weight: Any = None, reduction: int = 1
) -> Any:
    """Return ``torch.nn.functional.multi_margin_loss``, in which only distances above 0 count, and no NaN.

    x: Scores ``[rows, classes]`` or ``[classes]``; target: the class of each row.
    reduction: Of the rows' losses: 0 for none, 1 for their mean, 2 for their sum.
    """
    rows, index = x if x.dim() > 1 else x[None], target.reshape(-1, 1)
    distance = margin - rows.gather(1, index) + rows
    other = torch.arange(rows.shape[1], device=x.device) != index
    loss = distance if p == 1 else distance * distance
    loss = loss if weight is None else loss * weight[index]
    loss = torch.where((distance > 0) & other, loss, 0).mean(1)
    if reduction:
        return loss.mean() if reduction == 1 else loss.sum()
    return loss if x.dim() > 1 else loss.reshape(target.shape)


def _named_margin_loss(
    x: Any, target: Any, p: int = 1, margin: float = 1, weight: Any = None,
    size_average: Any = None, reduce: Any = None, reduction: str = "mean",
) -> Any:  # fmt: skip
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce, emit_warning=False)
    return multi_margin_loss(x, target, p, margin, weight, _reduction.get_enum(reduction))


MARGIN_LOSSES = {
    torch.nn.functional.multi_margin_loss: _named_margin_loss,
    torch._C._nn.multi_margin_loss: multi_margin_loss,
    torch.ops.aten.multi_margin_loss.default: multi_margin_loss,
}
"""Names of the loss over several classes -> what computes it."""
